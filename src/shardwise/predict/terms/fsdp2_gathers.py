"""The buffers of FSDP2's gathers: into which weights are gathered, and out of which they are copied."""

from __future__ import annotations

from shardwise.predict.terms.facts import Facts
from shardwise.predict.terms.instants import ROOT, At
from shardwise.predict.terms.unit_bytes import UnitBytes


class Fsdp2Gathers:
    """Buffers of one plan's gathers.

    In forward a buffer lives until the next unit's weights are copied out of theirs: until then a local variable of
    `wait_for_unshard` holds it. So two are alive at an arrival, beside those that are gathered ahead. In backward, and
    where there are no streams, it is freed as soon as its own weights are copied out.
    """

    def __init__(self, facts: Facts) -> None:
        self.facts = facts
        plan = facts.plan
        self._end = len(facts.units)
        self._collective = plan.mesh.shard > 1
        self._by_streams = facts.device_type == "cuda" or not plan.prefetch.async_all_gather
        self._ahead, self._behind = plan.prefetch.forward, plan.prefetch.backward

    def bytes(self, at: At) -> int:
        """Return the bytes of all that are alive."""
        moment = at.moment
        if not self._collective:
            return self._copies(at)
        if moment == "arrival":
            return max(self._arriving(at.unit), self._issuing(at.unit))
        if moment == "forward":
            return self._own(at.unit) + self._following(at.unit, self._ahead)
        if moment == "head":
            return self._own(self._end - 1)
        if moment == "head_backward":
            last = self._end - 1 - self.facts.own_head
            return self._preceding(last, last - self._behind)
        if at.unit == ROOT or moment == "loss":
            return 0
        behind = self._preceding(at.unit - 1, at.unit - 1 - self._behind)
        if moment == "return":
            returning = self._preceding(at.unit, min(at.unit - 1, at.unit - self._behind))
            return max(returning, behind + self._input_behind(at.unit))
        return behind

    def _copies(self, at: At) -> int:
        """Over a shard axis of one rank nothing is gathered: weights are copied, one after the other."""
        returns = at.moment == "return" and self.facts.units[at.unit].reshards is not False
        return self._unit(at.unit).copied if returns or at.moment == "arrival" else 0

    def _arriving(self, place: int) -> int:
        """While weights are copied out, with as much gathered ahead as the unit before has asked for."""
        if place == ROOT:
            return self._buffer(ROOT)
        before = self._buffer(place - 1) if self._by_streams else 0
        return before + self._buffer(place) + self._following(place, self._ahead - 1)

    def _issuing(self, place: int) -> int:
        """While the last of the units that are gathered ahead is put into its buffer."""
        last = place + self._ahead
        if not self._ahead or last >= self._end:
            return 0
        return self._own(place) + self._following(place, self._ahead) + self._unit(last).input

    def _input_behind(self, place: int) -> int:
        """Return what is put into the last buffer that backward gathers ahead of a unit."""
        last = place - self._behind
        if not self._behind or last < 0 or self.facts.units[last].reshards is not True:
            return 0
        return self.facts.units[last].bytes.input if self.facts.units[last].has_backward else 0

    def _own(self, place: int) -> int:
        return self._buffer(place) if self._by_streams else 0

    def _following(self, place: int, count: int) -> int:
        return sum(self._buffer(other) for other in range(place + 1, place + 1 + count))

    def _preceding(self, first: int, past: int) -> int:
        """Return the buffers of units `first` down to, without it, `past`, of those that backward gathers again."""
        units = self.facts.units
        return sum(
            self._buffer(place)
            for place in range(first, max(-1, past), -1)
            if units[place].reshards is not False and units[place].has_backward
        )

    def _buffer(self, place: int) -> int:
        return self._unit(place).gathered if place < self._end else 0

    def _unit(self, place: int) -> UnitBytes:
        return self.facts.root if place == ROOT else self.facts.units[place].bytes
