"""Clipping by the true global gradient norm."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Replicate
from torch.nn.utils import clip_grads_with_norm_

from shardwise.engine.shards import local


def clip_gradients(parameters: Iterable[torch.nn.Parameter], max_norm: float | None) -> torch.Tensor:
    """Scale gradients so that their global L2 norm is at most `max_norm`; returns the norm before clipping.

    Every rank takes part. Gradients may lie on several meshes: each is summed over the axes that split it and counted
    once on those that repeat it. The norm is a plain fp32 scalar, equal on all ranks. `max_norm=None` only measures.
    """
    groups: dict[tuple[object, tuple[int, ...]], list[torch.nn.Parameter]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            groups.setdefault(_split_over(parameter.grad), []).append(parameter)
    norms = [_norm([p.grad for p in group if p.grad is not None], key[1]) for key, group in groups.items()]
    norm = torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.zeros(())
    if max_norm is not None:
        for group in groups.values():
            clip_grads_with_norm_(group, max_norm, norm)
    return norm


def _split_over(gradient: torch.Tensor) -> tuple[object, tuple[int, ...]]:
    """Return the mesh of a gradient and those of its axes that hold different parts of it."""
    if not isinstance(gradient, DTensor):
        return None, ()
    mesh = gradient.device_mesh
    split = (axis for axis, placement in enumerate(gradient.placements) if placement != Replicate())
    return mesh, tuple(axis for axis in split if mesh.size(axis) > 1)


def _norm(gradients: list[torch.Tensor], axes: tuple[int, ...]) -> torch.Tensor:
    """Return the norm of whole gradients that lie the same way on one mesh."""
    first = gradients[0]
    norms = [torch.linalg.vector_norm(local(gradient), dtype=torch.float32) for gradient in gradients]
    norm: torch.Tensor = torch.linalg.vector_norm(torch.stack(norms))
    if not isinstance(first, DTensor):
        return norm
    square = norm.square().to(first.device_mesh.device_type)
    for axis in axes:
        dist.all_reduce(square, group=first.device_mesh.get_group(axis))
    return torch.sqrt(square)
