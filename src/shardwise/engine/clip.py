"""Clipping by the true global gradient norm."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm


def clip_gradients(parameters: Iterable[torch.nn.Parameter], max_norm: float | None) -> torch.Tensor:
    """Scale gradients so that their global L2 norm is at most `max_norm`; returns the norm before clipping.

    Every rank takes part. Shards are combined into the norm of the whole gradient, a plain scalar that is equal on all
    ranks. `max_norm=None` only measures.
    """
    trained = [p for p in parameters if p.grad is not None]
    norm = get_total_norm([p.grad for p in trained if p.grad is not None])
    if isinstance(norm, DTensor):
        norm = norm.full_tensor()
    if max_norm is not None:
        clip_grads_with_norm_(trained, max_norm, norm)
    return norm
