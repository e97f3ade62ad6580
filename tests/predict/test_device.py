"""What a card holds beside tensors: allocator, context, communicators."""

from __future__ import annotations

import time
from collections import Counter

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed import distributed_c10d

from engine.training import make_expected, make_job, make_plan
from harness.ranks import run_ranks
from shardwise.catalogue.clusters import find_cluster
from shardwise.engine.load import load_model
from shardwise.engine.mesh import build_mesh
from shardwise.engine.source import open_source
from shardwise.predict.collectives import collectives_of_step
from shardwise.predict.constants import (
    ALLOCATOR_BUFFERS,
    ALLOCATOR_FACTOR,
    CUDA_CONTEXT,
    NCCL_CHANNEL,
    NCCL_CHANNELS,
)
from shardwise.predict.device import SEGMENT, communicators, device_memory
from shardwise.spec.plan import Dtypes, Mesh, Plan, Prefetch, ReduceScatter

GIB = 2**30


def make(replicate=1, shard=1, tensor=1, reshard=True, separate=False):
    return Plan(
        strategy="FULL_SHARD",
        mesh=Mesh(replicate=replicate, shard=shard, tensor=tensor),
        reshard_after_forward=reshard,
        prefetch=Prefetch(forward=0, backward=1, async_all_gather=True),
        reduce_scatter=ReduceScatter(buffers=1, separate_group=separate, asynchronous=True),
        dtypes=Dtypes(frozen_storage=None, param="bf16", reduce="fp32", output="fp32", buffer=None, loss_scaling=False),
        activation_checkpointing="none",
        attention="sdpa",
        micro_batch=1,
        accumulation_steps=1,
    )


@pytest.mark.parametrize(
    ("plan", "expected"),
    [
        (make(), {}),
        (make(shard=8), {"shard": 1}),
        (make(replicate=8), {"replicate": 1}),
        (make(replicate=2, shard=8), {"replicate": 1, "shard": 1, "world": 1}),
        (make(shard=4, tensor=2), {"shard": 1, "tensor": 1, "world": 1}),
        (make(replicate=2, shard=4, tensor=2), {"replicate": 1, "shard": 1, "tensor": 1, "world": 1}),
        (make(tensor=4), {"tensor": 1}),
        (make(shard=8, separate=True), {"shard": 1, "reduce_scatter": 1}),
        (make(replicate=8, separate=True), {"replicate": 1}),
        (make(shard=8, reshard=2), {"shard": 1, "shard/2": 1}),
    ],
)
def test_communicators(plan, expected):
    assert communicators(plan) == expected


def _groups_made(rank, world, job):
    """Process groups of this rank, by their ranks, that building the model made or found."""
    plan = make_plan(job, world)
    load_model(job, plan, open_source(job.model), build_mesh(plan.mesh, "cpu"))
    return Counter(tuple(dist.get_process_group_ranks(group)) for group in distributed_c10d._world.pg_map)


CASES = [
    {"fsdp": {"strategy": "FULL_SHARD"}},
    {"fsdp": {"strategy": "FULL_SHARD"}, "reduce_scatter": {"separate_group": True}},
    {"fsdp": {"strategy": "HYBRID_SHARD"}, "mesh": {"replicate": 2, "shard": 2}},
    {"fsdp": {"strategy": "FULL_SHARD"}, "mesh": {"shard": 2, "tensor": 2}},
    {"fsdp": {"strategy": "FULL_SHARD", "reshard_after_forward": 2}},
]


@pytest.mark.parametrize("fields", CASES, ids=str)
def test_communicators_are_the_groups_that_the_engine_makes(tiny, fields):
    """And those of a step's collectives. Of the two axes of a smaller group's mesh only the inner is ever used."""
    job = make_job(tiny("llama"), global_batch=4, micro_batch=1, **fields)
    plan = make_plan(job, 4)
    units = make_expected(job, plan).units
    found = communicators(plan)
    never_used = found.get("shard/2", 0)
    made = run_ranks(_groups_made, 4, job)[0]
    assert made.total() == sum(found.values()) + never_used
    over_all = {"world", "reduce_scatter", *(["shard"] if plan.mesh.shard == 4 else [])}
    assert made[0, 1, 2, 3] == sum(count for axis, count in found.items() if axis in over_all)
    step = collectives_of_step(plan, units, device_type="cuda", leave_tensor_out=True)
    assert {row.axis for row in step.rows} == set(found) - {"reduce_scatter", "tensor"}


def test_the_sum_and_its_terms():
    plan, cluster = make(replicate=2, shard=8), find_cluster("2x8xA100-80GB")
    found = device_memory(30 * GIB, plan, cluster, largest_buffer=2 * GIB)
    reserved = 30 * GIB * ALLOCATOR_FACTOR.value + 2 * GIB * ALLOCATOR_BUFFERS.value
    assert found.reserved.value == pytest.approx(reserved, abs=SEGMENT)
    assert found.reserved.value % SEGMENT == 0
    beside = CUDA_CONTEXT.value + 3 * NCCL_CHANNELS["nvlink"] * NCCL_CHANNEL.value
    assert found.total.value == pytest.approx(reserved + beside, abs=SEGMENT)
    assert sum(term.bytes for term in found.terms) == pytest.approx(found.total.value, abs=SEGMENT)
    assert all(term.source for term in found.terms)
    assert found.limit == cluster.gpu.usable.bytes
    assert found.fits


def test_the_interval():
    plan, cluster = make(shard=8), find_cluster("8xA10")
    found = device_memory(10 * GIB, plan, cluster, largest_buffer=GIB)
    for interval in (found.reserved, found.total):
        assert interval.low < interval.value < interval.high
    assert found.reserved.low >= 10 * GIB * ALLOCATOR_FACTOR.low
    worst = 10 * GIB * ALLOCATOR_FACTOR.high + GIB * ALLOCATOR_BUFFERS.high
    assert found.reserved.value < found.reserved.high < worst


def test_what_does_not_fit():
    found = device_memory(22 * GIB, make(shard=8), find_cluster("8xA10"))
    assert found.fits is False


def test_it_fits_where_the_allocator_can_give_memory_back():
    """Published: 74.80 GiB of tensors on one A100 of 79.15 GiB ran, and nvidia-smi showed up to the whole card."""
    found = device_memory(round(74.8 * GIB), make(), find_cluster("A100-SXM-80GB"), largest_buffer=4 * GIB)
    assert found.fits
    assert found.tight
    assert found.total.value == found.limit
    assert sum(term.bytes for term in found.terms) == found.total.value
    assert device_memory(79 * GIB, make(), find_cluster("A100-SXM-80GB")).fits is False


def test_other_values_of_constants():
    cluster = find_cluster("A100-SXM-80GB")
    found = device_memory(10 * GIB, make(), cluster, values={"ALLOCATOR_FACTOR": 1.5})
    assert found.reserved.value == 15 * GIB


def test_cards_without_nvlink_have_fewer_channels():
    plan = make(shard=8)
    slow, fast = (device_memory(GIB, plan, find_cluster(f"8x{card}")) for card in ("A10", "H100"))
    assert slow.total.value < fast.total.value


def test_one_gpu_has_a_context_and_no_communicator():
    found = device_memory(GIB, make(), find_cluster("A10"))
    assert {term.name: term.bytes for term in found.terms}["NCCL communicators"] == 0
    assert found.total.value > found.reserved.value


def test_cpu_processes_hold_what_is_allocated():
    found = device_memory(GIB, make(shard=2), find_cluster("2xcpu"))
    assert found.reserved.value == found.total.value == found.total.high == GIB
    assert found.limit is found.fits is None


@given(small=st.integers(0, 2**36), more=st.integers(0, 2**36), buffer=st.integers(0, 2**32))
def test_more_tensors_never_need_less(small, more, buffer):
    plan, cluster = make(shard=4), find_cluster("4xH100")
    one, other = (device_memory(size, plan, cluster, largest_buffer=buffer) for size in (small, small + more))
    assert one.total.low <= other.total.low
    assert one.total.value <= other.total.value
    assert one.total.high <= other.total.high


def test_it_takes_microseconds():
    plan, cluster = make(replicate=2, shard=8), find_cluster("2x8xH100")
    start = time.process_time()
    for size in range(1000):
        device_memory(size * 2**20, plan, cluster, largest_buffer=size)
    assert (time.process_time() - start) / 1000 < 200e-6
