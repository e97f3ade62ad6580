"""The streams and communicators of one GPU, which all rules for GPUs share: when what is issued on them runs."""

from __future__ import annotations

from shardwise.predict.schedule.costs import StepCosts, UnitCosts
from shardwise.predict.schedule.frame import Frame
from shardwise.spec.timeline import ROOT, Span


class Streams(Frame):
    """One optimizer step on a GPU: its side streams, in the order of issue."""

    def __init__(self, step: StepCosts, brief: bool = False) -> None:
        super().__init__(step, brief)
        self.all = (*step.units, step.root.unit)
        self.called = (*step.names, ROOT)
        self.reduces = self.sums = True
        """Whether this micro-batch is reduced, and over the replicas too."""
        self.arriving: list[Span | None] = [None] * len(self.all)
        """Gathers that are issued and not waited for."""
        self.reduced: list[Span] = []
        """Reductions for which the compute lane waits at the end of backward."""
        self.stored: Span | None = None
        """The last gradients on their way to the host."""
        self.copy_in_free = self.gathers_free = self.reductions_free = self.sums_free = 0.0
        """When each stream is done with what is issued."""
        self.turn = self.reductions_turn = self.regathers_turn = 0.0
        """When each communicator is: that of gathers, on which reductions take turns; and their own, where they have
        any."""

    def begin(self, last: bool) -> None:
        """Say which micro-batch it is."""
        self.reduces = last or self.step.mode != "defer_all"
        self.sums = last or self.step.mode == "reduce_each"

    def copy_in(self, unit: UnitCosts, name: str, ready: float, apart: bool = False) -> float:
        """Issue what a gather is made from: shards from the host, cast into the buffer; `apart`: the part that was kept
        for a smaller group. Returns when it is there."""
        start = max(ready, self.copy_in_free)
        if self.host > start:
            start = self.host
            self.held_up += 1
        if unit.fetch > 0 and not apart:
            start = max(start, self.link_free("to_device"))
            start = self.copy("to_device", "fetch", name, start, start + unit.fetch).end
        seconds = unit.recopy_in if apart else unit.copy_in
        if seconds > 0:
            start = self.add("copy_in", "copy_in", name, start, start + seconds).end
        self.copy_in_free = start
        return start

    def gather(self, place: int, seconds: float, ready: float, apart: bool) -> None:
        """Issue a gather on the wire; `apart`: on a communicator of its own."""
        turn = self.regathers_turn if apart else self.turn
        start = max(ready, self.gathers_free, turn)
        end = self.gathers_free = start + seconds
        if apart:
            self.regathers_turn = end
        else:
            self.turn = end
        self.arriving[place] = self.collective("all_gather", "all_gather", self.called[place], start, end)

    def copy_weights(self, place: int, seconds: float) -> None:
        """Issue what a unit does whose shard axis has one rank: copy its weights, on the compute lane."""
        if seconds <= 0:
            return
        unit, name = self.all[place], self.called[place]
        if unit.fetch > 0:
            start = max(self.now(), self.host, self.link_free("to_device"))
            by = self.copy("to_device", "fetch", name, start, start + unit.fetch)
            self.wait(by.end, by)
        self.compute(seconds, "copy_out", name)

    def copy_out(self, place: int, arriving: Span, seconds: float) -> None:
        """Wait for a gather and take the weights out of it."""
        self.wait(arriving.end, arriving)
        self.arriving[place] = None
        self.compute(seconds, "copy_out", self.called[place])

    def reduce(self, unit: UnitCosts, name: str, ready: float) -> Span | None:
        """Issue what becomes of gradients in a buffer: over the shard axis, over the replicas, to the host. Returns the
        first of them, if it is a collective of the shard axis."""
        start = max(ready, self.host, self.reductions_free)
        scattered: Span | None = None
        done: Span | None = None
        if unit.reduce > 0:
            shared = not self.step.separate_group
            start = max(start, self.turn if shared else self.reductions_turn)
            done = scattered = self.collective("reduce_scatter", "reduce_scatter", name, start, start + unit.reduce)
            start = done.end
            if shared:
                self.turn = start
            else:
                self.reductions_turn = start
        self.reductions_free = start
        if self.sums and unit.all_reduce > 0:
            start = max(start, self.sums_free)
            done = self.collective("all_reduce", "all_reduce", name, start, start + unit.all_reduce)
            self.sums_free = start = done.end
        if unit.store > 0 and (self.sums or unit.all_reduce <= 0):
            done = self._store(unit, name, start)
        if done is not None:
            self.reduced.append(done)
        return scattered

    def _store(self, unit: UnitCosts, name: str, start: float) -> Span:
        """Issue the way to the host of reduced gradients. Where there are some already, the host waits to add them."""
        start = max(start, self.link_free("to_host"))
        done = self.stored = self.copy("to_host", "store", name, start, start + unit.store)
        if unit.all_reduce > 0:
            self.sums_free = done.end
        else:
            self.reductions_free = done.end
        if self.number > 0 and self.step.mode == "reduce_each":
            self.host_waits(done.end, done)
        return done

    def over(self) -> None:
        """Let the compute lane wait for all reductions, and the host for what is on its way there."""
        for done in self.reduced:
            self.wait(done.end, done)
        self.reduced.clear()
        if self.stored is not None:
            self.host_waits(self.stored.end, self.stored)
            self.stored = None
