"""Held-out loss: streaming sums, nothing kept."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from shardwise.data.loader import Batch
from shardwise.engine.loss_head import token_loss
from shardwise.state.live import reshard
from shardwise.train.signals import StopSignal
from shardwise.train.step import global_sum


@torch.no_grad()
def held_out_loss(
    model: nn.Module, batches: Iterable[Batch], *, stop: StopSignal, device: torch.device
) -> float | None:
    """Return the mean loss over all trained tokens of all ranks' batches; None when the run was asked to stop.

    Every rank passes the same number of batches.
    """
    was_training = model.training
    model.eval()
    loss, tokens = torch.zeros((), dtype=torch.float64, device=device), 0
    stopped = False
    for batch in batches:
        stopped = stop.agreed(device)
        if stopped:
            break
        batch = batch.to(device)
        loss += token_loss(model, batch)
        tokens += batch.trained_tokens
    reshard(model)
    model.train(was_training)
    if stopped:
        return None
    total, count = global_sum([float(loss), tokens], device)
    return total / count
