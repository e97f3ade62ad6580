"""What terms are made from: the units of a plan in the order of forward, in bytes."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

from shardwise.predict.terms.unit_bytes import UnitBytes
from shardwise.spec.plan import Plan


@dataclass(frozen=True, kw_only=True, slots=True)
class PlacedUnit:
    """One unit at its place in the order of forward; units that are alike share one object."""

    bytes: UnitBytes
    """What it holds."""
    name: str
    """Name of the first unit that is like it."""
    reshards: bool | int
    """Its gathered weights are freed after forward; a number: kept sharded over so many ranks; False: kept."""
    has_backward: bool
    """Backward needs its weights."""
    block_kind: int | None
    """Kind of block that it is; None for an embedding or a head of its own."""
    recomputed: bool
    """Its activations are recomputed in backward."""

    @property
    def kept(self) -> int:
        """Bytes of its weights that stay gathered between its forward and its backward."""
        if self.reshards is True:
            return 0
        return self.bytes.gathered if self.reshards is False else self.bytes.gathered // self.reshards


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """A plan, and its units in bytes."""

    plan: Plan
    """What is decided."""
    device_type: Literal["cuda", "cpu"]
    """What it runs on: on `cpu` gathers and reductions are exchanges between processes."""
    units: tuple[PlacedUnit, ...]
    """All units but the root, in the order of forward."""
    root: UnitBytes
    """The root unit, gathered from the first forward to the end of backward."""
    early_root_gradients: int
    """Bytes of the root's whole gradients that exist from the loss on: those of its head and its last norm."""
    head_gradient: int
    """Bytes of the whole gradient of the head's weight; 0: it does not train."""
    tied_gradient: int
    """Bytes of the whole gradient of a weight that embedding and head share, in the root or a unit of its own. The
    head's part of it waits in autograd until the embedding's is there."""
    whole_embedding: int
    """Bytes by which the embedding's gradient is larger than this rank's part of it, before it is reduced: where a
    tensor axis splits its rows, every rank computes a gradient of all rows."""
    embedding_gradient: int
    """Bytes of this rank's part of it."""
    late: int | None
    """Place of the unit that is reduced after the root: the first that backward reaches, where no gradient flows into
    its input, so that FSDP2 learns only at the end of backward that it is done."""

    @property
    def own_head(self) -> bool:
        """Whether the last unit is the head."""
        return bool(self.units) and self.units[-1].block_kind is None

    @property
    def offloads(self) -> bool:
        """Whether shards of parameters and gradients lie on the host, apart from the device's memory."""
        return self.plan.offload.parameters and self.device_type == "cuda"


class Sums:
    """Sums over the units before a place of forward, so that no instant has to add up all of them.

    Each list has one entry per place, and a last one: the sum of all.
    """

    def __init__(self, facts: Facts) -> None:
        units = facts.units
        self.shards = _before([unit.bytes.shards for unit in units])
        """Shards of parameters."""
        self.kept = _before([unit.kept for unit in units])
        """Weights that stay gathered."""
        self.gradient_shards = _before([unit.bytes.gradient_shards for unit in units])
        """Sharded gradients."""
        self.kept_gradients = _before([unit.bytes.kept_gradients for unit in units])
        """Whole gradients that wait for a deferred reduction."""
        self.reduced = _before([unit.bytes.reduced for unit in units])
        """Buffers of reduce-scatters."""


def _before(sizes: list[int]) -> list[int]:
    return list(accumulate(sizes, initial=0))
