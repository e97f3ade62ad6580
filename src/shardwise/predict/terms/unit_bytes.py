"""One communication unit in bytes: what FSDP2 makes of its parameters on rank 0, the rank with the largest shards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from shardwise.predict.unit_rows import UnitTensor
from shardwise.spec.plan import Plan

ITEM_BYTES: dict[str, int] = {"fp32": 4, "bf16": 2, "fp16": 2}
"""Bytes of an element of each dtype."""


@dataclass(frozen=True, kw_only=True, slots=True)
class UnitBytes:
    """One communication unit on rank 0; figures are in bytes where they do not say otherwise."""

    shards: int
    """Its shards in their storage dtypes, frozen and trained."""
    cast: int
    """Its shards in the compute dtype, as far as they are stored in another: what a gather copies into its buffer."""
    widest_cast: int
    """The largest of these casts, of one parameter."""
    gathered: int
    """All its weights in the compute dtype, each padded to whole shards: the buffer of an all-gather, and once more the
    weights that are copied out of it."""
    gradients: int
    """Gradients of what trains, whole and in the compute dtype, as autograd makes them."""
    kept_gradients: int
    """The same in the dtype of the reduction, in which they wait while it is deferred."""
    reduced: int
    """Buffer of a reduce-scatter: the same, each padded to whole shards."""
    gradient_shards: int
    """This rank's part of the gradients in their storage dtype."""
    trained_shards: int
    """Elements of this rank's shards of what trains."""
    last_gradient: int
    """Elements of the last parameter that trains: a local variable of FSDP2 holds its gradient while it reduces."""
    widest: int
    """Whole bytes of its largest parameter in the compute dtype."""

    @classmethod
    def of(cls, tensors: Sequence[UnitTensor], plan: Plan) -> UnitBytes:
        """Return the bytes of a unit that holds these parameters."""
        ranks, dtypes = plan.mesh.shard, plan.dtypes
        param, reduce = ITEM_BYTES[dtypes.param], ITEM_BYTES[dtypes.reduce]
        shards = cast = widest_cast = elements = whole = trained = last = widest = 0
        for tensor in tensors:
            mine = tensor.rank_elements
            shards += mine * ITEM_BYTES[tensor.dtype]
            elements += mine
            widest = max(widest, mine * ranks * param)
            if tensor.dtype != dtypes.param:
                cast += mine * param
                widest_cast = max(widest_cast, mine * param)
            if tensor.trained:
                last = prod(tensor.shape)
                whole += last
                trained += mine
        return cls(
            shards=shards,
            cast=cast,
            widest_cast=widest_cast,
            gathered=elements * ranks * param,
            gradients=whole * param,
            kept_gradients=whole * reduce,
            reduced=trained * ranks * reduce,
            gradient_shards=trained * ITEM_BYTES[dtypes.trained_storage],
            trained_shards=trained,
            last_gradient=last,
            widest=widest,
        )
