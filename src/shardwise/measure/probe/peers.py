"""Pairs of ranks: which link, and which rank, is slower than the others."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from shardwise.measure.probe.team import Team
from shardwise.measure.probe.timing import Limits, seconds_of

TOLERANCE = 1.2
"""What takes longer than this many times the others' median is slow."""
MOST_ROUNDS = 7
"""Partners of one rank at most, on its machine and on others."""
FIRST_BYTES = 1 << 18
"""What a pair exchanges first, to learn how much it may exchange."""
EXCHANGE_S = 0.1
"""Seconds that the slowest pair may exchange for, about."""

Pair = tuple[int, int]
"""Two ranks, the lower first."""


@dataclass(frozen=True, kw_only=True)
class Pairs:
    """Exchanges of two ranks at a time."""

    bytes: int
    """What each sent to the other."""
    seconds: Mapping[Pair, float]
    """Least seconds of every pair that was tried."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Something that is slower than its like."""

    subject: str
    """`link` or `compute`, of a rank, or of a pair: what is slow."""
    ranks: tuple[int, ...]
    """One rank, or the two ends of a link."""
    factor: float
    """Its seconds over the median of the others."""
    text: str
    """The whole, for people, with figures."""


def rounds(places: int) -> list[list[Pair]]:
    """Return rounds in which every place meets another, at most seven; with all rounds everyone meets everyone.

    The circle method: the first place stands still and the others walk round it. Of an odd number one rests.
    """
    walkers = list(range(1, places + places % 2))
    found = []
    for _ in range(min(len(walkers), MOST_ROUNDS) if places > 1 else 0):
        circle = [0, *walkers]
        facing = zip(circle[: len(circle) // 2], reversed(circle), strict=False)
        found.append([(min(a, b), max(a, b)) for a, b in facing if max(a, b) < places])
        walkers = walkers[-1:] + walkers[:-1]
    return found


def pair_rounds(nodes: int, per_node: int) -> tuple[list[list[Pair]], list[list[Pair]]]:
    """Return rounds of pairs of ranks: inside machines, all machines at once; and between machines, where a rank meets
    the rank of its own place on another."""
    inside = [
        [(node * per_node + a, node * per_node + b) for node in range(nodes) for a, b in pairs]
        for pairs in rounds(per_node)
    ]
    between = [
        [(a * per_node + place, b * per_node + place) for place in range(per_node) for a, b in pairs]
        for pairs in rounds(nodes)
    ]
    return inside, between


def measure_pairs(schedule: Sequence[Sequence[Pair]], team: Team, limits: Limits) -> Pairs:
    """Let the pairs of each round exchange, both ways at once. Collective; the least of the repeats counts."""
    first = _tour(schedule, FIRST_BYTES, 1, team)
    slowest = max(first.values())
    size = min(limits.most_bytes, int(FIRST_BYTES * max(1.0, EXCHANGE_S / slowest)))
    return Pairs(bytes=size, seconds=_tour(schedule, size, limits.repeats, team))


def _tour(schedule: Sequence[Sequence[Pair]], size: int, repeats: int, team: Team) -> dict[Pair, float]:
    found: dict[Pair, float] = {}
    sent = torch.zeros(size, dtype=torch.uint8, device=team.device)
    received = torch.empty_like(sent)
    for pairs in schedule:
        partner = next((sum(pair) - team.rank for pair in pairs if team.rank in pair), None)
        mine = 0.0
        for number in range(repeats + 1):
            team.barrier()
            if partner is not None:
                other = partner
                seconds = seconds_of(lambda: _swap(sent, received, other), 1, team.device)  # noqa: B023
                mine = seconds if number < 2 else min(mine, seconds)
        by_rank = team.everyone(mine)
        found |= {pair: max(by_rank[rank] for rank in pair) for pair in pairs}
    return found


def _swap(sent: torch.Tensor, received: torch.Tensor, other: int) -> None:
    """Send to another rank and receive from it, as an exchange does: the receive is posted first."""
    receive, send = dist.P2POp(dist.irecv, received, other), dist.P2POp(dist.isend, sent, other)
    for work in dist.batch_isend_irecv([receive, send]):
        work.wait()


def slow_ranks(seconds: Mapping[int, float]) -> dict[int, float]:
    """Return every rank that takes more than 1.2 times the median of the others, with that factor."""
    found = {}
    for rank, mine in seconds.items():
        others = [value for other, value in seconds.items() if other != rank]
        if others and mine > TOLERANCE * statistics.median(others):
            found[rank] = mine / statistics.median(others)
    return found


def slow_links(pairs: Pairs, team: Team, where: str) -> list[Finding]:
    """Name ranks whose fastest link is slow, and among the others links that are.

    A rank that has several partners is judged by its best link: one slow partner does not make it slow.

    Args:
        pairs: What was measured.
        team: All ranks, for their names.
        where: `inside a host`, `between hosts`.
    """
    of_rank = {
        rank: [pairs.seconds[key] for key in pairs.seconds if rank in key] for pair in pairs.seconds for rank in pair
    }
    best = {rank: min(seconds) for rank, seconds in of_rank.items()}
    guilty = slow_ranks(best) if min(map(len, of_rank.values())) > 1 else {}
    found = []
    for rank, factor in sorted(guilty.items()):
        text = f"the link of {team.name(rank)} {where} is slow: {_rate(pairs.bytes, best[rank])} each way at best, "
        text += f"the others' {_rate(pairs.bytes, best[rank] / factor)}"
        found.append(Finding(subject=f"link {where}", ranks=(rank,), factor=factor, text=text))
    left = {pair: value for pair, value in pairs.seconds.items() if not guilty.keys() & set(pair)}
    for pair, value in sorted(left.items()):
        others = [other for key, other in left.items() if key != pair]
        if others and value > TOLERANCE * statistics.median(others):
            factor = value / statistics.median(others)
            text = f"the link between {team.name(pair[0])} and {team.name(pair[1])} is slow: "
            text += f"{_rate(pairs.bytes, value)} each way, other links {_rate(pairs.bytes, value / factor)}"
            found.append(Finding(subject=f"link {where}", ranks=pair, factor=factor, text=text))
    return found


def slow_devices(what: str, seconds: Sequence[Sequence[float]], team: Team) -> list[Finding]:
    """Name ranks that compute slower than the others.

    Args:
        what: What they did, such as `matrix products`.
        seconds: Of every rank, for each of several pieces of such work; a rank is judged by the median over them, as
            something else on the machine may have disturbed one.
        team: All ranks.
    """
    if team.world == 1 or not seconds:
        return []
    factors = [
        statistics.median(by_rank[rank] / statistics.median(_without(by_rank, rank)) for by_rank in seconds)
        for rank in range(team.world)
    ]
    found = []
    for rank, factor in enumerate(factors):
        if factor > TOLERANCE:
            text = f"{team.name(rank)} is slow at {what}: {factor:.1f} times the others' seconds"
            found.append(Finding(subject=what, ranks=(rank,), factor=factor, text=text))
    return found


def _without(values: Sequence[float], place: int) -> list[float]:
    return [*values[:place], *values[place + 1 :]]


def _rate(size: int, seconds: float) -> str:
    rate = size / seconds / 1e6
    return f"{rate / 1e3:.1f} GB/s" if rate >= 1e3 else f"{rate:.1f} MB/s"
