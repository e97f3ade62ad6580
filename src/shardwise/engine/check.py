"""What can be said of a plan before any rank starts: packages, kernels, releases, sizes."""

from __future__ import annotations

from torch import nn

from shardwise.engine.compat import check_release
from shardwise.engine.loss_head import check_loss_head
from shardwise.engine.optimizer import check_optimizer
from shardwise.engine.tp_check import check_tensor_parallel
from shardwise.spec.plan import Plan


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
    return check_tensor_parallel(model, plan.mesh)
