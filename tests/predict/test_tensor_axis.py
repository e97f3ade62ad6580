"""The tensor axis: blocks as Llama's exchange exactly what the formula says."""

from __future__ import annotations

import pytest

from engine.training import make_job
from harness.ranks import run_ranks
from measure.steps import Counted, count_steps
from shardwise.predict.collectives import collectives_of_step
from shardwise.predict.tensor_axis import TensorWork
from shardwise.spec.collectives import Collectives

LAYERS, HIDDEN = 2, 64
WHOLE, SPLIT = 101, 104
"""Vocabularies that two ranks cannot and can split."""
PLAIN = {"mesh": {"tensor": 2}}
SEQUENCE = {"mesh": {"tensor": 2, "sequence_parallel": True}}
FULL = {"fsdp": {"strategy": "FULL_SHARD"}}
CHECKPOINTED = {"activation_checkpointing": "full"}


def mixed(dtype: str) -> dict[str, object]:
    return {"mixed_precision": {"param_dtype": dtype}}


PLANS: list[tuple[int, int, int, dict[str, object]]] = [
    (2, 1, WHOLE, {**PLAIN}),
    (2, 2, SPLIT, {**PLAIN, **CHECKPOINTED, **mixed("fp16")}),
    (2, 2, WHOLE, {**SEQUENCE, "activation_checkpointing": "every_2"}),
    (4, 1, SPLIT, {**PLAIN, **FULL, **mixed("bf16")}),
    (4, 1, WHOLE, {**PLAIN, **FULL, **mixed("fp16"), "units": {"embedding": "own", "head": "own"}}),
    (4, 2, SPLIT, {**SEQUENCE, **FULL, **CHECKPOINTED, "accumulation": "defer_all"}),
    (4, 1, WHOLE, {**SEQUENCE, **FULL, **mixed("bf16")}),
    (4, 2, WHOLE, {**SEQUENCE, **FULL, **mixed("bf16"), "accumulation": "defer_all"}),
]
"""Ranks, micro-batches, vocabulary, job."""


def planned(counted: Counted, vocabulary: int) -> Collectives:
    tensor = counted.plan.mesh.tensor
    pad = counted.plan.mesh.sequence_parallel
    checkpointing = counted.plan.activation_checkpointing
    work = TensorWork(
        tokens=tuple(rows * length for rows, length in counted.tokens),
        padded_tokens=tuple(rows * (length + (-length % tensor if pad else 0)) for rows, length in counted.tokens),
        hidden=HIDDEN,
        blocks=LAYERS,
        checkpointed_blocks={"none": 0, "full": LAYERS, "every_2": 1}[checkpointing],
        vocabulary=vocabulary if vocabulary == SPLIT else None,
    )
    return collectives_of_step(counted.plan, counted.units, device_type="cpu", tensor=work)


@pytest.mark.parametrize(
    ("world", "micro_batches", "vocabulary", "fields"),
    [*PLANS[:4], *(pytest.param(*plan, marks=pytest.mark.slow) for plan in PLANS[4:])],
)
def test_counted_is_planned(tiny, world, micro_batches, vocabulary, fields):
    folder = tiny(layers=LAYERS, vocab=vocabulary, kv=2)
    job = make_job(folder, micro_batch=1, global_batch=world // 2 * micro_batches, **fields)
    for counted in run_ranks(count_steps, world, job):
        assert [str(line) for line in counted.first.differences(planned(counted, vocabulary))] == []
        assert counted.first == counted.second
        assert counted.first.total("all_reduce", "tensor").count > 0


def test_a_tensor_axis_without_its_work_is_refused(tiny):
    job = make_job(tiny(layers=LAYERS, kv=2), micro_batch=1, global_batch=1, **PLAIN)
    counted = run_ranks(count_steps, 2, job)[0]
    with pytest.raises(ValueError, match="give `tensor`"):
        collectives_of_step(counted.plan, counted.units, device_type="cpu")
