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
from shardwise.spec.plan_rules import broken_rules
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
    _check_rules(plan, device_type)
    check_release(plan)
    check_optimizer(plan)
    check_loss_head(plan, device_type)
    _check_compiler(plan, device_type)
    _check_inner_units(model, plan)
    return check_tensor_parallel(model, plan.mesh)


def _check_rules(plan: Plan, device_type: str) -> None:
    problems = tuple(broken_rules(plan, device_type))
    if problems:
        raise BadInput(problems)


def _check_compiler(plan: Plan, device_type: str) -> None:
    here = any(shutil.which(name) for name in (os.environ.get("CXX", "g++"), "clang++"))
    if plan.compile and device_type == "cpu" and not here:
        reason = "torch.compile makes C++ code for CPUs, and there is no compiler here"
        fix = "install g++, or set compile: false"
        raise BadInput(Problem(field="compile", value=True, reason=reason, fix=fix))


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
