"""One communication unit in bytes: what FSDP2 makes of its parameters on rank 0, the rank with the largest shards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from shardwise.predict.unit_rows import UnitTensor
from shardwise.spec.model_spec import ModelSpec
from shardwise.spec.plan import Plan
from shardwise.spec.runtime import Runtime
from shardwise.spec.strict import DTYPE_BYTES


@dataclass(frozen=True, kw_only=True, slots=True)
class UnitBytes:
    """One communication unit on rank 0; figures are in bytes where they do not say otherwise."""

    shards: int
    """Its shards in their storage dtypes, frozen and trained."""
    cast: int
    """Its shards in the compute dtype, as far as they are stored in another: what a gather copies into its buffer."""
    input: int
    """What is put into a gather's buffer, as far as it is not the shards themselves: casts, or copies of what lies on
    the host, of all parameters, and the copy from which the widest cast is made."""
    copied: int
    """The same beside whole weights, where one rank has them all and copies one parameter after the other."""
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
    def of(cls, tensors: Sequence[UnitTensor], plan: Plan, *, away: bool = False) -> UnitBytes:
        """Return the bytes of a unit that holds these parameters.

        Args:
            tensors: Its parameters, in the order of the model.
            plan: What is decided.
            away: Shards lie in another memory than the one in which is computed.
        """
        ranks, dtypes = plan.mesh.shard, plan.dtypes
        param, reduce = DTYPE_BYTES[dtypes.param], DTYPE_BYTES[dtypes.reduce]
        cast = sum(tensor.rank_elements * param for tensor in tensors if tensor.dtype != dtypes.param)
        elements = sum(tensor.rank_elements for tensor in tensors)
        trains = [tensor for tensor in tensors if tensor.trained]
        whole = sum(prod(tensor.shape) for tensor in trains)
        trained = sum(tensor.rank_elements for tensor in trains)
        copies = [_copies(tensor, plan, away) for tensor in tensors]
        return cls(
            shards=sum(tensor.rank_elements * DTYPE_BYTES[tensor.dtype] for tensor in tensors),
            cast=cast,
            input=sum(kept for kept, _ in copies) + max((passing for _, passing in copies), default=0),
            copied=_beside_weights(tensors, copies, param) if ranks == 1 else 0,
            gathered=elements * ranks * param,
            gradients=whole * param,
            kept_gradients=whole * reduce,
            reduced=trained * ranks * reduce,
            gradient_shards=trained * DTYPE_BYTES[dtypes.trained_storage],
            trained_shards=trained,
            last_gradient=prod(trains[-1].shape) if trains else 0,
            widest=max((tensor.rank_elements * ranks * param for tensor in tensors), default=0),
        )


def _copies(tensor: UnitTensor, plan: Plan, away: bool) -> tuple[int, int]:
    """Return the bytes that a gather takes of a shard: a copy that lives until it is in the buffer, one for a moment.

    Read from `FSDPParam.all_gather_inputs`: a shard is brought from the host, then cast.
    """
    brought = tensor.rank_elements * DTYPE_BYTES[tensor.dtype] if away else 0
    if tensor.dtype == plan.dtypes.param:
        return brought, 0
    return tensor.rank_elements * DTYPE_BYTES[plan.dtypes.param], brought


def _beside_weights(tensors: Sequence[UnitTensor], copies: Sequence[tuple[int, int]], param: int) -> int:
    """Return what copies add at most to the whole weights of a unit; each is made while the one before is there."""
    done = before = most = 0
    for tensor, (kept, passing) in zip(tensors, copies, strict=True):
        most = max(most, done + before + kept + passing)
        done += tensor.rank_elements * param
        most = max(most, done + kept)
        before = kept
    return max(0, most - done)


def own_vocab(model: ModelSpec, plan: Plan, runtime: Runtime) -> int:
    """Return of how many entries of the vocabulary a rank has logits."""
    return model.vocab // plan.mesh.tensor if runtime.parallel_loss else model.vocab
