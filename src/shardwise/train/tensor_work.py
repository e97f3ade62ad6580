"""What the tensor axis works on in a step, for the formula of its collectives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shardwise.data.loader import Batch
from shardwise.predict.collectives import NORM_BYTES
from shardwise.predict.tensor_axis import TensorWork
from shardwise.spec.collectives import Collectives
from shardwise.spec.job import Job
from shardwise.spec.layout import is_checkpointed
from shardwise.spec.plan import Plan

LIKE_LLAMA = ("llama", "mistral", "qwen2")
"""Model types whose blocks the formula describes."""


def tensor_work(job: Job, plan: Plan, config: Any, batches: Sequence[Batch]) -> TensorWork | None:
    """Return what the ranks of a tensor group share in a step on `batches`.

    None where the formula does not hold: no tensor axis, adapters, other blocks than Llama's, or a loss head that
    calls the head in its own way.
    """
    if plan.mesh.tensor == 1 or job.use_lora or plan.loss_head != "eager" or config.model_type not in LIKE_LLAMA:
        return None
    shapes = [tuple(batch.input_ids.shape) for batch in batches]
    multiple = plan.mesh.tensor if plan.mesh.sequence_parallel else 1
    blocks = range(config.num_hidden_layers)
    return TensorWork(
        tokens=tuple(rows * length for rows, length in shapes),
        padded_tokens=tuple(rows * (length + -length % multiple) for rows, length in shapes),
        hidden=config.hidden_size,
        blocks=len(blocks),
        checkpointed_blocks=sum(is_checkpointed(plan.activation_checkpointing, index) for index in blocks),
        vocabulary=config.vocab_size if config.vocab_size % plan.mesh.tensor == 0 else None,
    )


def without_tensor_axis(collectives: Collectives) -> Collectives:
    """Leave out what the tensor axis exchanges, and the norms, whose number depends on what it has split."""
    counts = {
        (row.kind, row.axis, row.payload_bytes): row.count
        for row in collectives.rows
        if row.axis != "tensor" and (row.kind, row.axis, row.payload_bytes) != ("all_reduce", "shard", NORM_BYTES)
    }
    return Collectives.of(counts)
