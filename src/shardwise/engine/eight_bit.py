"""torchao's AdamW with 8-bit states: whether it is there, and its states as a checkpoint holds them.

A state of 4096 elements or more on a rank, in whole blocks of 256, is one byte an element and an fp32 scale a block;
any other stays whole. Blocks run over this rank's shard, so another sharding has other blocks. A checkpoint holds the
values in fp32, which any sharding can read, and the scales, with which the same sharding gets its codes back.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Mapping
from typing import Any, cast

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard

from shardwise.engine.resting_state import COUNTER
from shardwise.engine.shards import local

BLOCK = 256
"""Elements that share a scale."""
SMALLEST = 4096
"""Elements of a shard from which on its states are kept in 8 bits."""
CLASS = "AdamW8bit"
"""Name of the class in torchao."""

_SCALE = "_scale"


def installed() -> bool:
    """Whether torchao is there; it is not imported."""
    return importlib.util.find_spec("torchao") is not None


def build(groups: list[dict[str, Any]], learning_rate: float) -> torch.optim.Optimizer:
    """Return torchao's AdamW8bit over parameter groups."""
    from torchao.optim import AdamW8bit

    optimizer: torch.optim.Optimizer = AdamW8bit(groups, lr=learning_rate, block_size=BLOCK)
    return optimizer


def saved_form(parameter: torch.Tensor, state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return a parameter's state as a checkpoint holds it: values in fp32, and scales, on the host.

    Keys and global shapes are the same on every rank, whichever ranks keep the state in 8 bits.
    """
    found: dict[str, torch.Tensor] = {}
    for key, value in state.items():
        if key == COUNTER:
            found[key] = value
            continue
        held = local(value)
        found[key] = torch.empty_like(parameter, device="cpu", requires_grad=False)
        local(found[key]).copy_(held.dequantize() if _is_eight_bit(held) else held)
        if scale_shape(parameter) is not None:
            found[key + _SCALE] = _scales(parameter, held)
    return found


def live_form(parameter: torch.Tensor, saved: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return a state as the optimizer holds it, from its saved form: `saved_form` backwards.

    With the scales of this sharding the codes are those that were saved. Scales of another one do not give the saved
    values back, and the values are then quantised anew.
    """
    found: dict[str, torch.Tensor] = {}
    for key, value in saved.items():
        if key.endswith(_SCALE):
            continue
        if key == COUNTER:
            found[key] = value
            continue
        values = local(value).to(parameter.device)
        scales = saved.get(key + _SCALE)
        held = _quantised(values, None if scales is None else local(scales), signed=key == "exp_avg")
        found[key] = _as_sharded(parameter, held)
    return found


def scale_shape(parameter: torch.Tensor) -> tuple[int, ...] | None:
    """Return the global shape of a state's scales; None when no rank keeps 8 bits of this parameter."""
    longest = _scales_per_rank(parameter)
    if longest * BLOCK < SMALLEST:
        return None
    return (longest * math.prod(ranks for ranks, _ in _splits(parameter)),)


def is_scale(key: str) -> bool:
    """Whether a key of the saved form names scales."""
    return key.endswith(_SCALE)


def empty_scales(parameter: torch.Tensor) -> torch.Tensor:
    """Return a place to load the scales of this sharding into."""
    return _scales(parameter, torch.empty(0))


def _is_eight_bit(held: torch.Tensor) -> bool:
    return hasattr(held, "codes")


def _scales(parameter: torch.Tensor, held: torch.Tensor) -> torch.Tensor:
    padded = torch.zeros(_scales_per_rank(parameter))
    if _is_eight_bit(held):
        scale: torch.Tensor = cast(Any, held).scale
        padded[: scale.numel()].copy_(scale)
    if not isinstance(parameter, DTensor):
        return padded
    placements = [Replicate() if placement.is_replicate() else Shard(0) for placement in parameter.placements]
    return DTensor.from_local(padded, parameter.device_mesh, placements, run_check=False)


def _scales_per_rank(parameter: torch.Tensor) -> int:
    """Blocks of the largest shard, the same number on every rank."""
    sizes = list(parameter.shape)
    for ranks, dim in _splits(parameter):
        sizes[dim] = math.ceil(sizes[dim] / ranks)
    return math.prod(sizes) // BLOCK


def _splits(parameter: torch.Tensor) -> list[tuple[int, int]]:
    """Return (ranks, dim) of every mesh axis over which a parameter is sharded."""
    if not isinstance(parameter, DTensor):
        return []
    axes = zip(parameter.device_mesh.shape, parameter.placements, strict=True)
    return [(ranks, cast(Any, placement).dim) for ranks, placement in axes if not placement.is_replicate()]


def _as_sharded(parameter: torch.Tensor, held: torch.Tensor) -> torch.Tensor:
    if not isinstance(parameter, DTensor):
        return held
    sharded = DTensor.from_local(
        held,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
    return sharded.to(parameter.device)


def _quantised(values: torch.Tensor, scales: torch.Tensor | None, *, signed: bool) -> torch.Tensor:
    """Return values in 8 bits where torchao would keep them so; with `scales` when these fit."""
    from torchao.optim.quant_utils import quantize_8bit_with_qmap
    from torchao.optim.subclass_8bit import OptimState8bit

    if values.numel() < SMALLEST or values.numel() % BLOCK:
        return values
    state: Any = OptimState8bit.zeros(values.shape, signed, BLOCK, values.device)
    if scales is not None:
        scale = scales[: values.numel() // BLOCK].to(values.device)
        codes = quantize_8bit_with_qmap((values.view(-1, BLOCK) / scale.view(-1, 1)).view(values.shape), state.qmap)
        kept: torch.Tensor = OptimState8bit(codes, scale.clone(), state.qmap, signed)
        if torch.equal(kept.dequantize(), values):
            return kept
    state.copy_(values)
    return cast(torch.Tensor, state)
