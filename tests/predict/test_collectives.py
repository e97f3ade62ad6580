"""A step's collectives by formula are those that run, call by call and byte by byte."""

from __future__ import annotations

import subprocess
import sys

import pytest

from engine.training import make_job
from harness.ranks import run_ranks
from measure.steps import count_steps
from shardwise.predict.collectives import collectives_of_step, world_axis
from shardwise.spec.plan import Mesh

FULL = {"fsdp": {"strategy": "FULL_SHARD"}}
GRAD_OP = {"fsdp": {"strategy": "SHARD_GRAD_OP"}}
NO_SHARD = {"fsdp": {"strategy": "NO_SHARD"}}
PAIRS = {"fsdp": {"strategy": "FULL_SHARD", "reshard_after_forward": 2}}
GRID = {"mesh": {"replicate": 2, "shard": 2}}
HYBRID = {"fsdp": {"strategy": "HYBRID_SHARD"}, **GRID}
HYBRID_ZERO2 = {"fsdp": {"strategy": "HYBRID_SHARD_ZERO2"}, **GRID}
LORA = {"use_lora": True}
OWN = {"units": {"embedding": "own", "head": "own"}}
LINEAR = {"units": {"wrap": ["Linear"]}}
NESTED = {"units": {"wrap": ["LlamaDecoderLayer", "Linear"]}}
CHECKPOINTED = {"activation_checkpointing": "full"}
BF16 = {"mixed_precision": {"param_dtype": "bf16"}}
ALL_BF16 = {"mixed_precision": {"param_dtype": "bf16", "reduce_dtype": "bf16", "storage_dtype": "bf16"}}
FP16 = {"mixed_precision": {"param_dtype": "fp16"}}
DEFER_ALL = {"accumulation": "defer_all"}
DEFER_REPLICATE = {"accumulation": "defer_replicate"}


def depth(units: int) -> dict[str, object]:
    return {"prefetch": {"forward": units, "backward": units}}


PLANS: list[tuple[int, int, dict[str, object]]] = [
    (1, 2, {**NO_SHARD}),
    (2, 1, {**FULL}),
    (2, 2, {**FULL, **depth(0)}),
    (2, 2, {**FULL, **depth(2), **CHECKPOINTED}),
    (2, 2, {**FULL, **DEFER_ALL}),
    (2, 1, {**FULL, "activation_checkpointing": "every_2", **BF16}),
    (2, 1, {**FULL, **OWN, **depth(2)}),
    (2, 1, {**FULL, **LINEAR, **depth(2)}),
    (2, 1, {**FULL, **LINEAR, **CHECKPOINTED, **depth(0)}),
    (2, 1, {**FULL, **NESTED, **CHECKPOINTED}),
    (2, 1, {**FULL, **FP16}),
    (2, 1, {**FULL, **ALL_BF16, "reduce_scatter": {"separate_group": True}}),
    (2, 2, {**FULL, "loss_head": "chunked", "loss_chunk": 4}),
    (2, 1, {**FULL, "offload": {"parameters": True}}),
    (2, 2, {**FULL, **LORA, **DEFER_ALL, **BF16}),
    (2, 1, {**FULL, **LORA, **OWN, **CHECKPOINTED, **depth(0)}),
    (2, 1, {**FULL, **LORA, "lora_targets": ["v_proj"], **LINEAR, **depth(0)}),
    (2, 1, {**FULL, **LORA, **OWN, **depth(1)}),
    (2, 1, {**FULL, **LORA, **NESTED}),
    (2, 1, {**FULL, **LINEAR, **CHECKPOINTED, **depth(2)}),
    (2, 1, {**FULL, **LORA, "lora_targets": ["v_proj"], **LINEAR, **CHECKPOINTED}),
    (2, 2, {**GRAD_OP}),
    (2, 2, {**GRAD_OP, **DEFER_ALL, **ALL_BF16}),
    (2, 1, {**GRAD_OP, **LORA, **OWN, **depth(2)}),
    (2, 2, {**NO_SHARD, **FP16}),
    (2, 2, {**NO_SHARD, **DEFER_REPLICATE}),
    (2, 2, {**NO_SHARD, **DEFER_ALL, **LORA}),
    (4, 1, {**FULL, **BF16}),
    (4, 2, {**PAIRS}),
    (4, 1, {**PAIRS, **LINEAR, **CHECKPOINTED, **BF16}),
    (4, 2, {**PAIRS, **LORA, **DEFER_ALL}),
    (4, 2, {**HYBRID}),
    (4, 2, {**HYBRID, **DEFER_REPLICATE, **BF16}),
    (4, 2, {**HYBRID, **DEFER_ALL, **CHECKPOINTED}),
    (4, 1, {**HYBRID, **LORA, **FP16}),
    (4, 2, {**HYBRID_ZERO2, **DEFER_REPLICATE}),
    (4, 1, {**HYBRID_ZERO2, **LORA, **OWN, **depth(0)}),
]
"""Ranks, micro-batches, job."""


def name(case: object) -> str | None:
    if not isinstance(case, dict):
        return None
    return "-".join(str(value) for value in case.values()).replace(" ", "")


FEW, FOUR = ([plan for plan in PLANS if (plan[0] == 4) is many] for many in (False, True))


@pytest.mark.parametrize(
    ("world", "micro_batches", "fields"),
    [*FEW, *FOUR[::2], *(pytest.param(*plan, marks=pytest.mark.slow) for plan in FOUR[1::2])],
    ids=name,
)
def test_counted_is_planned(tiny, world, micro_batches, fields):
    job = make_job(tiny(layers=2), micro_batch=1, global_batch=world * micro_batches, **fields)
    for counted in run_ranks(count_steps, world, job):
        planned = collectives_of_step(counted.plan, counted.units, device_type="cpu")
        assert counted.plan.accumulation_steps == micro_batches
        assert [str(line) for line in counted.first.differences(planned)] == []
        assert counted.first == counted.second == planned


def test_looking_for_a_stop_costs_one_number_per_further_micro_batch(tiny):
    job = make_job(tiny(layers=2), micro_batch=1, global_batch=6, **FULL)
    for counted in run_ranks(lambda rank, world: count_steps(rank, world, job, stop=True), 2):
        assert counted.first == collectives_of_step(counted.plan, counted.units, device_type="cpu", looks_for_stop=True)


def test_a_wrong_plan_is_told_by_kind_axis_and_both_figures(tiny):
    job = make_job(tiny(layers=2), micro_batch=1, global_batch=2, **GRAD_OP)
    full = make_job(tiny(layers=2), micro_batch=1, global_batch=2, **FULL)
    counted = run_ranks(count_steps, 2, job)[0]
    other = run_ranks(count_steps, 2, full)[0]
    planned = collectives_of_step(other.plan, other.units, device_type="cpu")
    (difference,) = counted.first.differences(planned)
    block = counted.units.rows[0].all_gather_bytes
    assert block == 123392
    assert str(difference) == (
        "all_gather over shard: counted 3 calls, 299,264 bytes; planned 5 calls, 546,048 bytes "
        "(only counted: none; only planned: 2 of 123,392 bytes)"
    )


def test_on_gpus_the_same_bytes_are_reduce_scattered(tiny):
    job = make_job(tiny(layers=2), micro_batch=1, global_batch=2, **FULL)
    counted = run_ranks(count_steps, 2, job)[0]
    on_gpus = collectives_of_step(counted.plan, counted.units, device_type="cuda")
    assert on_gpus.total("all_to_all", "shard").count == 0
    scattered, exchanged = on_gpus.total("reduce_scatter", "shard"), counted.first.total("all_to_all", "shard")
    assert (scattered.count, scattered.bytes) == (exchanged.count, exchanged.bytes) == (3, 299264)


@pytest.mark.parametrize(
    ("mesh", "axis"),
    [
        (Mesh(), "shard"),
        (Mesh(shard=4), "shard"),
        (Mesh(replicate=4), "replicate"),
        (Mesh(tensor=4), "tensor"),
        (Mesh(replicate=2, shard=2), "world"),
        (Mesh(shard=2, tensor=2), "world"),
    ],
)
def test_the_axis_of_all_ranks(mesh, axis):
    assert world_axis(mesh) == axis


def test_the_formula_needs_no_torch():
    script = "import sys, shardwise.predict.collectives, shardwise.predict.wire; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], check=True)
