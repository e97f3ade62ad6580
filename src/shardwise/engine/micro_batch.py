"""Forward and backward of one micro-batch, the same for whoever trains, rehearses or traces."""

from __future__ import annotations

import torch
from torch import nn

from shardwise.engine.accumulation import Accumulation
from shardwise.engine.loss_head import LabelledTokens, token_loss


def run_micro_batch(
    model: nn.Module,
    batch: LabelledTokens,
    number: int,
    *,
    accumulation: Accumulation,
    scaler: torch.amp.GradScaler,
    trained: float,
) -> torch.Tensor:
    """Add one micro-batch's gradients to the step's; returns its share of the step's loss.

    Args:
        model: Sharded.
        batch: On the model's device.
        number: Place of the micro-batch in its step, counted from 0.
        accumulation: Of this step.
        scaler: Disabled unless the computation is in fp16.
        trained: Tokens with a label in the whole global batch.
    """
    accumulation.before(number)
    loss = token_loss(model, batch) / trained
    torch.autograd.backward(scaler.scale(loss))
    accumulation.after(number)
    return loss.detach()
