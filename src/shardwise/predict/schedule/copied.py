"""Spans and waits of units that were counted instead of played: those of the unit before, later and renamed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from shardwise.predict.schedule.lanes import Gap, Lanes, Operation
from shardwise.spec.timeline import Span, What

RECENT = 64
"""Operations among which those of a unit and the two before it are."""
_new = tuple.__new__


class Row(NamedTuple):
    """Units that follow some that have just been issued, and go as they did."""

    place: int
    """Of the unit that has just been issued."""
    way: int
    """1 in forward, -1 in backward."""
    period: int
    """How many units on the next alike one is."""
    took: float
    """Seconds from one unit to the next alike one."""
    host_took: float
    """The same of the host's thread."""
    times: int
    """How many periods follow."""

    def on(self, times: int) -> int:
        """Return how far a unit is from the one so many periods further on."""
        return times * self.period * self.way


class Copied:
    """Spans of the units of a row, made from those of the unit before."""

    def __init__(self, lanes: Lanes, names: Sequence[str], row: Row, first: int) -> None:
        """Keep places for the spans behind those of `lanes`; those from place `first` on are copied, when asked for.

        What is not settled of the unit that was issued is put in as it will be: as long after that of the unit before
        as units take.
        """
        self.spans, self.names, self.row = lanes.spans, names, row
        self.place_of = {name: number for number, name in enumerate(names)}
        recent = lanes.operations[-RECENT * row.period :]
        self.known = {(what, unit): place for _, _, _, what, unit, place in recent}
        for _, _, seconds, what, unit, place in lanes.operations[len(lanes.ends) :]:
            if seconds > 0:
                lanes.spans[place] = self._expected(what, unit)
        copied = [span for span in lanes.spans[first:] if span is not None]
        self.offsets = {(span.what, span.unit): offset for offset, span in enumerate(copied) if span.lane == "compute"}
        self.length, self.past = len(copied), len(lanes.spans)
        lanes.spans.extend([None] * (row.times * self.length))
        lanes.later_spans.append(partial(self._fill, copied))

    def _fill(self, copied: Sequence[Span]) -> None:
        """Put the spans of the row into their places, but for those that were settled meanwhile."""
        names, row, spans, at = self.names, self.row, self.spans, self.past
        template = [
            (lane, what, self.place_of[unit], number, start, end, row.host_took if lane == "issue" else row.took)
            for lane, what, unit, number, start, end in copied
        ]
        for times in range(1, row.times + 1):
            on = row.on(times)
            for lane, what, place, number, start, end, took in template:
                if spans[at] is None:
                    made = (lane, what, names[place + on], number, start + times * took, end + times * took)
                    spans[at] = _new(Span, made)
                at += 1

    def later(self, span: Span, times: int) -> Span:
        """Return the same span of a unit so many further on; one of no unit of the row stays."""
        lane, what, unit, number, start, end = span
        if unit not in self.place_of:
            return span
        place = self.place_of[unit] + self.row.on(times)
        if not 0 <= place < len(self.names):
            return span  # of long ago: nothing waits for it any more
        name = self.names[place]
        shift = times * (self.row.host_took if lane == "issue" else self.row.took)
        moved: Span = _new(Span, (lane, what, name, number, start + shift, end + shift))
        return moved

    def wait_again(self, gaps: Sequence[Gap]) -> Callable[[], list[Gap]]:
        """Return what makes the gaps of the row: every unit waits as the one before it did."""
        spans = self.spans
        held_up = [(gap, span, self.place_of[span.unit]) for gap in gaps if (span := spans[gap.place]) is not None]
        return partial(self._wait_again, held_up)

    def _wait_again(self, held_up: Sequence[tuple[Gap, Span, int]]) -> list[Gap]:
        made, took = [], self.row.took
        for times in range(1, self.row.times + 1):
            shift = times * took
            for (start, end, _, by), span, place in held_up:
                other = self._place(span.what, place + self.row.on(times))
                made.append(_new(Gap, (start + shift, end + shift, other, by and self.later(by, times))))
        return made

    def unsettled(self, operation: Operation) -> Operation:
        """Return an operation that is not settled as that of the row's last units; its span is yet to come."""
        bound, by, seconds, what, unit, place = operation
        row = self.row
        name = self.names[self.place_of[unit] + row.on(row.times)] if unit else unit
        if seconds > 0:
            place = self._place(what, self.place_of[name])
            self.spans[place] = None
        return bound + row.times * row.took, by and self.later(by, row.times), seconds, what, name, place

    def _expected(self, what: What, unit: str) -> Span:
        place = self.place_of[unit]
        for back in range(1, len(self.names)):
            name = self.names[place - self.row.on(back)]
            for span in reversed(self.spans):
                if span is not None and span.unit == name and span.what == what and span.lane == "compute":
                    return self.later(span, back)
        raise AssertionError(f"no {what} before that of {unit}")

    def _place(self, what: What, place: int) -> int:
        """Return where a unit's span of the compute lane lies."""
        periods = -(-(place - self.row.place) * self.row.way // self.row.period)
        if periods <= 0:
            return self.known[what, self.names[place]]
        alike = self.names[place - self.row.on(periods)]
        return self.past + (periods - 1) * self.length + self.offsets[what, alike]
