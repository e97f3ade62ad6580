"""One step of a plan: the terms of its sharding beside the parts of its computation."""

from __future__ import annotations

from dataclasses import dataclass, field

from shardwise.predict.blocks import EndsMemory, PartMemory
from shardwise.predict.terms.facts import Facts
from shardwise.predict.terms.instants import At, ShardingTerms
from shardwise.predict.terms.live import Live, on_device, together
from shardwise.spec.plan import Plan


@dataclass(frozen=True, kw_only=True, slots=True)
class Sharding:
    """What depends on how a plan is laid out, and not on how many tokens are computed."""

    facts: Facts
    """Units in bytes."""
    terms: ShardingTerms
    """What is kept alive."""
    resting: Live
    """What lives all the time."""
    twice_loaded: int
    """Bytes of a tied weight's second shard, which exists for a moment of loading."""
    first_block: int
    """Place of block 0 among the units: 1 after an embedding of its own, else 0."""
    alike: tuple[tuple[int, ...], ...]
    """Blocks that are alike, by number."""
    totals: dict[At, int] = field(default_factory=dict)
    """Bytes on the device at instants that were asked for."""

    def live(self, at: At) -> Live:
        """Return what sharding and optimizer hold at an instant."""
        return together(self.resting, *self._moving(at))

    def total(self, at: At) -> int:
        """Return the bytes of that on the device; remembered."""
        found = self.totals.get(at)
        if found is None:
            found = on_device(self.resting) + sum(on_device(part) for part in self._moving(at))
            self.totals[at] = found
        return found

    def _moving(self, at: At) -> list[Live]:
        terms = self.terms
        parts = [terms.gathered(at), terms.gradients(at), terms.reductions(at)]
        return [*parts, terms.update()] if at.moment == "step" else parts


@dataclass(frozen=True, kw_only=True, slots=True)
class Parts:
    """What depends on what is computed, and not on how it is sharded."""

    ends: EndsMemory
    """Embedding, head, and what all blocks are given."""
    blocks: tuple[PartMemory, ...]
    """Each block, in the order of forward."""
    evaluated_ends: EndsMemory
    """The ends, of as many rows as an evaluation takes at once."""
    evaluated: tuple[PartMemory, ...]
    """The blocks, of as many rows."""
    kept: tuple[int, ...]
    """Bytes that embedding and blocks before each block keep for backward; the last entry: all."""
    pieces: int
    """How many times the head is at work: 1, or the chunks of a chunked loss."""
    logits: int
    """Bytes of all logits, as the head makes them and as they leave the model."""
    logits_gradient: int
    """Bytes of their gradient in the compute dtype."""
    evaluated_logits: int
    """`logits` of an evaluation."""

    def entering(self, block: int) -> int:
        """Return the bytes of a block's input; after the last, of the head's."""
        return self.blocks[block - 1].output if block else self.ends.embedding.output

    def travelling(self, block: int) -> int:
        """Return the bytes of the block before that are on their way to the host, or back."""
        return self.blocks[block - 1].travelling if block else 0

    def carried(self, block: int) -> int:
        """Return the bytes of the first block's input that the decoder holds in forward beside what is kept."""
        return self.ends.carried if block and not self.blocks[0].keeps_input else 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """A step, from which the bytes of any instant follow."""

    plan: Plan
    """What is decided."""
    sharding: Sharding
    """How it is laid out."""
    parts: Parts
    """What it computes."""
    workspace: int
    """Bytes that matrix products keep for themselves from beginning to end."""
    inputs: int
    """Bytes of the batches that are on the device in training."""
    block_list: str
    """Dotted name of the list of blocks."""
    held_out: bool
    """There are evaluations between steps."""
