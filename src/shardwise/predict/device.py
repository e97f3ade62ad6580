"""What a card shows beyond what tensors occupy: the allocator's reserve, CUDA's context, NCCL's communicators."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from shardwise.predict.constants import (
    ALLOCATOR_BUFFERS,
    ALLOCATOR_FACTOR,
    CUDA_CONTEXT,
    FRAGMENTATION,
    NCCL_CHANNEL,
    NCCL_CHANNELS,
    Constant,
)
from shardwise.spec.cluster import Cluster
from shardwise.spec.footprint import DeviceMemory, Interval, Term
from shardwise.spec.plan import Plan

SEGMENT = 2 * 2**20
"""The caching allocator asks the driver for multiples of this."""


def device_memory(
    allocated: int,
    plan: Plan,
    cluster: Cluster,
    *,
    largest_buffer: int = 0,
    values: Mapping[str, float] | None = None,
) -> DeviceMemory:
    """Return what one card of `cluster` holds when tensors occupy `allocated` bytes at the peak.

    reserved = allocated x ALLOCATOR_FACTOR + largest_buffer x ALLOCATOR_BUFFERS, in whole segments;
    total = reserved + CUDA_CONTEXT + communicators x channels x NCCL_CHANNEL, cut at the card's limit where it fits;
    needed = allocated x FRAGMENTATION + the same besides.

    The intervals add the constants' bounds as independent errors: the root of the sum of their squares.

    Args:
        allocated: Bytes that tensors occupy at the peak (`Footprint.peak.allocated`).
        plan: Its mesh says which communicators there are.
        cluster: Of GPUs; with CPU processes reserved is what is allocated, and nothing comes on top.
        largest_buffer: Bytes of the largest contiguous buffer.
        values: Constants by name, in the place of those of `predict.constants`.
    """
    if cluster.gpu is None:
        exact = Interval(low=allocated, value=allocated, high=allocated)
        tensors = Term(name="tensors", bytes=allocated, source="estimated")
        return DeviceMemory(reserved=exact, total=exact, needed=exact, terms=(tensors,), limit=None)
    limit = cluster.gpu.usable.bytes
    count = sum(communicators(plan).values())
    channels = NCCL_CHANNELS[cluster.gpu.link or "nvlink"]
    context, nccl = _part(CUDA_CONTEXT, 1, values), _part(NCCL_CHANNEL, count * channels, values)
    beside = round(context[1]) + round(nccl[1])
    needed = _interval(_sum(_part(FRAGMENTATION, allocated, values), context, nccl))
    reserve = _sum(_part(ALLOCATOR_FACTOR, allocated, values), _part(ALLOCATOR_BUFFERS, largest_buffer, values))
    reserved, total = _interval(reserve), _interval(_sum(reserve, context, nccl))
    if needed.value <= limit < total.value:
        reserved = replace(reserved, low=min(reserved.low, limit - beside), value=limit - beside)
        total = replace(total, low=min(total.low, limit), value=limit)
    of_nccl = f"{count} x {channels} channels: {NCCL_CHANNEL.source}"
    held = total.value - beside - allocated
    return DeviceMemory(
        reserved=reserved,
        total=total,
        needed=needed,
        terms=(
            Term(name="tensors", bytes=allocated, source="estimated"),
            Term(name="held by the allocator", bytes=held, source=f"estimated: {ALLOCATOR_FACTOR.source}"),
            Term(name="CUDA context", bytes=round(context[1]), source=f"measured: {CUDA_CONTEXT.source}"),
            Term(name="NCCL communicators", bytes=round(nccl[1]), source=f"measured: {of_nccl}"),
        ),
        limit=limit,
    )


def communicators(plan: Plan) -> dict[str, int]:
    """Return the NCCL communicators that a rank uses, by axis; axes of one rank have none.

    All ranks share one (counts, losses), which is that of an axis that holds them all. Units that stay sharded over
    groups of k ranks after forward have one together (`shard/<k>`). Checkpoints and other agreements go over gloo.
    """
    mesh = plan.mesh
    if mesh.world == 1:
        return {}
    sizes = {"shard": mesh.shard, "replicate": mesh.replicate, "tensor": mesh.tensor}
    found = {axis: 1 for axis, size in sizes.items() if size > 1}
    if mesh.world not in sizes.values():
        found["world"] = 1
    if plan.reduce_scatter.separate_group and mesh.shard > 1:
        found["reduce_scatter"] = 1
    if not isinstance(plan.reshard_after_forward, bool):
        found[f"shard/{plan.reshard_after_forward}"] = 1
    return found


def _part(constant: Constant, times: int, values: Mapping[str, float] | None) -> tuple[float, float, float]:
    value = constant.value if values is None else values.get(constant.name, constant.value)
    return min(constant.low, value) * times, value * times, max(constant.high, value) * times


def _sum(*parts: tuple[float, float, float]) -> tuple[float, float, float]:
    """Add figures whose errors are independent."""
    value = sum(part[1] for part in parts)
    below = math.sqrt(sum((part[1] - part[0]) ** 2 for part in parts))
    above = math.sqrt(sum((part[2] - part[1]) ** 2 for part in parts))
    return value - below, value, value + above


def _interval(part: tuple[float, float, float]) -> Interval:
    low, value, high = (_whole_segments(bound) for bound in part)
    return Interval(low=low, value=value, high=high)


def _whole_segments(size: float) -> int:
    return math.ceil(size / SEGMENT) * SEGMENT
