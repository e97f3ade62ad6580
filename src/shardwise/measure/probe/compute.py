"""How fast one device computes while all others of its machine do the same."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace

import torch
from torch.nn.functional import scaled_dot_product_attention

from shardwise.engine.dtypes import TORCH_DTYPE
from shardwise.measure.probe.team import Team
from shardwise.measure.probe.timing import Body, Limits, Timing, climb, powers, time_one
from shardwise.spec.strict import DTYPE_BYTES, Dtype

ROWS = 4
"""Rows of a product over the side of its weight: tokens of a micro-batch are more than a hidden size."""
DIRECTIONS = 3
"""Products of one linear layer: forward, gradient of the input, gradient of the weight."""
KEPT = 32
"""Results that stay alive, as activations do for backward."""
KEPT_BYTES = 1 << 29
"""Unless they take more than this together."""
TINY_OPERATIONS = 200
"""Operations on almost nothing in one measurement."""
ADAM_ELEMENTS = 4 << 20
"""Elements of the optimizer on the host."""


def products(dtype: Dtype, team: Team, limits: Limits) -> tuple[Timing, ...]:
    """Time matrix products [4n, n] x [n, n] by their FLOPs; seconds are the mean of a linear layer's three. Collective.

    A layout that one of the three does not like would otherwise be seen in forward or backward only.
    """

    def prepare(size: float) -> tuple[Body, float]:
        side = int(size)
        weight = torch.randn(side, side, dtype=TORCH_DTYPE[dtype], device=team.device)
        rows = torch.randn(ROWS * side, side, dtype=TORCH_DTYPE[dtype], device=team.device)
        gradient = torch.randn_like(rows)

        def body() -> None:
            torch.mm(rows, weight.t())
            torch.mm(gradient, weight)
            torch.mm(gradient.t(), rows)

        return body, float(side)

    return tuple(_flops(timing) for timing in _climb_sides(prepare, team, limits))


def _climb_sides(prepare: Callable[[float], tuple[Body, float]], team: Team, limits: Limits) -> list[Timing]:
    """Time sides of 8, 16, 32 ...: each is eight times the work of the one before."""
    found: list[Timing] = []
    for side in powers(8, limits.most_side, 2):
        if found and found[-1].seconds * 8 > limits.most_s * DIRECTIONS:
            break
        body, exact = prepare(side)
        found.append(time_one(body, exact, team, limits))
    return found


def _flops(timing: Timing) -> Timing:
    """Turn three products of a side into one of so many FLOPs."""
    return scaled(timing, size=2 * ROWS * timing.size**3, share=1 / DIRECTIONS)


def scaled(timing: Timing, *, size: float, share: float) -> Timing:
    """Return a share of what was timed, as the seconds of `size`."""
    return replace(
        timing,
        size=size,
        seconds=timing.seconds * share,
        low=timing.low * share,
        high=timing.high * share,
        by_rank=tuple(each * share for each in timing.by_rank),
    )


def attention(dtype: Dtype, team: Team, limits: Limits) -> tuple[Timing, ...]:
    """Time causal attention by the FLOPs that its kernel executes. Collective.

    Forward (two products) and backward (five) are timed together and put at half of their FLOPs and of their seconds,
    so that the seconds of both, each read from the curve, add up to what was measured.
    """
    rows, heads, width = (4, 4, 64) if team.device.type == "cpu" else (1, 32, 128)

    def prepare(size: float) -> tuple[Body, float]:
        length = round((size / (2 * 3.5 * rows * heads * width)) ** 0.5)
        gradient = torch.randn(rows, heads, length, width, dtype=TORCH_DTYPE[dtype], device=team.device)
        query, key, value = (torch.randn_like(gradient, requires_grad=True) for _ in range(3))

        def body() -> None:
            result = scaled_dot_product_attention(query, key, value, is_causal=True)
            torch.autograd.grad(result, (query, key, value), gradient)

        return body, 2 * 3.5 * rows * heads * width * length**2

    largest = 2 * 3.5 * rows * heads * width * 16384**2
    found = climb(powers(2 * 3.5 * rows * heads * width * 32**2, largest, 4), prepare, team, limits)
    return tuple(scaled(timing, size=timing.size / 2, share=0.5) for timing in found)


def memory(dtype: Dtype, team: Team, limits: Limits) -> tuple[Timing, ...]:
    """Time a pointwise operation by the bytes that it reads and writes together. Collective.

    One operand was just written, the other lies among the last 32 results, and the result is new: as in a model, whose
    small tensors find each other in the cache and whose activations of the last block do not.
    """

    def prepare(size: float) -> tuple[Body, float]:
        touched = 3 * DTYPE_BYTES[dtype]
        elements = max(1, int(size) // touched)
        count = max(2, min(KEPT, 3 * KEPT_BYTES // (touched * elements)))
        kept = deque(torch.ones(elements, dtype=TORCH_DTYPE[dtype], device=team.device) for _ in range(count))

        def body() -> None:
            kept.append(torch.mul(kept[-1], kept.popleft()))

        return body, float(touched * elements)

    return climb(powers(12 * 256, limits.most_bytes, 4), prepare, team, limits)


def issue_s(team: Team, limits: Limits) -> float:
    """Return the host seconds of one operation that computes next to nothing, recorded for backward. Collective."""
    first, factor = torch.ones(4, device=team.device, requires_grad=True), torch.ones(4, device=team.device)

    def once() -> float:
        if team.device.type == "cuda":
            torch.cuda.synchronize()
        started = time.perf_counter()
        value = first
        for _ in range(TINY_OPERATIONS):
            value = value * factor
        torch.autograd.grad(value.sum(), first)
        return (time.perf_counter() - started) / (2 * TINY_OPERATIONS)

    once()
    return statistics.median(team.slowest([once() for _ in range(limits.repeats)]))


def adam(team: Team, limits: Limits) -> Timing:
    """Time AdamW on the host per element, on all ranks at once: they share its cores and its memory. Collective."""
    weights = [torch.nn.Parameter(torch.randn(ADAM_ELEMENTS // 4)) for _ in range(4)]
    optimizer = torch.optim.AdamW(weights, lr=1e-4, fused=True)
    for weight in weights:
        weight.grad = torch.randn_like(weight)
    on_host = replace(team, device=torch.device("cpu"))
    timing = time_one(optimizer.step, ADAM_ELEMENTS, on_host, limits)
    return scaled(timing, size=1, share=1 / ADAM_ELEMENTS)


def host_link(team: Team, limits: Limits) -> tuple[Timing, ...]:
    """Time copies between device and pinned host memory by bytes, one way: the mean of both ways. Collective."""

    def prepare(size: float) -> tuple[Body, float]:
        here = torch.empty(int(size), dtype=torch.uint8, device=team.device)
        there = torch.empty(int(size), dtype=torch.uint8, pin_memory=True)

        def body() -> None:
            there.copy_(here, non_blocking=True)
            here.copy_(there, non_blocking=True)

        return body, size

    found = climb(powers(1 << 10, limits.most_bytes, 4), prepare, team, limits)
    return tuple(scaled(timing, size=timing.size, share=0.5) for timing in found)


def mixed_work(team: Team) -> Body:
    """Return a fixed piece of computing as blocks do it: matrix products and pointwise operations."""
    side, dtype = (256, torch.float32) if team.device.type == "cpu" else (2048, torch.float16)
    weight = torch.randn(side, side, dtype=dtype, device=team.device)
    rows = torch.randn(ROWS * side, side, dtype=dtype, device=team.device)
    factors = deque(torch.ones_like(rows) for _ in range(KEPT))

    def body() -> None:
        torch.mul(torch.mm(rows, weight), factors[0])
        factors.rotate()

    return body
