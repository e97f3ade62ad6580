"""What FSDP2 keeps alive: shards and gathered weights, and what its two other parts do: gathers and reductions.

Read from torch 2.13: `_fsdp_param_group.py` (when), `_fsdp_collectives.py` (what), `_fsdp_param.py` (how large).
"""

from __future__ import annotations

from shardwise.predict.terms.facts import Facts, Sums
from shardwise.predict.terms.fsdp2_gathers import Fsdp2Gathers
from shardwise.predict.terms.fsdp2_gradients import Fsdp2Gradients
from shardwise.predict.terms.instants import ROOT, At
from shardwise.predict.terms.live import Live
from shardwise.predict.terms.update import OptimizerBytes


class Fsdp2Terms:
    """FSDP2's terms of one plan."""

    def __init__(self, facts: Facts, optimizer: OptimizerBytes) -> None:
        self.facts, self.optimizer, self.sums = facts, optimizer, Sums(facts)
        self._gathers = Fsdp2Gathers(facts)
        self._gradients = Fsdp2Gradients(facts, self.sums)

    def at_rest(self) -> Live:
        """Return what lives all the time from the second step on: shards and optimizer states."""
        shards = self.facts.root.shards + self.sums.shards[-1]
        if not self.facts.offloads:
            return {"sharded_parameters": shards, **self.optimizer.states}
        return {"offloaded": shards + sum(self.optimizer.states.values())}

    def gathered(self, at: At) -> Live:
        """Return gathered weights, and the buffers of gathers."""
        if at.moment == "step":
            return {}
        return {"unsharded_parameters": self._weights(at), "all_gather_buffers": self._gathers.bytes(at)}

    def gradients(self, at: At) -> Live:
        """Return gradients, whole and sharded."""
        return self._gradients.gradients(at)

    def reductions(self, at: At) -> Live:
        """Return the buffers of gradient reductions."""
        return self._gradients.buffers(at)

    def update(self) -> Live:
        """Return the temporaries of the optimizer step."""
        if self.facts.offloads:
            return {"offloaded": self.optimizer.temporaries}
        return {"temporaries": self.optimizer.temporaries}

    def _weights(self, at: At) -> int:
        """A unit's weights are gathered while it is at work, the root's from first to last, some units' in between."""
        root, kept, late = self.facts.root.gathered, self.sums.kept, self.facts.late
        reduces = at.moment in ("reduction", "reduced")
        if at.unit == ROOT and reduces:
            return 0 if late is None else self.facts.units[late].bytes.gathered
        if at.unit == ROOT:
            return root + (kept[-1] if at.moment in ("head", "loss", "head_backward") else 0)
        if at.unit == late and reduces:
            return kept[at.unit]
        if reduces:
            return root + kept[at.unit]
        unit = self.facts.units[at.unit]
        # What stayed of it, sharded over fewer ranks, is freed once it is whole again.
        stayed = unit.kept if at.moment == "return" and not isinstance(unit.reshards, bool) else 0
        return root + kept[at.unit] + unit.bytes.gathered + stayed
