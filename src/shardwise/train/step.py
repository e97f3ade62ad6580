"""One optimizer step: forwards and backwards of this rank's micro-batches, clipping, update."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from shardwise.data.loader import Batch
from shardwise.engine import scaler as scaling
from shardwise.engine.accumulation import Accumulation
from shardwise.engine.clip import clip_gradients
from shardwise.engine.micro_batch import run_micro_batch
from shardwise.spec.plan import Mesh, Plan
from shardwise.state import random_state
from shardwise.train.checks import NotFinite, TrainingFailed, find_not_finite, finite
from shardwise.train.signals import StopSignal

__all__ = ["StepResult", "TrainingFailed", "training_step"]


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """What one optimizer step did, equal on all ranks."""

    loss: float
    """Sum of token losses / trained tokens, over the global batch."""
    grad_norm: float
    """Global gradient norm before clipping; not finite when an fp16 step overflowed."""
    trained_tokens: int
    """Tokens with a label in the global batch."""
    input_tokens: int
    """Tokens that went through the model, padding excluded, in the global batch."""
    skipped: bool
    """The update was left out because a gradient overflowed in fp16."""
    scale: float
    """Loss scale after the step; 1 without scaling."""


def global_sum(values: Sequence[int | float], device: torch.device) -> list[float]:
    """Return the sums over all ranks of a few numbers."""
    total = torch.tensor(list(values), dtype=torch.float64, device=device)
    dist.all_reduce(total)
    return [float(value) for value in total.tolist()]


def data_sum(values: Sequence[int | float], mesh: Mesh, device: torch.device) -> list[float]:
    """Return the sums over all data ranks: ranks of one tensor group saw the same rows and count once."""
    return [value / mesh.tensor for value in global_sum(values, device)]


def training_step(
    model: nn.Module,
    micro_batches: Sequence[Batch],
    *,
    plan: Plan,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
    max_grad_norm: float | None,
    device: torch.device,
    stop: StopSignal | None = None,
) -> StepResult | None:
    """Run one optimizer step; every rank calls it with its own micro-batches of the same global batch.

    With `stop`, ranks agree before each further micro-batch whether to go on; when asked to stop they give the step up,
    leave weights, optimizer and random state as they were before it, and get None.

    The count of trained tokens is known before the first forward, so every micro-batch's loss is already its share of
    the global mean, whenever gradients are reduced.

    Raises:
        TrainingFailed: no token is trained.
        NotFinite: the loss is not finite, or a gradient is not and loss scaling cannot mend it.
    """
    generators = random_state.capture() if stop is not None else None
    trained, inputs = data_sum(
        [sum(b.trained_tokens for b in micro_batches), sum(b.tokens for b in micro_batches)], plan.mesh, device
    )
    if trained == 0:
        raise TrainingFailed("a global batch has no token to learn")
    optimizer.zero_grad(set_to_none=True)
    accumulation = Accumulation(model, plan, len(micro_batches))
    losses: list[torch.Tensor] = []
    for number, batch in enumerate(micro_batches):
        if number > 0 and stop is not None and generators is not None and stop.agreed(device):
            accumulation.abandon()
            optimizer.zero_grad(set_to_none=True)
            random_state.restore(generators)
            return None
        losses.append(
            run_micro_batch(model, batch.to(device), number, accumulation=accumulation, scaler=scaler, trained=trained)
        )
    scaling.unscale(scaler, optimizer)
    norm = float(clip_gradients(model.parameters(), max_grad_norm))
    (loss_value,) = data_sum([sum(loss.item() for loss in losses)], plan.mesh, device)
    if not finite(loss_value) or not (finite(norm) or scaler.is_enabled()):
        raise NotFinite(loss_value, norm, find_not_finite([loss.item() for loss in losses]))
    skipped = scaling.step(scaler, optimizer)
    return StepResult(
        loss=loss_value,
        grad_norm=norm,
        trained_tokens=int(trained),
        input_tokens=int(inputs),
        skipped=skipped,
        scale=float(scaler.get_scale()) if scaler.is_enabled() else 1.0,
    )
