"""From a trace of a few blocks to the real depth.

A long run of like blocks is cut down to a few. Live bytes at a given place (the third block, the last but one, the
loss, the optimizer) are linear in how many blocks of each run there are, so two traces that differ by one repeat say
what each further repeat adds. Between the ends of a run they are linear in the number of the block too, so that the
highest block is near one of the ends: blocks in the middle of the cut run stand for both, once counted from the start
of the run and once from its end. The highest place is looked for after all have been brought to the real depth.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from shardwise.measure.storage_log import Segment
from shardwise.spec.footprint import Category, Phase
from shardwise.spec.plan import Plan

MOST_PERIOD = 16
"""Longest pattern of blocks that is looked for."""


class DepthsDiffer(Exception):
    """Two traces that should differ in the number of blocks alone differ in what happens."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """Consecutive blocks that repeat a pattern."""

    start: int
    """Number of its first block."""
    period: int
    """Blocks of the pattern."""
    repeats: int
    """How often the pattern comes."""

    @property
    def end(self) -> int:
        """Number of the first block behind it."""
        return self.start + self.period * self.repeats


def runs_of(kinds: Sequence[Hashable]) -> list[Run]:
    """Divide blocks into runs: at each place the pattern whose repeats cover most, of equal ones the shortest."""
    runs: list[Run] = []
    at = 0
    while at < len(kinds):
        best = Run(start=at, period=1, repeats=1)
        for period in range(1, min(MOST_PERIOD, len(kinds) - at) + 1):
            repeats = 1
            while kinds[at : at + period] == kinds[at + repeats * period : at + (repeats + 1) * period]:
                repeats += 1
            if repeats > 1 and repeats * period > best.repeats * best.period:
                best = Run(start=at, period=period, repeats=repeats)
        runs.append(best)
        at = best.end
    return runs


@dataclass(frozen=True, kw_only=True)
class Depths:
    """How a model is cut: its runs, and how often the pattern of each comes in the shorter trace."""

    runs: tuple[Run, ...]
    """Of the real model."""
    kept: tuple[int, ...]
    """Repeats of each run in the shortest trace."""
    first: int
    """Blocks at the start of a run that may differ from those in its middle."""
    last: int
    """The same at its end."""

    @property
    def cut(self) -> tuple[int, ...]:
        """Places of the runs that are cut."""
        return tuple(place for place, run in enumerate(self.runs) if self.kept[place] < run.repeats)

    def blocks(self, longer: int | None = None) -> tuple[int, ...]:
        """Return the real numbers of the blocks that a trace has; with `longer`, that run has one repeat more."""
        numbers: list[int] = []
        for place, run in enumerate(self.runs):
            repeats = self.kept[place] + (place == longer)
            numbers += range(run.start, run.start + repeats * run.period)
        return tuple(numbers)

    def real_name(self, where: str, blocks: str) -> str:
        """Return the name at the real depth of a unit of the shortest trace; `blocks` names the list of blocks."""
        number = block_number(where, blocks)
        if number is None:
            return where
        return f"{blocks}.{self.places(number)[-1].real}" + where.removeprefix(f"{blocks}.{number}")

    def places(self, number: int) -> list[Place]:
        """Return what block `number` of the shortest trace stands for."""
        starts = list(accumulate((k * r.period for k, r in zip(self.kept, self.runs, strict=True)), initial=0))
        within = next(p for p in range(len(self.runs)) if number < starts[p + 1])
        run, offset = self.runs[within], number - starts[within]
        behind = [p for p in self.cut if p < within]
        if within not in self.cut:
            return [self._place(number, behind)]
        inside = self.kept[within] * run.period
        found = []
        if offset < inside - self.last:
            found.append(self._place(number, behind))
        if offset >= self.first:
            found.append(self._place(number, [*behind, within]))
        return found

    def _place(self, number: int, behind: list[int]) -> Place:
        """A place behind the further repeats of the runs `behind`."""
        shift = sum((self.runs[p].repeats - self.kept[p]) * self.runs[p].period for p in behind)
        in_longer = {p: number + self.runs[p].period * (p in behind) for p in self.cut}
        return Place(real=number + shift, in_longer=in_longer)


@dataclass(frozen=True, kw_only=True)
class Place:
    """A block of the shortest trace as it is counted at the real depth."""

    real: int
    """Number of the block that it stands for."""
    in_longer: Mapping[int, int]
    """Run that is one repeat longer -> number of the same block in that trace."""


def depths_of(kinds: Sequence[int], plan: Plan) -> Depths:
    """Return how a model of blocks of these kinds is cut under a plan.

    Blocks near the ends of a run may differ from those inside, by what is gathered ahead or still being reduced.
    """
    setting = plan.activation_checkpointing
    every = int(setting.removeprefix("every_")) if setting.startswith("every_") else 1
    runs = runs_of([(kind, number % every) for number, kind in enumerate(kinds)])
    further = plan.offload.activations
    first = max(1, plan.prefetch.backward) + further
    last = max(1, plan.prefetch.forward, plan.reduce_scatter.buffers) + further
    kept = []
    for run in runs:
        needed = -(-(first + last) // run.period) + 1
        kept.append(min(run.repeats, needed))
    return Depths(runs=tuple(runs), kept=tuple(kept), first=first, last=last)


@dataclass(frozen=True, kw_only=True, slots=True)
class Spot:
    """A segment's place in the step, comparable over depths."""

    step: int
    """Optimizer steps done before it."""
    phase: Phase
    """Phase of the step."""
    micro_batch: int
    """Micro-batch of the step."""
    block: int | None
    """The last block that was at work in this phase, this one included; None: no block yet."""
    part: str | None
    """Unit at work: within the block (empty: the block itself); None outside of blocks."""
    where: str
    """Unit at work outside of blocks, else empty."""
    visit: int
    """How many segments at this place came before."""

    def at(self, block: int) -> Spot:
        """Return the same place at another block."""
        return replace(self, block=block)


def spots(segments: Sequence[Segment], blocks: str) -> list[Spot]:
    """Return the place of each segment; `blocks` is the dotted name of the list of blocks."""
    found: list[Spot] = []
    visits: Counter[Spot] = Counter()
    at: tuple[int, Phase, int] | None = None
    last: int | None = None
    for segment in segments:
        key = segment.key
        if at != (key.step, key.phase, key.micro_batch):
            at, last = (key.step, key.phase, key.micro_batch), None
        number = block_number(key.where, blocks)
        last = last if number is None else number
        spot = Spot(
            step=key.step,
            phase=key.phase,
            micro_batch=key.micro_batch,
            block=last,
            part=None if number is None else key.where.removeprefix(f"{blocks}.{number}"),
            where=key.where if number is None else "",
            visit=0,
        )
        found.append(replace(spot, visit=visits[spot]))
        visits[spot] += 1
    return found


def extend(
    depths: Depths, base: Sequence[Segment], longer: Mapping[int, Sequence[Segment]], blocks: str
) -> list[Segment]:
    """Return the segments of the shortest trace at the real depth, each with the name that it has there.

    Args:
        depths: How the model was cut.
        base: Segments of the shortest trace.
        longer: Run -> segments of the trace in which it has one repeat more.
        blocks: Dotted name of the list of blocks.

    Raises:
        DepthsDiffer: a segment has no counterpart in another trace.
    """
    tables = {run: dict(zip(spots(found, blocks), found, strict=True)) for run, found in longer.items()}
    extended = []
    for segment, spot in zip(base, spots(base, blocks), strict=True):
        if spot.block is None:
            extended.append(_extended(depths, segment, dict.fromkeys(tables, spot), tables))
            continue
        for place in depths.places(spot.block):
            others = {run: spot.at(place.in_longer[run]) for run in tables}
            found = _extended(depths, segment, others, tables)
            if spot.part is not None:
                found = replace(found, key=replace(segment.key, where=f"{blocks}.{place.real}{spot.part}"))
            extended.append(found)
    return extended


def block_number(where: str, blocks: str) -> int | None:
    """Return the number of the block that a unit is or lies in; None outside of blocks."""
    head, _, _ = where.removeprefix(f"{blocks}.").partition(".")
    return int(head) if where.startswith(f"{blocks}.") and head.isdigit() else None


def _extended(
    depths: Depths,
    segment: Segment,
    others: Mapping[int, Spot],
    tables: Mapping[int, Mapping[Spot, Segment]],
) -> Segment:
    further: list[tuple[int, Segment]] = []
    for run, table in tables.items():
        other = table.get(others[run])
        if other is None:
            raise DepthsDiffer(str(others[run]))
        further.append((depths.runs[run].repeats - depths.kept[run], other))
    return replace(
        segment,
        start=_linear(segment.start, [(count, other.start) for count, other in further]),
        peak=_linear(segment.peak, [(count, other.peak) for count, other in further]),
        end=_linear(segment.end, [(count, other.end) for count, other in further]),
    )


def _linear(base: Mapping[Category, int], further: Sequence[tuple[int, Mapping[Category, int]]]) -> dict[Category, int]:
    """Return `base` plus `count` times the difference to it, for each of `further`."""
    total = dict(base)
    for count, other in further:
        for category in {*base, *other}:
            step = other.get(category, 0) - base.get(category, 0)
            total[category] = total.get(category, 0) + count * step
    return total
