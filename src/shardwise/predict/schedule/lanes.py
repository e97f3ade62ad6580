"""Lanes of one GPU: what is issued on them, in the order in which the host issues it, and when it runs.

A stream runs what it is given in order, a communicator runs collectives in the order in which they were issued, and
whoever waits for an event waits for something issued before. So one pass in the order of issue is enough: every start
is the latest of what it has to wait for. Only the compute lane is settled later than it is issued, because collectives
that the host issues after an operation may run beside it and slow it down.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, cast

from shardwise.spec.timeline import COMMUNICATION, LANES, Lane, Span, What

Interval = tuple[float, float]
Operation = tuple[float, Span | None, float, What, str, int]
"""Something issued on the compute lane: it starts no earlier than this, because of this; how long it takes while
nothing slows it down (0: an event, or a mark); what it is, for which unit, and the place of its span."""
MARKS: frozenset[What] = frozenset({"leave", "return"})
"""What stands for itself on the compute lane and takes no time there."""
_new = tuple.__new__


def is_host(span: Span) -> bool:
    """Whether the host's thread was busy with this, or may have waited for it."""
    return span.lane in ("issue", "to_host", "host") or span.what == "exchange"


class Gap(NamedTuple):
    """The compute lane stands still."""

    start: float
    """Seconds since the step began."""
    end: float
    """Seconds since the step began."""
    place: int
    """Place of the span that starts then."""
    by: Span | None
    """What it waited for."""


class Lanes:
    """The lanes of one device and its host."""

    def __init__(self, slowdown: float) -> None:
        self.slowdown = slowdown
        self.number = 0
        """Of the micro-batch."""
        self.host = 0.0
        """When the host's thread issues the next thing."""
        self.host_by: Span | None = None
        """What it was last busy with or waited for."""
        self.held_up = 0
        """How often something could have begun before the host issued it."""
        self.free = 0.0
        """When the settled part of the compute lane ends."""
        self.spans: list[Span | None] = []
        self.later_spans: list[Callable[[], None]] = []
        """What puts spans into places that are kept for them; called where somebody asks for spans."""
        self.later_gaps: list[Callable[[], list[Gap]]] = []
        """What makes the gaps of units that were counted: no collective that is on record runs in them."""
        self.gaps: list[Gap] = []
        self.under_way: list[Interval] = []
        """When any collective runs: disjoint, in order."""
        self.intervals: dict[Lane, list[Interval]] = {lane: [] for lane in COMMUNICATION}
        """When each lane of communication works, in order."""
        self.worked: dict[Lane, float] = dict.fromkeys(LANES, 0.0)
        """Seconds in which each lane works."""
        self.operations: list[Operation] = []
        self.ends: list[float] = []
        """Ends of the operations that are settled."""
        self._bound = 0.0
        self._by: Span | None = None
        self._carried = 0.0
        self._carried_by: Span | None = None
        self._seen = 0

    def all_spans(self) -> Sequence[Span]:
        """Return all that has happened, when everything is settled."""
        for make in self.later_spans:
            make()
        self.later_spans.clear()
        return cast(tuple[Span, ...], tuple(self.spans))

    def all_gaps(self) -> Sequence[Gap]:
        """Return all waits, in order."""
        return sorted([*self.gaps, *(gap for make in self.later_gaps for gap in make())], key=lambda gap: gap.start)

    def wait(self, until: float, by: Span | None) -> None:
        """Let the compute lane wait for an event."""
        if until > self._bound:
            self._bound, self._by = until, by

    def compute(self, seconds: float, what: What, unit: str, issue: float = 0.0) -> None:
        """Issue an operation on the compute lane; it ends no earlier than its last part is issued."""
        spans = self.spans
        issued = self.host
        if issue > 0:
            self.host = issued + issue
            self.host_by = self.add("issue", "issue", unit, issued, self.host)
            if issue > seconds:
                issued = self.host - seconds
        bound, by = self._bound, self._by
        if issued > bound:
            bound, by = issued, self.host_by
        self._bound = 0.0
        self.operations.append((bound, by, seconds, what, unit, len(spans)))
        if seconds > 0:
            spans.append(None)

    def event(self) -> int:
        """Return what has happened when all that is issued on the compute lane so far has; see `when`."""
        if self._bound > 0:
            self.operations.append((self._bound, self._by, 0.0, "exchange", "", 0))
            self._bound = 0.0
        return len(self.operations)

    def mark(self, what: What, unit: str) -> None:
        """Issue something that `passed` does when the compute lane comes to it."""
        self.operations.append((self._bound, self._by, 0.0, what, unit, 0))
        self._bound = 0.0

    def when(self, event: int) -> float:
        """Return when an event happens."""
        if event > len(self.ends):
            self.settle(event)
        return self.ends[event - 1] if event else 0.0

    def span_before(self, event: int) -> Span | None:
        """Return what was computed last before an event, which has been asked for by `when`."""
        for operation in reversed(self.operations[:event]):
            if operation[2] > 0:
                return self.spans[operation[5]]
        return None

    def now(self) -> float:
        """Return when the compute lane is done with all that is issued, waits included."""
        return self.when(self.event())

    def settle(self, count: int) -> None:
        """Find when the first `count` operations run."""
        free, spans, ends, number, under_way = self.free, self.spans, self.ends, self.number, self.under_way
        slows, computed = self.slowdown > 1 and bool(under_way), 0.0
        for bound, by, seconds, what, unit, place in self.operations[len(ends) : count]:
            if seconds <= 0:
                self.free = free
                if bound > self._carried:
                    self._carried, self._carried_by = bound, by
                if what in MARKS:
                    self.passed(what, unit)
                ends.append(self.reached)
                continue
            if self._carried > bound:
                bound, by = self._carried, self._carried_by
            start = free
            if bound > free:
                self.gaps.append(_new(Gap, (free, bound, place, by)))
                if by is not None and is_host(by):
                    self.held_up += 1
                start = bound
            free = self._slowed(start, seconds) if slows and under_way[-1][1] > start else start + seconds
            spans[place] = _new(Span, ("compute", what, unit, number, start, free))
            computed += free - start
            ends.append(free)
        self.free = free
        self.worked["compute"] += computed

    def passed(self, what: What, unit: str) -> None:
        """Do what a mark stands for; the compute lane has come to it."""

    def hold(self, by: Span | None) -> None:
        """Let whatever comes next on the compute lane wait."""
        if by is not None and by.end > self._carried:
            self._carried, self._carried_by = by.end, by

    @property
    def reached(self) -> float:
        """When the compute lane is done with what is settled, waits included."""
        return max(self.free, self._carried)

    def _slowed(self, start: float, seconds: float) -> float:
        """Return the end of an operation that runs at 1 / slowdown while a collective is under way."""
        under_way, place, slowdown = self.under_way, self._seen, self.slowdown
        while place < len(under_way) and under_way[place][1] <= start:
            place += 1
        self._seen = place
        while place < len(under_way):
            begins, ends = under_way[place]
            if begins > start:
                if start + seconds <= begins:
                    break
                seconds -= begins - start
                start = begins
            if start + seconds * slowdown <= ends:
                return start + seconds * slowdown
            seconds -= (ends - start) / slowdown
            start = ends
            place += 1
        return start + seconds

    def add(self, lane: Lane, what: What, unit: str, start: float, end: float) -> Span:
        """Record a span of another lane than the compute lane."""
        span: Span = _new(Span, (lane, what, unit, self.number, start, end))
        self.spans.append(span)
        self.worked[lane] += end - start
        return span

    def collective(self, lane: Lane, what: What, unit: str, start: float, end: float) -> Span:
        """Record a collective."""
        self.intervals[lane].append((start, end))
        under_way = self.under_way
        if not under_way or start > under_way[-1][1]:
            under_way.append((start, end))
        elif start >= under_way[-1][0]:
            if end > under_way[-1][1]:
                under_way[-1] = (under_way[-1][0], end)
        else:
            self._among(start, end)
        return self.add(lane, what, unit, start, end)

    def _among(self, start: float, end: float) -> None:
        """Put an interval among those in which a collective is under way."""
        under_way = self.under_way
        first = bisect_right(under_way, (start, start))
        if first and under_way[first - 1][1] >= start:
            first -= 1
        last = first
        while last < len(under_way) and under_way[last][0] <= end:
            start, end = min(start, under_way[last][0]), max(end, under_way[last][1])
            last += 1
        under_way[first:last] = [(start, end)]
        self._seen = min(self._seen, first)

    def link_free(self, lane: Lane) -> float:
        """Return when one direction between device and host is free."""
        rows = self.intervals[lane]
        return rows[-1][1] if rows else 0.0

    def copy(self, lane: Lane, what: What, unit: str, start: float, end: float) -> Span:
        """Record a copy between device and host."""
        self.intervals[lane].append((start, end))
        return self.add(lane, what, unit, start, end)

    def host_waits(self, until: float, by: Span | None) -> None:
        """Let the host's thread wait."""
        if until > self.host:
            self.host, self.host_by = until, by

    def later(self, shift: float, events: Iterable[int]) -> None:
        """Let time pass on all lanes: what is under way beyond the last that was computed ends that much later.

        Args:
            shift: Seconds.
            events: Those, beside the last, that happen that much later too.
        """
        for rows in (*self.intervals.values(), self.under_way):
            beyond = []
            while rows and rows[-1][1] > self.free:
                start, end = rows.pop()
                beyond.append((max(start, self.free) + shift, end + shift))
                if start < self.free:
                    rows.append((start, self.free))
                    break
            rows.extend(reversed(beyond))
        self.free += shift
        self._carried += shift
        for event in {len(self.ends), *events}:
            self.ends[event - 1] += shift

    def renamed(self, change: Callable[[Span], Span]) -> None:
        """Put other spans into the place of those for which something still waits."""
        self.host_by = self.host_by and change(self.host_by)
        self._by = self._by and change(self._by)
        self._carried_by = self._carried_by and change(self._carried_by)
