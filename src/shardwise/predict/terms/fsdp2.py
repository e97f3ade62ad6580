"""What FSDP2 keeps alive: shards, gathered weights and the buffers of its gathers.

Read from torch 2.13: `_fsdp_param_group.py` (when), `_fsdp_collectives.py` (what), `_fsdp_param.py` (how large).
Gradients and their reductions are in `terms.fsdp2_gradients`.
"""

from __future__ import annotations

from shardwise.predict.terms.facts import Facts, Sums
from shardwise.predict.terms.fsdp2_gradients import Fsdp2Gradients
from shardwise.predict.terms.instants import ROOT, At
from shardwise.predict.terms.live import Live
from shardwise.predict.terms.update import OptimizerBytes


class Fsdp2Terms:
    """FSDP2's terms of one plan."""

    def __init__(self, facts: Facts, optimizer: OptimizerBytes) -> None:
        self.facts, self.optimizer, self.sums = facts, optimizer, Sums(facts)
        self._grads = Fsdp2Gradients(facts, self.sums)
        self._end = len(facts.units)
        self._collective = facts.plan.mesh.shard > 1
        # Without streams a gather's buffer is freed as soon as the unit's own weights are copied out of it.
        self._by_streams = facts.device_type == "cuda" or not facts.plan.prefetch.async_all_gather

    def at_rest(self) -> Live:
        """Return what lives all the time from the second step on: shards and optimizer states."""
        shards = self.facts.root.shards + self.sums.shards[-1]
        if not self.facts.offloads:
            return {"sharded_parameters": shards, **self.optimizer.states}
        return {"offloaded": shards + sum(self.optimizer.states.values())}

    def gathered(self, at: At) -> Live:
        """Return gathered weights, and the buffers of gathers."""
        moment, place = at.moment, at.unit
        if place == ROOT:
            return self._root_gathered(at)
        unit, root = self.facts.units[place], self.facts.root
        weights = root.gathered + self.sums.kept[place]
        if place == self.facts.late and moment in ("reduction", "reduced"):
            return {"unsharded_parameters": self.sums.kept[place]}
        if moment not in ("reduction", "reduced"):
            weights += unit.bytes.gathered
        forward = moment in ("arrival", "forward")
        buffers = self._forward_buffers(at) if forward else self._backward_buffers(at)
        return {"unsharded_parameters": weights, "all_gather_buffers": buffers}

    def gradients(self, at: At) -> Live:
        """Return gradients, whole and sharded."""
        return self._grads.gradients(at)

    def reductions(self, at: At) -> Live:
        """Return the buffers of gradient reductions."""
        return self._grads.buffers(at)

    def update(self) -> Live:
        """Return the temporaries of the optimizer step."""
        return {"temporaries": self.optimizer.temporaries}

    def _root_gathered(self, at: At) -> Live:
        """The root's weights are gathered first of all and freed when its gradients are reduced."""
        root, moment = self.facts.root.gathered, at.moment
        if moment == "step":
            return {}
        if moment in ("reduction", "reduced"):
            late = self.facts.late
            return {} if late is None else {"unsharded_parameters": self.facts.units[late].bytes.gathered}
        if moment in ("arrival", "forward"):
            held = self._buffer(ROOT) if moment == "arrival" or self._by_streams else 0
            ahead = range(self.facts.plan.prefetch.forward) if moment == "forward" else ()
            held += sum(self._buffer(other) for other in ahead)
            return {"unsharded_parameters": root, "all_gather_buffers": held}
        if moment == "backward":  # of the embedding: all other units are freed
            return {"unsharded_parameters": root}
        weights = root + self.sums.kept[-1]
        return {"unsharded_parameters": weights, "all_gather_buffers": self._last_buffers(at)}

    def _last_buffers(self, at: At) -> int:
        """Return the buffers of gathers around the loss, after the last unit's forward and before its backward."""
        if at.moment == "head":
            return self._buffer(self._end - 1) if self._by_streams else 0
        if at.moment == "loss":
            return 0
        last = self._end - 1 - self.facts.own_head
        return self._gathered_ahead(last, last - self.facts.plan.prefetch.backward)

    def _buffer(self, place: int) -> int:
        """Return the buffer of a unit's gather; 0 where there is no such unit, or nothing to gather over."""
        if not self._collective or place >= self._end:
            return 0
        return self.facts.root.gathered if place == ROOT else self.facts.units[place].bytes.gathered

    def _forward_buffers(self, at: At) -> int:
        """Return the buffers of gathers while a unit's weights arrive, or it computes, in forward.

        A buffer lives until the next unit's weights are copied out of theirs: until then a local variable of
        `wait_for_unshard` holds it. So two are alive at an arrival, beside those that are gathered ahead.
        """
        place, arrives = at.unit, at.moment == "arrival"
        if not self._collective:
            return self.facts.units[place].bytes.widest_cast if arrives else 0
        held = self._buffer(place) if arrives or self._by_streams else 0
        if arrives and self._by_streams:
            held += self._buffer(place - 1)
        ahead = range(place + 1, place + 1 + self.facts.plan.prefetch.forward - arrives)
        return held + sum(self._buffer(other) for other in ahead)

    def _backward_buffers(self, at: At) -> int:
        """Return the buffers of gathers while a unit's weights return, or it computes, in backward.

        A buffer is freed once the weights are copied out. Units that were freed after forward, as far as backward needs
        them, are gathered ahead.
        """
        place, returns = at.unit, at.moment == "return"
        units, depth = self.facts.units, self.facts.plan.prefetch.backward
        if not self._collective:
            return units[place].bytes.widest_cast if returns and units[place].reshards is not False else 0
        first = place if returns else place - 1
        return self._gathered_ahead(first, min(first - 1, place - depth) if returns else place - 1 - depth)

    def _gathered_ahead(self, first: int, past: int) -> int:
        """Return the buffers of units `first` down to, without it, `past`, of those that backward gathers again."""
        units = self.facts.units
        return sum(
            self._buffer(place)
            for place in range(first, max(-1, past), -1)
            if units[place].reshards is not False and units[place].has_backward
        )
