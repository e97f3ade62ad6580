"""FSDP2 on GPUs, as torch 2.13 orders it (`torch/distributed/fsdp/_fully_shard`).

Forward of unit i: its gather, unless it was issued ahead; the streams of gathers wait for the copy-out of the unit
before; the compute lane waits for the gather, copies out, and computes. The next unit's gather is issued only then,
yet the host runs ahead, so that up to two gathers go on beside the computation. In backward the gather of the unit
before is issued after the copy-out, and starts after it. A reduction starts when its gradients are in its buffer;
before that, the compute lane waits for the oldest of those in flight, where there are as many as may be. At the end of
every backward it waits for the last of all."""

from __future__ import annotations

from shardwise.predict.schedule.alike import AlikeUnits
from shardwise.predict.schedule.costs import StepCosts
from shardwise.spec.timeline import ROOT

TWO_COMMUNICATORS = (
    "collectives on different communicators are counted at full speed each, also where they share a link"
)


class Fsdp2(AlikeUnits):
    """One optimizer step of FSDP2 with NCCL."""

    def __init__(self, step: StepCosts, brief: bool = False) -> None:
        super().__init__(step, brief)
        if step.separate_group or step.regather_group:
            self.notes = (TWO_COMMUNICATORS,)

    def micro_batch(self, last: bool) -> None:
        """Issue a forward and its backward."""
        self.begin(last)
        self.borders.clear()
        self._forward()
        self._backward()

    def _forward(self) -> None:
        root, names, ahead = self.step.root, self.names, self.step.ahead
        self.gathers_after, self.copied_out = self.event(), 0
        self._arrive(len(names), ahead[-1])
        self.compute(root.embed, "forward", ROOT, root.embed_issue)
        place = -1
        while (place := place + 1) < len(names):
            unit = self.units[place]
            self._arrive(place, ahead[place])
            self.compute(unit.forward, "forward", names[place], unit.forward_issue)
            if unit.travel > 0:
                self.leaves(names[place])
            else:
                place = self.skip(place, 1, ahead)
        kept = self.event() if self.step.regather_group else 0
        self.compute(root.head, "forward", ROOT, root.head_issue)
        self.gathers_after, self.copied_out = kept or self.copied_out or self.gathers_after, 0

    def _arrive(self, place: int, ahead: tuple[int, ...]) -> None:
        """Have a unit's weights for forward, and issue the gathers that it asks for ahead."""
        unit = self.all[place]
        self._gather(place, unit.gather)
        arriving = self.arriving[place]
        if arriving is None:
            self.copy_weights(place, unit.copy_out)
        else:
            self.gathers_after = self.copied_out or self.gathers_after
            self.copy_out(place, arriving, unit.copy_out)
            self.copied_out = self.event()
        for other in ahead:
            self._gather(other, self.all[other].gather)

    def _return(self, place: int) -> None:
        """Have a unit's weights for backward, and issue the gathers that it asks for ahead."""
        unit = self.all[place]
        self._gather(place, unit.regather, apart=self.step.regather_group)
        arriving = self.arriving[place]
        if arriving is None:
            self.copy_weights(place, unit.recopy_out)
        else:
            self.copy_out(place, arriving, unit.recopy_out)
            self.gathers_after = self.event()
        for other in self.step.behind[place]:
            self._gather(other, self.all[other].regather, apart=self.step.regather_group)

    def _gather(self, place: int, seconds: float, apart: bool = False) -> None:
        if seconds > 0 and self.arriving[place] is None:
            ready = self.copy_in(self.all[place], self.called[place], self.when(self.gathers_after), apart)
            self.gather(place, seconds, ready, apart)

    def _backward(self) -> None:
        root, names, late = self.step.root, self.names, self.step.late
        self.borders.clear()
        self._return(len(names))
        self.compute(root.head_backward, "backward", ROOT, root.head_backward_issue)
        place = len(names)
        while (place := place - 1) >= 0:
            unit = self.units[place]
            if unit.backward > 0 or unit.trains:
                self._return(place)
                if unit.travel > 0:
                    self.returns(names[place])
                self.compute(unit.backward, "backward", names[place], unit.backward_issue)
                if place != late:
                    self._reduce(place)
                # A gather that nobody has asked for ahead may start beside what was settled before its issue.
                if unit.travel <= 0 and (unit.regather <= 0 or self.step.behind[place]):
                    place = self.skip(place, -1, self.step.behind)
        self.compute(root.embed_backward, "backward", ROOT, root.embed_backward_issue)
        self._reduce(len(names))
        self.over()
        if late is not None:
            self._reduce(late)
            self.over()
        self.in_flight.clear()

    def _reduce(self, place: int) -> None:
        """Issue a unit's reduction, when its backward is issued."""
        if not self.reduces:
            return
        while len(self.in_flight) >= self.step.buffers:
            oldest = self.in_flight.popleft()
            self.wait(oldest.end, oldest)
        unit = self.all[place]
        if unit.trains:
            self.compute(unit.reduce_copy_in, "reduce_copy_in", self.called[place])
            scattered = self.reduce(unit, self.called[place], self.now())
            if scattered is not None:
                self.in_flight.append(scattered)
