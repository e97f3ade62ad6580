"""PyTorch's first FSDP on GPUs (`torch/distributed/fsdp/_runtime_utils.py`), with its defaults.

What differs from FSDP2: weights are used where they were gathered, nothing is copied out; before a gather is issued,
the host waits until all but one of the units whose weights were freed have been computed (`limit_all_gathers`);
gradients are cast beside the computation, and reductions never hold it up before the end of backward.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from shardwise.predict.schedule.costs import StepCosts
from shardwise.predict.schedule.streams import Streams
from shardwise.spec.timeline import ROOT

FREED = 2
"""Units whose weights are given up and perhaps still computed with, when the host waits for the first of them."""


class Fsdp1(Streams):
    """One optimizer step of FSDP's first version."""

    def __init__(self, step: StepCosts, brief: bool = False) -> None:
        super().__init__(step, brief)
        self.gathers_after = 0
        self.freed: deque[int] = deque()
        """Events after which the weights of a unit are free, oldest first."""
        self.kept: set[int] = set()
        """Units whose weights stay from one micro-batch to the next."""

    def kept_events(self) -> Iterable[int]:
        """Return those after which weights are free."""
        return self.freed

    def micro_batch(self, last: bool) -> None:
        """Issue a forward and its backward."""
        self.begin(last)
        root, names, end = self.step.root, self.names, len(self.names)
        self.gathers_after = self.event()
        self._arrive(end, forward=True)
        self.compute(root.embed, "forward", ROOT, root.embed_issue)
        for place, unit in enumerate(self.units):
            self._arrive(place, forward=True)
            self.compute(unit.forward, "forward", names[place], unit.forward_issue)
            if unit.travel > 0:
                self.leaves(names[place])
            if unit.regather > 0:
                self.freed.append(self.event())
        self.compute(root.head, "forward", ROOT, root.head_issue)
        self._arrive(end, forward=False)
        self.compute(root.head_backward, "backward", ROOT, root.head_backward_issue)
        for place in range(end - 1, -1, -1):
            unit = self.units[place]
            if unit.backward > 0 or unit.trains:
                self._arrive(place, forward=False)
                if unit.travel > 0:
                    self.returns(names[place])
                self.compute(unit.backward, "backward", names[place], unit.backward_issue)
                self._reduce(place)
        self.compute(root.embed_backward, "backward", ROOT, root.embed_backward_issue)
        self._reduce(end)
        self.over()

    def _arrive(self, place: int, forward: bool) -> None:
        """Have a unit's weights, and issue the gathers that it asks for ahead."""
        self._gather(place, forward)
        arriving = self.arriving[place]
        if arriving is not None:
            unit = self.all[place]
            self.copy_out(place, arriving, unit.copy_out if forward else unit.recopy_out)
        for other in (self.step.ahead if forward else self.step.behind)[place]:
            self._gather(other, forward)

    def _gather(self, place: int, forward: bool) -> None:
        unit = self.all[place]
        seconds = unit.gather if forward else unit.regather
        if seconds <= 0 or self.arriving[place] is not None or place in self.kept:
            return
        ready = self.copy_in(unit, self.called[place], self.when(self.gathers_after))
        if len(self.freed) >= FREED:
            event = self.freed.popleft()
            until = self.when(event)
            if until > self.host:
                self.host_waits(until, self.span_before(event))
                self.held_up += 1
        self.gather(place, seconds, max(ready, self.host), apart=False)

    def _reduce(self, place: int) -> None:
        """Give up a unit's weights and issue its reduction, when its backward is issued."""
        unit, name = self.all[place], self.called[place]
        if unit.gather > 0:
            if self.reduces or unit.regather > 0:
                self.freed.append(self.event())
                self.kept.discard(place)
            else:
                self.kept.add(place)
        if not self.reduces or not unit.trains:
            return
        ready = self.now()
        if unit.reduce_copy_in > 0:
            start = max(ready, self.reductions_free, self.copy_in_free, self.host)
            end = self.copy_in_free = start + unit.reduce_copy_in
            self.add("copy_in", "reduce_copy_in", name, start, end)
            ready = end
        self.reduce(unit, name, ready)
