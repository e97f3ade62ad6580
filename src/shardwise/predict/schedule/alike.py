"""Long rows of units that are alike: as soon as one goes as the one before it, the rest of the row is counted."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from shardwise.predict.schedule.copied import Copied, Row
from shardwise.predict.schedule.costs import StepCosts, UnitCosts
from shardwise.predict.schedule.lanes import Interval, is_host
from shardwise.predict.schedule.streams import Streams
from shardwise.spec.timeline import Lane, Span

SHORT = 4
"""Units that are not worth counting."""
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
        self.border: Border | None = None
        """Behind the unit before, if it is in the same direction."""

    def skip(self, place: int, way: int, asked: tuple[tuple[int, ...], ...]) -> int:
        """Return the place of the last unit that is over: this one, or one further on if those between go alike.

        Args:
            place: The unit that was just issued.
            way: 1 in forward, -1 in backward.
            asked: Units that each unit gathers ahead.
        """
        unit = self.units[place]
        gathers = (unit.gather if way > 0 else unit.regather) > 0
        before, now = self.border, self._mark_border(gathers, asked[place])
        self.border = now
        if before is None or not self._same(before, now):
            return place
        times = self._row(place, way, asked)
        if times < SHORT:
            return place
        row = Row(place, way, now.free - before.free, now.host - before.host, times)
        waits = self.gaps[before.gaps :]
        idle = [(max(gap.start, before.free), gap.end) for gap in waits]
        self.count(times, idle, before.free, now.free, before.worked)
        copied: Copied | None = None
        if not self.brief:
            copied = Copied(self, self.names, row, before.spans)
            copied.wait_again(waits)
        self._move(row, asked[place], copied)
        self.border = None
        return place + times * way

    def _row(self, place: int, way: int, asked: tuple[tuple[int, ...], ...]) -> int:
        """Return how many units behind this one may be left out: alike are they, the two before, and all that they ask
        for; one is left to be played."""
        units, late = self.units, self.step.late
        unit, offsets = units[place], tuple(other - place for other in asked[place])
        last = place
        while 0 <= last + way < len(units) and units[last + way] is unit and last + way != late:
            last += way
        if self._gathers_later(unit, last, way):
            return 0
        reach = max((abs(offset) for offset in offsets), default=0)
        times = abs(last - place) - max(1, reach)
        for row in range(-1, times + 1):
            other = place + row * way
            if units[other] is not unit or tuple(target - other for target in asked[other]) != offsets:
                return 0
        return times

    def _gathers_later(self, unit: UnitCosts, last: int, way: int) -> bool:
        """Whether a row of units that gather nothing is followed, in the same micro-batch, by a gather: that could
        start beside the row, as nothing in it holds it up."""
        if (unit.gather if way > 0 else unit.regather) > 0:
            return False
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
            self.arriving[other + row.times * row.way] = None if span is None else later(span)
