"""Seconds of one operation over rising sizes: repeats, their median and spread, by all ranks at once."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from shardwise.measure.probe.team import Team
from shardwise.spec.curve import Curve

Body = Callable[[], object]
"""Does the operation once."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """How long a probe may take for one point of a curve, and how large it may be."""

    most_s: float
    """No size is taken whose operation is expected to last longer than this, in seconds."""
    repeats: int
    """Measurements of one size, of which the median counts; at least 3."""
    point_s: float
    """Seconds that the repeats of one size may take together, as far as 3 of them do not take more."""
    least_s: float
    """Short operations are done again until a measurement lasts this long, in seconds."""
    most_bytes: int
    """Largest collective and copy."""
    most_side: int
    """Largest side of a weight in a matrix product."""


CPU = Limits(most_s=0.3, repeats=7, point_s=0.4, least_s=0.01, most_bytes=64 << 20, most_side=1024)
"""For processes on CPUs, which links of 200 Mbit/s may join."""
CUDA = Limits(most_s=0.2, repeats=9, point_s=0.5, least_s=0.005, most_bytes=1 << 30, most_side=8192)
"""For GPUs."""
MOST_AGAIN = 50
"""Operations of one measurement at most."""


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Seconds of one operation of one size."""

    size: float
    """Bytes or FLOPs."""
    seconds: float
    """Median over the repeats of the slowest rank's."""
    low: float
    """Least of them."""
    high: float
    """Most of them."""
    by_rank: tuple[float, ...]
    """Least seconds of every rank: what a busy machine disturbs least."""


def seconds_of(body: Body, again: int, device: torch.device) -> float:
    """Do something `again` times and return the seconds of one; on a GPU by its own clock."""
    if device.type == "cuda":
        begin, end = torch.Event(device, enable_timing=True), torch.Event(device, enable_timing=True)
        begin.record()
        for _ in range(again):
            body()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3 / again
    started = time.perf_counter()
    for _ in range(again):
        body()
    return (time.perf_counter() - started) / again


def host_clock(device: torch.device) -> Callable[[], float]:
    """Return the clock for what the host does for a device: on CPUs the thread's own seconds, as it waits for small
    exchanges too; on GPUs, where it waits for nothing and backward has a thread of its own, those on the wall."""
    return time.thread_time if device.type == "cpu" else time.perf_counter


def time_one(body: Body, size: float, team: Team, limits: Limits) -> Timing:
    """Time one operation, on all ranks at once. Collective."""
    body()
    team.barrier()
    (once,) = team.slowest([seconds_of(body, 1, team.device)])
    again = max(1, min(MOST_AGAIN, round(limits.least_s / max(once, 1e-9))))
    repeats = max(3, min(limits.repeats, int(limits.point_s / max(once * again, 1e-9))))
    mine = []
    for _ in range(repeats):
        team.barrier()
        mine.append(seconds_of(body, again, team.device))
    found = team.slowest(mine)
    return Timing(
        size=size,
        seconds=statistics.median(found),
        low=min(found),
        high=max(found),
        by_rank=team.everyone(min(mine)),
    )


def climb(
    sizes: Sequence[float], prepare: Callable[[float], tuple[Body, float]], team: Team, limits: Limits
) -> tuple[Timing, ...]:
    """Time an operation over rising sizes, as far as the limits let it. Collective.

    Args:
        sizes: What is asked for, ascending.
        prepare: Makes the operation of a size, and says its exact size.
        team: All ranks.
        limits: The first size is always taken; others while they are expected, by the rate of the last, to last no
            longer than `most_s`.
    """
    found: list[Timing] = []
    for size in sizes:
        if found and found[-1].seconds * size / found[-1].size > limits.most_s:
            break
        body, exact = prepare(size)
        found.append(time_one(body, exact, team, limits))
    return tuple(found)


def powers(first: float, last: float, factor: float) -> list[float]:
    """Return `first`, `first` x `factor` and so on, up to `last`."""
    sizes = [first]
    while sizes[-1] * factor <= last:
        sizes.append(sizes[-1] * factor)
    return sizes


def curve(timings: Sequence[Timing], source: str) -> Curve:
    """Return the curve through medians. What is larger takes no less time: a smaller size that took longer than a
    larger one was disturbed, and is given the larger one's seconds."""
    least = math.inf
    points = []
    for timing in reversed(timings):
        least = min(least, timing.seconds)
        points.append((timing.size, least))
    return Curve(points=tuple(reversed(points)), source=source)
