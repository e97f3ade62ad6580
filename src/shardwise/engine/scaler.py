"""Loss scaling for fp16 over sharded gradients: all ranks step, or none does."""

from __future__ import annotations

import torch

from shardwise.engine.compat import agree_on_overflow
from shardwise.spec.plan import Plan


def build_scaler(plan: Plan, device_type: str) -> torch.amp.GradScaler:
    """Return the plan's loss scaler; a disabled one when the computation is not in fp16."""
    return torch.amp.GradScaler(device_type, enabled=plan.dtypes.loss_scaling)


def unscale(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> None:
    """Divide gradients by the scale, in place, and share the overflow flag over all ranks."""
    if scaler.is_enabled():
        scaler.unscale_(optimizer)
        agree_on_overflow(scaler, optimizer)


def step(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> bool:
    """Step unless a gradient overflowed, and adapt the scale; returns whether the step was skipped."""
    if not scaler.is_enabled():
        optimizer.step()
        return False
    before = scaler.get_scale()
    scaler.step(optimizer)
    scaler.update()
    return scaler.get_scale() < before
