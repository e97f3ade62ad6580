"""How much of the communication is exposed: what a Timeline says beside its spans."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from shardwise.predict.schedule.lanes import Interval, Lanes
from shardwise.spec.timeline import COMMUNICATION, Lane, Later, Span, Timeline, Wait

_new = tuple.__new__


@dataclass(frozen=True, kw_only=True, slots=True)
class Totals:
    """Seconds of a stretch of a step."""

    exposed: dict[Lane, float]
    """In which each lane of communication works and nothing is computed."""
    exposed_s: float
    """In which any of them does and nothing is computed."""
    communication_s: float
    """In which any of them works."""

    def plus(self, other: Totals, times: int) -> Totals:
        """Return these and some times others."""
        return Totals(
            exposed={lane: seconds + times * other.exposed[lane] for lane, seconds in self.exposed.items()},
            exposed_s=self.exposed_s + times * other.exposed_s,
            communication_s=self.communication_s + times * other.communication_s,
        )


def totals(lanes: Lanes, gaps: Sequence[Interval], begins: float, ends: float) -> Totals:
    """Return the seconds between two instants, between which the compute lane stands still in these gaps."""
    any_lane = _union(lanes)
    return Totals(
        exposed={lane: _overlap(gaps, lanes.intervals[lane]) for lane in COMMUNICATION},
        exposed_s=_overlap(gaps, any_lane),
        communication_s=_within(any_lane, begins, ends),
    )


def timeline(
    lanes: Lanes,
    ends: float,
    repeats: Sequence[tuple[Totals, int]],
    brief: bool,
    notes: tuple[str, ...],
    tensor_s: float,
) -> Timeline:
    """Return the Timeline of a step that is over.

    Args:
        lanes: With everything settled.
        ends: When the step ends.
        repeats: What was not played but counted: once, and how many times more.
        brief: Without spans and waits.
        notes: For the reader.
        tensor_s: Seconds of computing that are collectives over the tensor axis.
    """
    idle = [(gap[0], gap[1]) for gap in lanes.gaps]
    every = totals(lanes, [*idle, (lanes.free, ends)], 0.0, ends)
    for once, times in repeats:
        every = every.plus(once, times)
    spans: Sequence[Span] = ()
    waits: Sequence[Wait] = ()
    if not brief:
        spans = Later(lanes.all_spans)
        waits = Later(partial(_waits, lanes, spans))
    return Timeline(
        step_s=ends,
        spans=spans,
        waits=waits,
        busy=lanes.worked,
        exposed=every.exposed,
        exposed_s=every.exposed_s,
        hidden_s=every.communication_s - every.exposed_s,
        tensor_s=tensor_s,
        notes=notes,
    )


def _waits(lanes: Lanes, spans: Sequence[Span]) -> Sequence[Wait]:
    return tuple(_new(Wait, (start, end, spans[place], by)) for start, end, place, by in lanes.all_gaps())


def _union(lanes: Lanes) -> Sequence[Interval]:
    """Return when any lane of communication works."""
    copies = [row for lane in ("to_device", "to_host") for row in lanes.intervals[lane]]
    if not copies:
        return lanes.under_way
    union: list[Interval] = []
    for start, end in sorted([*lanes.under_way, *copies]):
        if union and start <= union[-1][1]:
            if end > union[-1][1]:
                union[-1] = (union[-1][0], end)
        else:
            union.append((start, end))
    return union


def _overlap(gaps: Sequence[Interval], intervals: Sequence[Interval]) -> float:
    """Return the seconds that lie in both; each is disjoint and in order."""
    seconds, place, count = 0.0, 0, len(intervals)
    for begins, ends in gaps:
        while place < count and intervals[place][1] <= begins:
            place += 1
        other = place
        while other < count and intervals[other][0] < ends:
            start, end = intervals[other]
            seconds += (end if end < ends else ends) - (start if start > begins else begins)
            other += 1
    return seconds


def _within(intervals: Sequence[Interval], begins: float, ends: float) -> float:
    """Return the seconds of disjoint intervals between two instants."""
    return sum(max(0.0, min(end, ends) - max(start, begins)) for start, end in intervals)
