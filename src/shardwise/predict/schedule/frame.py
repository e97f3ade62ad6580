"""What every kind of schedule has in common: a step's begin, its micro-batches, its end."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, NamedTuple

from shardwise.predict.schedule.costs import StepCosts
from shardwise.predict.schedule.exposure import Totals, timeline, totals
from shardwise.predict.schedule.lanes import Interval
from shardwise.predict.schedule.travel import TravelLanes
from shardwise.spec.timeline import Lane, Timeline

ALIKE = 1e-9
"""Share of a micro-batch's seconds by which two of them may differ and count as alike."""


class Mark(NamedTuple):
    """The border between two micro-batches."""

    over: float
    """When the compute lane is done with all before it, waits included."""
    free: float
    """When it has computed the last of it."""
    host: float
    """When the host's thread is."""
    held_up: int
    """How often the host has held something up so far."""
    gaps: int
    """How often computing has waited."""
    repeats: int
    """How often something was counted instead of played."""
    worked: dict[Lane, float]
    """Seconds of every lane so far."""
    kept: tuple[float, ...]
    """Instants, after `over`, of events for which something may wait in the next micro-batch."""


class Frame(TravelLanes, ABC):
    """One optimizer step on one GPU; subclasses say what a micro-batch is."""

    notes: tuple[str, ...] = ()
    """What a reader has to know of the figures."""

    def __init__(self, step: StepCosts, brief: bool = False) -> None:
        super().__init__(step.slowdown, step.units, step.names)
        self.step = step
        self.units = step.units
        self.names = step.names
        self.brief = brief
        """Only totals are asked for."""
        self.repeats: list[tuple[Totals, int]] = []
        """What was not played but counted: once, and how many times more."""

    def kept_events(self) -> Iterable[int]:
        """Return the events for which something may wait in the next micro-batch."""
        return ()

    @abstractmethod
    def micro_batch(self, last: bool) -> None:
        """Issue a forward and its backward, with all that is waited for at its end."""

    def run(self) -> Timeline:
        """Play the step."""
        agree = self.step.update.agree
        if agree > 0:
            self.host_waits(agree, self.collective("all_reduce", "exchange", "", 0.0, agree))
        self._micro_batches()
        tensor_s = self.step.micro_batches * self.step.tensor
        return timeline(self, self._finish(), self.repeats, self.brief, self.notes, tensor_s)

    def _micro_batches(self) -> None:
        count = self.step.micro_batches
        while self.number < count:
            before = self._mark()
            self.micro_batch(self.number == count - 1)
            after = self._mark()
            self.number += 1
            alike = count - 1 - self.number
            if self.number > 1 and alike > 0 and self._steady(before, after):
                self._repeat(alike, before, after)
        self.number = count - 1

    def _mark(self) -> Mark:
        over = self.now()
        kept = tuple(self.when(event) - over for event in self.kept_events())
        return Mark(
            over, self.free, self.host, self.held_up, len(self.gaps), len(self.repeats), dict(self.worked), kept
        )

    def _steady(self, before: Mark, after: Mark) -> bool:
        """Whether the next micro-batch goes as the last one did: nothing is under way beyond its end, and the host runs
        as far ahead as before, or further without having held anything up."""
        if any(rows and rows[-1][1] > after.over for rows in self.intervals.values()):
            return False
        small = ALIKE * (after.over - before.over)
        if len(before.kept) != len(after.kept):
            return False
        if any(abs(was - now) > small for was, now in zip(before.kept, after.kept, strict=True)):
            return False
        was_ahead, is_ahead = before.over - before.host, after.over - after.host
        if abs(is_ahead - was_ahead) <= small:
            return True
        return is_ahead > was_ahead and after.held_up == before.held_up

    def _repeat(self, times: int, before: Mark, after: Mark) -> None:
        """Let the last micro-batch happen some times more: count what it took, and go on that much later."""
        idle = [(max(gap.start, before.over), gap.end) for gap in self.gaps[before.gaps :]]
        inner = [(once, count * times) for once, count in self.repeats[before.repeats :]]
        self.count(times, [*idle, (after.free, after.over)], before.over, after.over, before.worked)
        self.repeats.extend(inner)
        self.number += times
        self.host += times * (after.host - before.host)
        self.later(times * (after.over - before.over), self.kept_events())

    def count(
        self, times: int, idle: Sequence[Interval], begins: float, ends: float, worked: Mapping[Lane, float]
    ) -> None:
        """Count what has gone on between two instants some times more.

        Args:
            times: How many.
            idle: When the compute lane stood still.
            begins: The first instant.
            ends: The last.
            worked: Seconds of every lane before.
        """
        self.repeats.append((totals(self, idle, begins, ends), times))
        for lane, seconds in self.worked.items():
            self.worked[lane] = seconds + times * (seconds - worked[lane])

    def _finish(self) -> float:
        """Clip and update; returns when the step ends."""
        update = self.step.update
        by_host = update.host_update > 0
        if by_host:
            self.host_waits(self.now(), None)
            self._on_host("clip", update.clip)
        else:
            self.compute(update.clip, "clip", "")
        if update.clip_exchange > 0:
            start = self.host if by_host else self.now()
            by = self.collective("all_reduce", "exchange", "", start, start + update.clip_exchange)
            self.wait(by.end, by)
            self.host_waits(by.end, by)
        if by_host:
            self._on_host("update", update.host_update)
        else:
            self._update_here()
        return max(self.now(), self.host, *(rows[-1][1] for rows in self.intervals.values() if rows))

    def _on_host(self, what: Literal["clip", "update"], seconds: float) -> None:
        if seconds > 0:
            self.host_waits(self.host + seconds, self.add("host", what, "", self.host, self.host + seconds))

    def _update_here(self) -> None:
        """Update on the device, with states that rest on the host brought and taken back if there are any."""
        update = self.step.update
        if update.fetch > 0:
            start = max(self.host, self.now())
            by = self.copy("to_device", "fetch", "", start, start + update.fetch)
            self.wait(by.end, by)
        self.compute(update.update, "update", "")
        if update.store > 0:
            start = self.now()
            by = self.copy("to_host", "store", "", start, start + update.store)
            self.wait(by.end, by)
        if update.gather > 0:
            start = self.now()
            self.collective("all_gather", "all_gather", "", start, start + update.gather)
