"""The loss: one definition for every layout and every loss head.

loss = sum of the token losses of the whole global batch / number of its trained tokens, over all ranks and
micro-batches. A mean of per-rank means would weigh tokens differently wherever label counts differ.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

IGNORED = -100
"""Label of a token that is not trained."""


def token_loss_sum(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the summed cross-entropy of predicting each label from the position before it.

    Args:
        logits: [rows, length, vocab], any floating dtype; computed in fp32.
        labels: [rows, length], aligned with the inputs; -100 where nothing is learnt.

    Returns:
        A scalar in fp32; 0 (with zero gradients) when no token is trained.
    """
    vocab = logits.shape[-1]
    return summed_cross_entropy(logits[:, :-1].reshape(-1, vocab), labels[:, 1:].reshape(-1))


def summed_cross_entropy(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the sum over tokens of the fp32 cross-entropy of `logits` [tokens, vocab]; targets of -100 count 0."""
    return F.cross_entropy(logits.float(), targets, ignore_index=IGNORED, reduction="sum")
