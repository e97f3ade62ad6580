"""FSDP2's gradients and the buffers that reduce them, at every instant of a step's last micro-batch.

Units are reduced from the last to the first, then the root, then the one unit (if any) whose end FSDP2 learns last.
"""

from __future__ import annotations

from shardwise.predict.terms.facts import Facts, Sums
from shardwise.predict.terms.instants import ROOT, At
from shardwise.predict.terms.live import Live, together
from shardwise.predict.terms.unit_bytes import UnitBytes
from shardwise.spec.footprint import Category
from shardwise.spec.strict import DTYPE_BYTES

_FORWARD = ("arrival", "forward", "head", "loss", "head_backward")
"""Moments at which no gradient of the micro-batch is complete."""


class Fsdp2Gradients:
    """Gradients and reductions of one plan."""

    def __init__(self, facts: Facts, sums: Sums) -> None:
        self.facts, self.sums = facts, sums
        plan = facts.plan
        self._ranks = plan.mesh.shard
        self._several = plan.accumulation_steps > 1
        self._mode = plan.accumulation_mode if self._several else "reduce_each"
        self._exchanged = facts.device_type == "cpu" and self._ranks > 1
        # Where sums wait apart from `.grad` (engine.accumulation), two sets of sharded gradients meet.
        in_background = self._exchanged and plan.reduce_scatter.asynchronous
        self._apart = self._several and self._mode == "reduce_each" and in_background
        self._adds = self._several and self._mode == "reduce_each" and not self._apart
        self._cast = plan.dtypes.reduce != plan.dtypes.trained_storage
        self._buffers = 1 if self._exchanged else plan.reduce_scatter.buffers
        self._in_flight = plan.reduce_scatter.buffers if in_background else 0
        in_root = facts.early_root_gradients >= facts.tied_gradient > 0 and facts.units[0].block_kind is not None
        self._early_others = facts.early_root_gradients - (facts.tied_gradient if in_root else 0)
        waits_reduced = self._mode == "defer_all"
        self._gradient_item = DTYPE_BYTES[plan.dtypes.reduce if waits_reduced else plan.dtypes.param]
        self._shards_place: Category = "offloaded" if facts.offloads else "sharded_gradients"

    def gradients(self, at: At) -> Live:
        """Return gradients, whole and sharded."""
        facts, sums = self.facts, self.sums
        total = sums.gradient_shards[-1] + facts.root.gradient_shards
        if at.evaluating or at.moment == "step":
            return {self._shards_place: total}
        reduced = self._already(at, sums.gradient_shards, facts.root.gradient_shards)
        if self._mode == "defer_all":
            return self._deferred(at, reduced)
        waiting = 0
        if self._mode == "defer_replicate":  # this rank's part of sums that are not yet those of all replicas
            waiting = sums.reduced[-1] + facts.root.reduced - self._already(at, sums.reduced, facts.root.reduced)
        elif self._apart:
            reduced += total
        elif self._several:
            reduced = total
        waits = self._early(at)
        whole: Live = {
            "unsharded_gradients": waits * self._early_others + self._complete(at),
            "logits_and_loss": facts.tied_gradient if waits else 0,
            "sharded_gradients": waiting // self._ranks,
        }
        return together(whole, {self._shards_place: reduced})

    def buffers(self, at: At) -> Live:
        """Return what reductions hold: their inputs, on CPUs the parts that arrive, and results that wait."""
        if at.evaluating or at.moment in (*_FORWARD, "deferred", "step"):
            return {}
        held = self._states(at) + self._flights(at)
        # The result of an all-reduce is held to the end of backward, the root's not as long as that of the late unit;
        # where it has become the gradients, it is counted as such.
        if self.facts.plan.mesh.replicate > 1 and (self._cast or self._adds):
            held += self._already(at, self.sums.reduced, 0) // self._ranks
        if at.moment in ("reduction", "reduced"):
            held += self._unit(at.unit).reduced
        if at.moment != "reduced":
            return {"reduce_scatter_buffers": held}
        unit = self._unit(at.unit)
        output = unit.reduced // self._ranks
        # Over one rank the input is divided into a copy; between processes every rank's part arrives in one buffer.
        parts = unit.reduced if self._ranks == 1 or self._exchanged else 0
        last = unit.last_gradient * self._gradient_item if self._ranks > 1 else 0
        if not self._cast and not self._adds:  # the output becomes the gradients
            return together(
                {"reduce_scatter_buffers": held + parts, "unsharded_gradients": last}, {self._shards_place: output}
            )
        # It is cast to their dtype, when the parts are gone, or added to those that are there.
        cast = unit.gradient_shards if self._cast else 0
        return {"reduce_scatter_buffers": held + output + max(parts, cast), "unsharded_gradients": last}

    def _unit(self, place: int) -> UnitBytes:
        return self.facts.root if place == ROOT else self.facts.units[place].bytes

    def _already(self, at: At, before: list[int], root: int) -> int:
        """Return the sum of a figure over the units that are reduced: `before` by place, and the root's."""
        late = self.facts.late
        late_one = 0 if late is None else before[late + 1] - before[late]
        if at.moment in (*_FORWARD, "deferred"):
            return 0
        if at.unit == ROOT:
            return before[-1] - late_one
        if at.unit == late and at.moment in ("reduction", "reduced"):
            return before[-1] - late_one + root
        return before[-1] - before[at.unit + 1]

    def _early(self, at: At) -> bool:
        """Whether gradients that exist from the loss on wait for the root's reduction, or for the embedding's."""
        if at.moment in _FORWARD:
            return False
        return at.moment not in ("reduction", "reduced") or at.unit not in (ROOT, self.facts.late)

    def _complete(self, at: At) -> int:
        """Return whole gradients of units whose backward is over and whose reduction is not."""
        late, reduces = self.facts.late, at.moment == "reduction"
        mine = self._unit(at.unit).gradients if reduces else 0
        if at.unit == ROOT and at.moment in ("reduction", "reduced") and late is not None:
            return mine + self.facts.units[late].bytes.gradients
        return mine

    def _deferred(self, at: At, reduced: int) -> Live:
        """Return gradients when whole ones wait for the last micro-batch.

        What a micro-batch brings is added to what waits at the end of its unit's backward, so only gradients of the
        root's head and of the late unit are there twice for longer.
        """
        facts, kept, root = self.facts, self.sums.kept_gradients, self.facts.root.kept_gradients
        waiting = kept[-1] + root - self._already(at, kept, root)
        late, ends = facts.late, at.moment in ("reduction", "reduced")
        if at.moment == "reduced":
            waiting -= self._unit(at.unit).kept_gradients
        plan, early = facts.plan, self._early(at)
        if early or at.moment in _FORWARD:  # what of the embedding's is whole on every rank of a tensor group
            beyond = facts.whole_embedding * DTYPE_BYTES[plan.dtypes.reduce] // DTYPE_BYTES[plan.dtypes.param]
            waiting += beyond
        if plan.dtypes.reduce != plan.dtypes.param:  # else autograd itself adds to what waits
            if early:
                waiting += self._early_others
            elif at.unit == ROOT and ends and late is not None:
                waiting += facts.units[late].bytes.gradients
        tied = facts.tied_gradient if early else 0
        return {"unsharded_gradients": waiting, "logits_and_loss": tied, self._shards_place: reduced}

    def _states(self, at: At) -> int:
        """Return inputs of earlier reductions that FSDP2 still holds: one, or as many as it may."""
        past, late, end = self.sums.reduced, self.facts.late, len(self.facts.units)
        count = self._buffers - (at.moment in ("reduction", "reduced"))
        if at.unit == ROOT:
            first = 0 if late is None else late + 1
            return past[min(end, first + count)] - past[min(end, first)]
        first = at.unit + 1
        if at.unit == late and at.moment in ("reduction", "reduced"):
            rest = past[min(end, first + count - 1)] - past[first] if count > 1 else 0
            return rest + (self.facts.root.reduced if count else 0)
        return past[min(end, first + count)] - past[first]

    def _flights(self, at: At) -> int:
        """Return what reductions on the wire hold on CPUs: input (once, if FSDP2 holds it too) and arriving parts."""
        if not self._in_flight:
            return 0
        past, end = self.sums.reduced, len(self.facts.units)
        late = self.facts.late
        first = (0 if late is None else late + 1) if at.unit == ROOT else at.unit + 1
        flying = past[min(end, first + self._in_flight)] - past[min(end, first)]
        return 2 * flying - self._states(at)
