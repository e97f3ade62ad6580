"""What blocks save for backward travels to the host and back, beside the computation: `engine.activation_offload`."""

from __future__ import annotations

from collections.abc import Sequence

from shardwise.predict.schedule.costs import UnitCosts
from shardwise.predict.schedule.lanes import Lanes
from shardwise.spec.timeline import Span, What


class TravelLanes(Lanes):
    """Lanes with one more stream, on which saved activations travel both ways.

    They leave while their block computes, as soon as they are there. At the end of the next block's forward the compute
    lane waits for them. The last block's are used as they are; the others come back, each from when the block behind it
    begins its backward.
    """

    def __init__(self, slowdown: float, units: Sequence[UnitCosts], names: Sequence[str]) -> None:
        super().__init__(slowdown)
        travelling = [(name, unit.travel) for name, unit in zip(names, units, strict=True) if unit.travel > 0]
        self.travel = dict(travelling)
        """Seconds of one way, by unit."""
        self._before = {name: before for (name, _), (before, _) in zip(travelling[1:], travelling, strict=False)}
        self._travels_free = 0.0
        self._left: Span | None = None
        self._back: dict[str, Span] = {}

    def leaves(self, unit: str) -> None:
        """Issue the way to the host of what a unit's forward, just issued, has saved."""
        self.mark("leave", unit)

    def returns(self, unit: str) -> None:
        """Have a unit's saved activations, and start the way back of those of the unit before it."""
        self.mark("return", unit)

    def passed(self, what: What, unit: str) -> None:
        """Issue the copies that a mark stands for."""
        if what == "leave":
            seconds = self.travel[unit]
            computed = self.spans[self.operations[len(self.ends) - 1][5]]
            begun = self.free if computed is None else computed.start
            start = max(begun, self.free - seconds, self._travels_free, self.link_free("to_host"))
            before, self._left = self._left, self.copy("to_host", "leave", unit, start, start + seconds)
            self._travels_free = self._left.end
            self.hold(before)
        elif what == "return":
            self.hold(self._left)
            self.hold(self._back.pop(unit, None))
            before_it = self._before.get(unit)
            if before_it is not None:
                seconds = self.travel[before_it]
                start = max(self.reached, self._travels_free, self.link_free("to_device"))
                back = self.copy("to_device", "return", before_it, start, start + seconds)
                self._travels_free, self._back[before_it] = back.end, back
