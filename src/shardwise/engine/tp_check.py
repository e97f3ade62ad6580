"""Sizes that a tensor axis has to divide, checked before any rank starts."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, cast

from torch import nn

from shardwise.engine.tensor_parallel import tensor_layout
from shardwise.engine.tp_plan import COLUMN, ROW, blocks_name, container, plain_model, sites, tensor_plan
from shardwise.spec.layout import Mesh
from shardwise.spec.problems import BadInput, Problem


def check_tensor_parallel(model: nn.Module, mesh: Mesh) -> tuple[str, ...]:
    """Check that a model, adapters included, can be split over the `tensor` axis; on any device, no rank needed.

    Returns what stays whole on every rank although it could be split, in words; nothing when `mesh.tensor` is 1.

    Raises:
        BadInput: a structure that cannot be split correctly, or sizes that `mesh.tensor` does not divide, with the
            numbers that do.
    """
    if mesh.tensor == 1:
        return ()
    sizes = dict(_sizes(model, mesh.tensor))
    common = math.gcd(*sizes.values())
    allowed = [ranks for ranks in range(1, common + 1) if common % ranks == 0]
    below = max(ranks for ranks in allowed if ranks < mesh.tensor or ranks == 1)
    wrong = [f"{what} ({size})" for what, size in sizes.items() if size % mesh.tensor]
    if wrong:
        raise BadInput(
            Problem(
                field="mesh.tensor",
                value=mesh.tensor,
                reason=f"does not divide {', '.join(wrong)}",
                allowed=", ".join(map(str, allowed)),
                fix=f"set mesh.tensor to {below}",
            )
        )
    return tensor_layout(model, mesh.tensor, sequence_parallel=mesh.sequence_parallel).notes


def _sizes(model: nn.Module, ranks: int) -> Iterator[tuple[str, int]]:
    """Yield (what, size) of everything that is cut into equal parts."""
    plain = plain_model(model)
    words, blocks = tensor_plan(model, ranks).words, blocks_name(plain)
    for site in sites(plain):
        word = words.get(site.name)
        if word not in COLUMN + ROW:
            continue
        base = cast(nn.Linear, site.base)
        last = site.name.rpartition(".")[2]
        holder = container(site.name, blocks)
        head = _head_size(plain.get_submodule(holder)) if holder is not None and word == "colwise" else None
        if head is not None:
            yield f"heads of {last}", _heads(plain, base.out_features, head)
        elif word in COLUMN:
            yield f"outputs of {last}", base.out_features
        else:
            yield f"inputs of {last}", base.in_features


def _head_size(attention: Any) -> int | None:
    """Return the size of one head of an attention module; None for other modules."""
    size = getattr(attention, "head_dim", None) or getattr(attention, "head_size", None)
    return size if isinstance(size, int) else None


def _heads(plain: Any, features: int, head_size: int) -> int:
    """Return how many heads a projection holds; in a fused one, three sizes make one head."""
    heads = features // head_size
    fused = heads == 3 * plain.config.num_attention_heads
    return heads // 3 if fused else heads
