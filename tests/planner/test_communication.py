"""Prefetch and reductions: what each device does by default, and what it refuses."""

from __future__ import annotations

import pytest

from planner.planning import facts, job, refusal
from shardwise.planner.decide import decide
from shardwise.spec.layout import Prefetch, ReduceScatter

CPU = facts(device_type="cpu", world=4)
FULL = {"strategy": "FULL_SHARD"}
HYBRID = {"fsdp": {"strategy": "HYBRID_SHARD"}, "mesh": {"replicate": 2, "shard": 2}}


def test_cpus_gather_two_ahead_in_the_background_and_reduce_two_at_a_time():
    plan = decide(job(fsdp=FULL), CPU)
    assert plan.prefetch == Prefetch(forward=2, backward=2, async_all_gather=True)
    assert plan.reduce_scatter == ReduceScatter(buffers=2, separate_group=False, asynchronous=True)
    assert {"prefetch.forward", "prefetch.backward"} <= set(plan.reasons)


def test_gpus_use_streams():
    plan = decide(job(fsdp=FULL), facts())
    assert plan.prefetch == Prefetch(forward=0, backward=1, async_all_gather=True)
    assert plan.reduce_scatter == ReduceScatter(buffers=1, separate_group=False, asynchronous=True)


def test_what_is_asked_is_obeyed_without_a_reason():
    asked = {"forward": 3, "backward": 0, "async_all_gather": False}
    reduction = {"buffers": 4, "separate_group": True, "asynchronous": False}
    plan = decide(job(fsdp=FULL, prefetch=asked, reduce_scatter=reduction), CPU)
    assert plan.prefetch == Prefetch(**asked)
    assert plan.reduce_scatter == ReduceScatter(**reduction)
    assert not any(name.startswith(("prefetch", "reduce_scatter")) for name in plan.reasons)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"fsdp": {"strategy": "NO_SHARD"}}, "nothing is reduced over a shard axis of one rank"),
        (HYBRID, "all-reduce over replicas"),
        ({"fsdp": FULL, "mixed_precision": {"reduce_dtype": "bf16"}}, "cast from bf16 to fp32"),
        ({"fsdp": FULL, "mixed_precision": {"storage_dtype": "bf16"}}, "cast from fp32 to bf16"),
        ({"fsdp": FULL, "offload": {"parameters": True, "optimizer": True}}, "moved to host memory"),
    ],
)
def test_cpus_reduce_at_once_where_the_result_is_read_at_once(fields, words):
    plan = decide(job(**fields), CPU)
    assert not plan.reduce_scatter.asynchronous
    assert plan.reduce_scatter.buffers == 1
    assert words in plan.reasons["reduce_scatter.asynchronous"]
    problem = refusal(job(**fields, reduce_scatter={"asynchronous": True}), CPU)
    assert problem.field == "reduce_scatter.asynchronous"
    assert words in problem.reason
    assert "write false" in problem.fix


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"prefetch": {"async_all_gather": False}}, "prefetch.async_all_gather"),
        ({"reduce_scatter": {"asynchronous": False}}, "reduce_scatter.asynchronous"),
    ],
)
def test_streams_of_gpus_cannot_be_switched_off(fields, field):
    problem = refusal(job(fsdp=FULL, **fields), facts())
    assert problem.field == field
    assert problem.fix == "remove it"
    assert decide(job(fsdp=FULL, **fields), CPU)
