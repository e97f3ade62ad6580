"""Whole weights on every rank: DistributedDataParallel, and ZeRO-2, which reduces to shards.

Gradients are reduced beside backward as they come, here by unit, and waited for at its end.
"""

from __future__ import annotations

from shardwise.predict.schedule.streams import Streams
from shardwise.spec.timeline import ROOT


class Ddp(Streams):
    """One optimizer step with whole weights."""

    def micro_batch(self, last: bool) -> None:
        """Issue a forward and its backward."""
        self.begin(last)
        root, names = self.step.root, self.names
        self.compute(root.embed, "forward", ROOT, root.embed_issue)
        for place, unit in enumerate(self.units):
            self.compute(unit.forward, "forward", names[place], unit.forward_issue)
            if unit.travel > 0:
                self.leaves(names[place])
        self.compute(root.head, "forward", ROOT, root.head_issue)
        self.compute(root.head_backward, "backward", ROOT, root.head_backward_issue)
        for place in range(len(names) - 1, -1, -1):
            unit = self.units[place]
            if unit.travel > 0:
                self.returns(names[place])
            self.compute(unit.backward, "backward", names[place], unit.backward_issue)
            self._reduce(place)
        self.compute(root.embed_backward, "backward", ROOT, root.embed_backward_issue)
        self._reduce(len(names))
        self.over()

    def _reduce(self, place: int) -> None:
        unit, name = self.all[place], self.called[place]
        if self.reduces and unit.trains:
            self.compute(unit.reduce_copy_in, "reduce_copy_in", name)
            self.reduce(unit, name, self.now())
