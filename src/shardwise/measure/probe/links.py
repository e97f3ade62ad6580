"""How fast collectives are in every shape of group that a mesh may make, and what they cost those who compute.

On CPUs they are shardwise's own: the exchange that gathers weights and the exchange that brings gradients together.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from typing import get_args

import torch
import torch.distributed as dist

from shardwise.engine.compat import all_gather
from shardwise.engine.exchange import REDUCE_TAG, exchange
from shardwise.engine.gathers import ExchangedGather
from shardwise.measure.probe.compute import mixed_work
from shardwise.measure.probe.team import Shape, Team, shapes
from shardwise.measure.probe.timing import Body, Limits, Timing, climb, host_clock, powers, seconds_of
from shardwise.spec.speeds import TimedKind

ITEM = 4
"""Bytes of an element: what is exchanged is fp32."""
FIRST_BYTES = 1 << 10
"""Smallest payload."""
POSTED_BYTES = {"cpu": 1 << 20, "cuda": 1 << 26}
"""Payload of the exchanges that run beside a computation, by device."""
MOST_POSTED = 64
"""Exchanges under way at once at most."""
COMPUTED_S = 0.1
"""Seconds of the computation that is disturbed, at most half of those that the exchanges take."""


@dataclass(frozen=True, kw_only=True)
class Timed:
    """One collective in groups of one shape."""

    kind: TimedKind
    """What it is."""
    shape: Shape
    """Of its groups, all of which work at once."""
    timings: tuple[Timing, ...]
    """By payload in bytes, all shards together."""


@dataclass(frozen=True, kw_only=True)
class Disturbance:
    """What a collective under way costs the rank that computes."""

    slowdown: float
    """Factor on the seconds of computing, at least 1."""
    post_s: float
    """Seconds of the host for starting one collective."""


def collectives(team: Team, limits: Limits) -> tuple[Timed, ...]:
    """Time every kind of collective in every shape of group. Collective."""
    found = []
    for shape in shapes(team.nodes, team.per_node):
        group = team.group(shape)
        for kind in get_args(TimedKind):
            found.append(Timed(kind=kind, shape=shape, timings=collective(kind, group, team, limits)))
    return tuple(found)


def collective(kind: TimedKind, group: dist.ProcessGroup, team: Team, limits: Limits) -> tuple[Timing, ...]:
    """Time one kind in this rank's group while all other groups do the same. Collective."""

    def prepare(size: float) -> tuple[Body, float]:
        shard = max(1, int(size) // ITEM // group.size())
        return _body(kind, shard, group, team.device), float(shard * ITEM * group.size())

    return climb(powers(FIRST_BYTES, limits.most_bytes, 4), prepare, team, limits)


def _body(kind: TimedKind, shard: int, group: dist.ProcessGroup, device: torch.device) -> Body:
    """Return one collective over `group.size()` shards of so many elements, which blocks (on GPUs: its stream)."""
    whole, part = torch.zeros(shard * group.size(), device=device), torch.zeros(shard, device=device)
    if kind == "all_reduce":
        return lambda: dist.all_reduce(whole, group=group)
    if kind == "all_gather":
        return lambda: _gather(whole, part, group, wait=True)
    if device.type == "cuda":
        return lambda: dist.reduce_scatter_tensor(part, whole, group=group)
    parts, received = whole.view(group.size(), -1).unbind(), torch.empty_like(whole).view(group.size(), -1).unbind()
    return lambda: exchange(parts, received, group, REDUCE_TAG).wait()


def _gather(whole: torch.Tensor, part: torch.Tensor, group: dist.ProcessGroup, *, wait: bool) -> dist.Work | None:
    """Gather as a unit's weights are."""
    if whole.device.type == "cuda":
        return all_gather(whole, part, group, async_op=not wait)
    return ExchangedGather()(whole, part, group, async_op=not wait)


def disturbance(team: Team, limits: Limits) -> Disturbance:
    """Measure what computing loses while gathers over all ranks are under way, back to back. Collective."""
    shard = POSTED_BYTES[team.device.type] // ITEM // team.world
    group = team.group(Shape(team.nodes, team.per_node))
    gather = _body("all_gather", shard, group, team.device)
    gather()
    once = mixed_work(team)
    once()
    (one_piece, one_gather) = team.slowest([seconds_of(once, 3, team.device), seconds_of(gather, 3, team.device)])
    posted = min(MOST_POSTED, math.ceil(2 * COMPUTED_S / one_gather))
    pieces = max(1, int(min(COMPUTED_S, posted * one_gather / 2) / one_piece))
    alone, beside, post = [], [], []
    for _ in range(limits.repeats):
        team.barrier()
        alone.append(seconds_of(once, pieces, team.device) * pieces)
        team.barrier()
        seconds, started = _beside(once, pieces, shard, posted, group, team)
        beside.append(seconds)
        post.append(started)
    factor = statistics.median(b / a for a, b in zip(team.slowest(alone), team.slowest(beside), strict=True))
    return Disturbance(slowdown=max(1.0, factor), post_s=statistics.median(team.slowest(post)))


def _beside(
    once: Body, pieces: int, shard: int, posted: int, group: dist.ProcessGroup, team: Team
) -> tuple[float, float]:
    """Return the seconds of a computation beside gathers, and those of starting one gather."""
    wholes = [torch.zeros(shard * group.size(), device=team.device) for _ in range(posted)]
    part = torch.zeros(shard, device=team.device)
    clock = host_clock(team.device)
    started = clock()
    works = [_gather(whole, part, group, wait=False) for whole in wholes]
    post = (clock() - started) / posted
    seconds = seconds_of(once, pieces, team.device) * pieces
    for work in works:
        if work is not None:
            work.wait()
    return seconds, post
