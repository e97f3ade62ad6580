"""Collectives over the tensor axis: what blocks whose matrix products are shared exchange in a training step."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from shardwise.spec.collectives import Key
from shardwise.spec.plan import Plan
from shardwise.spec.strict import DTYPE_BYTES

PARTS = 2
"""Parts of a block that a whole activation enters and a sum over the axis leaves: attention and MLP."""
NORMS = 2
"""Norms of a block."""


@dataclass(frozen=True, kw_only=True)
class TensorWork:
    """What the ranks of a tensor group work on together: decoder blocks as Llama's, all weights trained."""

    tokens: tuple[int, ...]
    """Rows times padded length of each micro-batch of a step."""
    padded_tokens: tuple[int, ...]
    """The same with lengths padded to a multiple of the axis, as sequence parallelism does; else equal."""
    hidden: int
    """Elements of an activation per token between blocks."""
    blocks: int
    """Decoder blocks."""
    checkpointed_blocks: int
    """Those of them that recompute their activations."""
    vocabulary: int | None
    """Rows of embedding and head when they are split over the axis; None: they are whole on every rank."""


def norm_groups(plan: Plan, work: TensorWork) -> int:
    """Return how many groups of gradients add up their norms over the shard axis: one per way to lie on the mesh.

    Split weights; weights whole on every rank; with sequence parallelism the norms, whole but known to the axis.
    """
    whole = not plan.mesh.sequence_parallel or work.vocabulary is None
    return 1 + int(whole) + int(plan.mesh.sequence_parallel)


def tensor_exchanges(plan: Plan, work: TensorWork) -> Counter[Key]:
    """Return what a step sends over the tensor axis for its matrix products, norms of gradients apart.

    A block's parts each end in a sum over the axis, and their inputs' gradients are summed too; recomputation repeats
    a sum unless it is the last thing of its block. With sequence parallelism a sum is a reduce-scatter, an all-gather
    comes before what it serves, and the gradients of norms, which saw a part each, are summed when they are reduced.
    """
    item = DTYPE_BYTES[plan.dtypes.param]
    counts: Counter[Key] = Counter()
    if plan.mesh.sequence_parallel:
        times = 1 if plan.accumulation_mode == "defer_all" else plan.accumulation_steps
        # Deferred gradients are kept in the dtype of the reduction, and summed over the axis in it.
        deferred = plan.accumulation_mode == "defer_all" and plan.accumulation_steps > 1
        kept = DTYPE_BYTES[plan.dtypes.reduce] if deferred else item
        counts["all_reduce", "tensor", work.hidden * kept] += times * (NORMS * work.blocks + 1)
    sums = 2 * PARTS * work.blocks + (PARTS - 1) * work.checkpointed_blocks
    for tokens, padded in zip(work.tokens, work.padded_tokens, strict=True):
        inside = padded * work.hidden * item
        if plan.mesh.sequence_parallel:
            ends = 2
            counts["all_gather", "tensor", inside] += 2 * PARTS * work.blocks + PARTS * work.checkpointed_blocks + ends
            counts["reduce_scatter", "tensor", inside] += sums
        else:
            counts["all_reduce", "tensor", inside] += sums
        if work.vocabulary is not None:
            counts["all_reduce", "tensor", inside] += 1
            counts["all_reduce", "tensor", tokens * work.hidden * item] += 1
            counts["all_gather", "tensor", tokens * work.vocabulary * item] += 1
    return counts
