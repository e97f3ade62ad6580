"""What can be said of a plan before any rank starts: packages, kernels, releases, sizes."""

from __future__ import annotations

import os
import shutil

from torch import nn

from shardwise.engine.blocks import find_blocks
from shardwise.engine.compat import check_release
from shardwise.engine.loss_head import check_loss_head
from shardwise.engine.optimizer import check_optimizer
from shardwise.engine.tp_check import check_tensor_parallel
from shardwise.engine.units import plan_units
from shardwise.spec.plan import Plan
from shardwise.spec.problems import BadInput, Problem


def check_plan(model: nn.Module, plan: Plan, device_type: str) -> tuple[str, ...]:
    """Check that a plan can run here; returns notes for the user.

    Args:
        model: With its adapters, on the meta device, not sharded.
        plan: What is decided.
        device_type: `cuda` or `cpu`.

    Raises:
        BadInput: what cannot be, and what can instead.
    """
    check_release(plan)
    check_optimizer(plan)
    check_loss_head(plan, device_type)
    _check_compile(plan, device_type)
    _check_attention(plan)
    _check_inner_units(model, plan)
    return check_tensor_parallel(model, plan.mesh)


def _check_compile(plan: Plan, device_type: str) -> None:
    if not plan.compile:
        return
    reason = fix = ""
    if plan.mesh.tensor > 1:
        reason = "torch.compile cannot trace the layers that tensor parallelism splits"
        fix = "set compile: false, or remove mesh.tensor"
    elif device_type == "cpu" and not any(shutil.which(name) for name in (os.environ.get("CXX", "g++"), "clang++")):
        reason = "torch.compile makes C++ code for CPUs, and there is no compiler here"
        fix = "install g++, or set compile: false"
    if reason:
        raise BadInput(Problem(field="compile", value=True, reason=reason, fix=fix))


def _check_attention(plan: Plan) -> None:
    if plan.attention == "flash_attention_2" and plan.dtypes.param == "fp32":
        reason = "its kernels take bf16 and fp16 only, and weights are computed with in fp32"
        fix = "set mixed_precision: bf16, or attention: sdpa"
        raise BadInput(Problem(field="model.attention", value=plan.attention, reason=reason, fix=fix))


def _check_inner_units(model: nn.Module, plan: Plan) -> None:
    """Refuse what torch cannot do with units inside a block that is recomputed."""
    block = type(find_blocks(model).modules[0]).__name__
    inner = [unit for unit in plan_units(model, plan) if unit.checkpointed and type(unit.modules[0]).__name__ != block]
    if not inner:
        return
    instead = f"remove units.wrap, or set activation_checkpointing to {'full or ' if not plan.compile else ''}none"
    if plan.activation_checkpointing == "selective":
        reason = (
            "torch's selective mode records what FSDP2 does for units inside a block; a recompute does other things"
        )
        raise BadInput(Problem(field="activation_checkpointing", value="selective", reason=reason, fix=instead))
    if plan.compile and plan.activation_checkpointing in ("full", "every_1"):
        reason = "torch compiles nothing of a recomputed block whose layers are units"
        raise BadInput(Problem(field="compile", value=True, reason=reason, fix=instead))
