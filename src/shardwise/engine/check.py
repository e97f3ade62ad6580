"""What can be said of a plan before any rank starts: packages, kernels, releases, sizes."""

from __future__ import annotations

import os
import shutil

from torch import nn

from shardwise.engine.compat import check_release
from shardwise.engine.loss_head import check_loss_head
from shardwise.engine.optimizer import check_optimizer
from shardwise.engine.tp_check import check_tensor_parallel
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
