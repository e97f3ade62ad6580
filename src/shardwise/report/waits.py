"""What computing waits for in a step: the waits of a Timeline, alike ones merged, with how far a link is too slow."""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Literal

from shardwise.spec.timeline import COMMUNICATION, ROOT, Lane, Span, Timeline, Wait, What

REDUCTIONS: tuple[What, ...] = ("reduce_scatter", "all_reduce")
_COMPUTED: tuple[What, ...] = ("forward", "backward")
_NOTHING = 1e-3
"""Computing of a smaller share than this of the communication beside it is none."""

Place = Literal["first", "last", "end", "within"]
"""`first`: gathers before the first block has computed, when nothing is there to hide them; `last`: reductions behind
the last backward, when nothing is left; `end`: what else comes behind all computing, such as an optimizer on the host;
`within`: all others."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Waiting:
    """Waits that are alike: the same phase waits for the same thing, of units that differ in their number alone."""

    place: Place
    """Where in the step."""
    phase: What
    """What is held up: `forward`, `backward`, or what ends a step."""
    lane: Lane
    """Where what is waited for runs."""
    by: What
    """What is waited for."""
    units: tuple[str, ...]
    """Whose, in the order of the step, each once."""
    longest: Wait
    """The longest of them."""
    count: int
    """How many, micro-batches that the Timeline leaves out included."""
    total_s: float
    """Seconds of them all."""
    too_slow: float | None
    """Seconds of collectives and copies under way, over the seconds of computing that they had to hide under. Both are
    counted from the last such wait (for the first: from the start of what is waited for) to the wait's end. Above 1 the
    link is so many times too slow, below 1 it is fast enough but starts too late. None: nothing is computed meanwhile,
    or what is waited for is no collective and no copy."""


def merged_waits(timeline: Timeline, micro_batches: int) -> tuple[Waiting, ...]:
    """Return what computing waits for, the most first.

    Args:
        timeline: One step.
        micro_batches: Forwards and backwards of the step; those that the timeline leaves out are like the last one
            listed before them.
    """
    busy = _Busy(timeline)
    listed = _listed(timeline, micro_batches)
    phases = _Phases(timeline)
    groups: dict[tuple[str, ...], list[Wait]] = {}
    for wait in (*timeline.waits, *_behind_computing(timeline)):
        place = phases.place(wait)
        alike: tuple[str, ...] = (wait.by.lane, wait.by.what) if place == "end" else ()
        if place == "within":
            alike = (phases.of(wait.held_up), wait.by.lane, wait.by.what, _without_number(wait.by.unit))
        groups.setdefault((place, *alike), []).append(wait)
    found = [_merged(waits, phases, busy, listed) for waits in groups.values()]
    return tuple(sorted(found, key=lambda one: -one.total_s))


def _behind_computing(timeline: Timeline) -> Iterator[Wait]:
    """Yield what the end of the step waits for when all computing of the device is done, piece by piece."""
    done = max((span.end for span in timeline.spans if span.lane == "compute"), default=0.0)
    late = sorted((span for span in timeline.spans if span.end > done), key=lambda span: span.end)
    for span in late:
        yield Wait(done, span.end, late[-1], span)
        done = span.end


def _merged(waits: list[Wait], phases: _Phases, busy: _Busy, listed: dict[int, int]) -> Waiting:
    longest = max(waits, key=lambda wait: wait.end - wait.start)
    place, phase = phases.place(longest), phases.of(longest.held_up)
    repeated = place == "within" and phase in _COMPUTED
    times = [listed.get(wait.held_up.micro_batch, 1) if repeated else 1 for wait in waits]
    return Waiting(
        place=place,
        phase=phase,
        lane=longest.by.lane,
        by=longest.by.what,
        units=tuple(dict.fromkeys(wait.by.unit for wait in waits)),
        longest=longest,
        count=sum(times),
        total_s=sum(count * (wait.end - wait.start) for count, wait in zip(times, waits, strict=True)),
        too_slow=_too_slow(waits, busy) if place == "within" and longest.by.lane in COMMUNICATION else None,
    )


def _too_slow(waits: list[Wait], busy: _Busy) -> float | None:
    communicated = computed = 0.0
    before = {wait: earlier.end for earlier, wait in pairwise(waits) if _same_pass(earlier, wait)}
    for wait in waits:
        start = before.get(wait, wait.by.start)
        communicated += busy.communicated(start, wait.end)
        computed += busy.computed(start, wait.end)
    return communicated / computed if computed > _NOTHING * communicated else None


def _same_pass(one: Wait, other: Wait) -> bool:
    return one.held_up.micro_batch == other.held_up.micro_batch


def _listed(timeline: Timeline, micro_batches: int) -> dict[int, int]:
    """Return for how many micro-batches each listed one stands."""
    numbers = sorted({span.micro_batch for span in timeline.spans if span.what in _COMPUTED})
    after = [*numbers[1:], micro_batches][: len(numbers)]
    return {number: max(1, following - number) for number, following in zip(numbers, after, strict=True)}


def _without_number(unit: str) -> str:
    return re.sub(r"\d+", "*", unit)


class _Phases:
    """Which phase of a step something belongs to."""

    def __init__(self, timeline: Timeline) -> None:
        computed = sorted((span for span in timeline.spans if span.what in _COMPUTED), key=lambda span: span.start)
        self._starts = [span.start for span in computed]
        self._computed = computed
        blocks = [span.start for span in computed if span.unit != ROOT]
        self._first = min(blocks, default=0.0)
        self._last = max((span.end for span in computed), default=0.0)
        self._all = max((span.end for span in timeline.spans if span.lane == "compute"), default=0.0)

    def of(self, span: Span) -> What:
        """Return the phase: copies belong to what is computed next, or, of gradients, to backward."""
        if span.what in ("reduce_copy_in", "reduce_sum"):
            return "backward"
        if span.what != "copy_out":
            return span.what
        place = bisect_left(self._starts, span.start)
        return self._computed[place].what if place < len(self._computed) else span.what

    def place(self, wait: Wait) -> Place:
        """Return where in the step a wait is."""
        if wait.end <= self._first and wait.by.lane == "all_gather":
            return "first"
        if wait.end > self._last and wait.by.what in REDUCTIONS:
            return "last"
        if wait.start >= self._all:
            return "end"
        return "within"


class _Busy:
    """Seconds of computing and of communication in any stretch of a step."""

    def __init__(self, timeline: Timeline) -> None:
        self._computed = _Union(span for span in timeline.spans if span.lane == "compute")
        self._communicated = _Union(span for span in timeline.spans if span.lane in COMMUNICATION)

    def computed(self, start: float, end: float) -> float:
        """Return the seconds in which something is computed."""
        return self._computed.until(end) - self._computed.until(start)

    def communicated(self, start: float, end: float) -> float:
        """Return the seconds in which a collective or a copy is under way."""
        return self._communicated.until(end) - self._communicated.until(start)


class _Union:
    """The union of intervals, and its length up to any time."""

    def __init__(self, spans: Iterable[Span]) -> None:
        joined = list(_joined(sorted((span.start, span.end) for span in spans)))
        self._joined = joined
        self._starts = [start for start, _ in joined]
        self._before = [0.0, *accumulate(end - start for start, end in joined)]

    def until(self, time: float) -> float:
        """Return the seconds of the union that lie before a time."""
        place = bisect_right(self._starts, time)
        if place == 0:
            return 0.0
        start, end = self._joined[place - 1]
        return self._before[place - 1] + min(time, end) - start


def _joined(intervals: list[tuple[float, float]]) -> Iterator[tuple[float, float]]:
    if not intervals:
        return
    start, end = intervals[0]
    for begin, until in intervals[1:]:
        if begin > end:
            yield start, end
            start, end = begin, until
        end = max(end, until)
    yield start, end
