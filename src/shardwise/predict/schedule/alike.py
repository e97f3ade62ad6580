"""Long rows of units that are alike: as soon as one goes as the one before it, the rest of the row is counted."""

from __future__ import annotations

from collections import deque
from functools import lru_cache
from typing import NamedTuple

from shardwise.predict.schedule.copied import Copied, Row
from shardwise.predict.schedule.costs import StepCosts
from shardwise.predict.schedule.lanes import Interval, is_host
from shardwise.predict.schedule.streams import Streams
from shardwise.spec.timeline import Lane, Span

SHORT = 4
"""Units that are not worth counting."""
PERIODS = (1, 2, 3, 4)
"""How many units on the next alike one may be: where every second block is checkpointed, 2."""
ALIKE = 1e-9
"""Share of a unit's seconds by which two of them may differ and count as alike."""
CLOCKS = (
    "copy_in_free",
    "gathers_free",
    "reductions_free",
    "sums_free",
    "turn",
    "reductions_turn",
    "regathers_turn",
)
"""Instants of streams and communicators."""


class Border(NamedTuple):
    """What the schedule of all that follows depends on, behind one unit; instants are seconds after `free`."""

    free: float
    """When the settled part of the compute lane ends."""
    host: float
    """When the host's thread is done."""
    held_up: int
    """How often the host has held something up so far."""
    gaps: int
    """Waits so far."""
    spans: int
    """Spans so far."""
    worked: dict[Lane, float]
    """Seconds of every lane so far."""
    state: tuple[float, ...]
    """Instants after `free` of all that is under way, events and counts."""


@lru_cache(maxsize=1024)
def offsets_of(asked: tuple[tuple[int, ...], ...]) -> tuple[tuple[int, ...], ...]:
    """Return how much further on the units are that each unit gathers ahead."""
    return tuple(tuple(other - place for other in others) for place, others in enumerate(asked))


class AlikeUnits(Streams):
    """Streams that do not play every unit of a row."""

    def __init__(self, step: StepCosts, brief: bool = False) -> None:
        super().__init__(step, brief)
        self.gathers_after = 0
        """Event of the compute lane for which the streams of gathers wait."""
        self.copied_out = 0
        """Event of the last copy-out in forward; 0: there was none."""
        self.in_flight: deque[Span] = deque()
        """Reductions whose buffers are kept, oldest first."""
        self.borders: deque[Border] = deque(maxlen=PERIODS[-1])
        """Behind the units before, the last one last, as far as they are in the same direction."""
        self._matching: dict[tuple[int, int], list[int]] = {}

    def skip(self, place: int, way: int, asked: tuple[tuple[int, ...], ...]) -> int:
        """Return the place of the last unit that is over: this one, or one further on if those between go alike.

        Args:
            place: The unit that was just issued.
            way: 1 in forward, -1 in backward.
            asked: Units that each unit gathers ahead.
        """
        period = self._period(place, way, asked)
        if not period:
            self.borders.clear()
            return place
        gathers = self._gathers(place, way, period)
        if not gathers and not self._gathers_later(place, way):
            self.settle(len(self.operations))  # nothing is to come that could run beside them
        now = self._mark_border(gathers, asked[place])
        before = self.borders[-period] if len(self.borders) >= period else None
        self.borders.append(now)
        if before is None or not self._same(before, now):
            return place
        times = self._row(place, way, asked, period)
        if times * period < SHORT:
            return place
        row = Row(place, way, period, now.free - before.free, now.host - before.host, times)
        waits = self.gaps[before.gaps :]
        idle = [(max(gap.start, before.free), gap.end) for gap in waits]
        self.count(times, idle, before.free, now.free, before.worked)
        copied: Copied | None = None
        if not self.brief:
            copied = Copied(self, self.names, row, before.spans)
            if waits:
                self.later_gaps.append(copied.wait_again(waits))
        self._move(row, asked[place], copied)
        self.borders.clear()
        return place + row.on(times)

    def _period(self, place: int, way: int, asked: tuple[tuple[int, ...], ...]) -> int:
        """Return how many units on the next alike one is, if enough alike ones follow; else 0."""
        units = self.units
        left = len(units) - 1 - place if way > 0 else place
        for period in PERIODS:
            alike = left >= SHORT + period - 1 and units[place + period * way] is units[place]
            if alike and self._matches(way, asked, period)[place] >= SHORT:
                return period
        return 0

    def _row(self, place: int, way: int, asked: tuple[tuple[int, ...], ...], period: int) -> int:
        """Return how many periods behind this one may be left out: alike are their units, those of the two before, and
        all that they ask for; one unit is left to be played."""
        first = place - (2 * period - 1) * way
        if not 0 <= first < len(self.units):
            return 0
        last = first + (self._matches(way, asked, period)[first] + period - 1) * way
        if not self._gathers(place, way, period) and self._gathers_later(last, way):
            return 0
        offsets = offsets_of(asked)
        reach = max((abs(offset) for back in range(period) for offset in offsets[place - back * way]), default=0)
        return max(0, ((last - place) * way - max(1, reach)) // period)

    def _matches(self, way: int, asked: tuple[tuple[int, ...], ...], period: int) -> list[int]:
        """Return for each place how many units in a row, from it on, are as the one `period` units further on."""
        found = self._matching.get((way, period))
        if found is None:
            units, late, count, offsets = self.units, self.step.late, len(self.units), offsets_of(asked)
            found = self._matching[way, period] = [0] * count
            for place in range(count - 1, -1, -1) if way > 0 else range(count):
                other = place + period * way
                alike = 0 <= other < count and units[other] is units[place] and offsets[other] == offsets[place]
                if alike and late not in (place, other):
                    found[place] = found[place + way] + 1
        return found

    def _gathers(self, place: int, way: int, period: int) -> bool:
        """Whether one of the units of a period gathers."""
        units = [self.units[place - back * way] for back in range(period) if 0 <= place - back * way < len(self.units)]
        return any((unit.gather if way > 0 else unit.regather) > 0 for unit in units)

    def _gathers_later(self, last: int, way: int) -> bool:
        """Whether a row of units that gather nothing is followed, in the same micro-batch, by a gather: that could
        start beside the row, as nothing in it holds it up."""
        if way < 0:
            return any(other.regather > 0 for other in self.units[:last])
        return any(other.gather > 0 for other in self.units[last:]) or any(other.regather > 0 for other in self.all)

    def _mark_border(self, gathers: bool, asked: tuple[int, ...]) -> Border:
        free, ends, known = self.free, self.ends, len(self.ends)
        floor = ends[self.gathers_after - 1] if gathers and 0 < self.gathers_after <= known else free
        copied = ends[self.copied_out - 1] if gathers and 0 < self.copied_out <= known else free
        pending = self.operations[known:]
        under_way: list[Interval] = []
        lanes: list[int] = []
        for rows in self.intervals.values():
            for start, end in reversed(rows):
                if end <= free:
                    break
                under_way.append((start, end))
            lanes.append(len(under_way))
        clocks = (
            copied,
            *(max(floor, clock) for clock in (self.copy_in_free, self.gathers_free, self.turn, self.regathers_turn)),
            *(max(free, clock) for clock in (self.reductions_free, self.reductions_turn, self.sums_free)),
            max(floor, self.link_free("to_device")),
            max(free, self.link_free("to_host")),
            *(max(free, operation[0]) for operation in pending),
            *(max(free, span.end) for span in self.in_flight),
            *(span.end for other in asked if (span := self.arriving[other]) is not None),
            *(max(free, instant) for interval in under_way for instant in interval),
            self.reached,
            floor,
        )
        unsettled = (max(0, event - known) for event in (self.gathers_after, self.copied_out))
        counts = (*unsettled, len(pending), len(self.in_flight), *lanes)
        state = (*counts, *(operation[2] for operation in pending), *(clock - free for clock in clocks))
        return Border(free, self.host, self.held_up, len(self.gaps), len(self.spans), dict(self.worked), state)

    def _same(self, before: Border, now: Border) -> bool:
        """Whether the next unit will go as the last one did."""
        if len(before.state) != len(now.state):
            return False
        small = ALIKE * (now.free - before.free)
        if any(abs(a - b) > small for a, b in zip(before.state, now.state, strict=True)):
            return False
        ahead = (now.free - now.host) - (before.free - before.host)
        if abs(ahead) <= small:
            return True
        pending = self.operations[len(self.ends) :]
        holds = any(by is not None and bound > now.free and is_host(by) for bound, by, *_ in pending)
        return ahead > 0 and now.held_up == before.held_up and not holds

    def _move(self, row: Row, asked: tuple[int, ...], copied: Copied | None) -> None:
        """Let everything that is under way happen later, for units that much further on."""
        shift = row.times * row.took

        def later(span: Span) -> Span:
            if copied is not None:
                return copied.later(span, row.times)
            return Span(*span[:4], span.start + shift, span.end + shift)

        known = len(self.ends)
        for place in range(known, len(self.operations)):
            operation = self.operations[place]
            moved = (operation[0] + shift, *operation[1:]) if copied is None else copied.unsettled(operation)
            self.operations[place] = moved
        self.later(shift, [event for event in (self.gathers_after, self.copied_out) if 0 < event <= known])
        self.host += row.times * row.host_took
        if copied is not None:
            self.renamed(later)
        for clock in CLOCKS:
            setattr(self, clock, getattr(self, clock) + shift)
        self.in_flight = deque(later(span) for span in self.in_flight)
        self.reduced = [later(span) for span in self.reduced]
        arriving = [self.arriving[other] for other in asked]
        for other in asked:
            self.arriving[other] = None
        for other, span in zip(asked, arriving, strict=True):
            self.arriving[other + row.on(row.times)] = None if span is None else later(span)
