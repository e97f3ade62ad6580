"""Bytes on the wire: gloo's algorithms against the kernel's counters, NCCL's by their formulas, hosts by neighbours."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from engine.training import make_job, make_plan
from harness.ranks import run_ranks
from measure.steps import prepared
from predict.own_network import in_own_network, loopback_bytes
from shardwise.measure.collectives import CollectiveCounter
from shardwise.predict.wire import Traffic, between_hosts, groups, wire_bytes
from shardwise.spec.collectives import Collectives
from shardwise.spec.plan import Mesh

REPEATS = 4
SIZES = (96, 48000, 3 << 20)


def between_pauses(work) -> float:
    """Bytes that all ranks together send for one call of `work`, seen by a rank while nobody else communicates."""
    work()
    dist.barrier()
    time.sleep(0.3)
    before = loopback_bytes()
    time.sleep(0.2)
    for _ in range(REPEATS):
        work()
    time.sleep(0.4)
    after = loopback_bytes()
    time.sleep(0.2)
    return (after - before) / REPEATS


def gloo_bytes(rank: int, world: int) -> dict[tuple[str, int], float]:
    sent = {}
    for size in SIZES:
        x, part = torch.ones(size // 4), torch.empty(size // 4 // world)
        calls = {
            "all_gather": lambda x=x, part=part: dist.all_gather_single(x, part),
            "all_to_all": lambda x=x: dist.all_to_all_single(torch.empty_like(x), x),
            "all_reduce": lambda x=x: dist.all_reduce(x),
            "reduce_scatter": lambda x=x, part=part: dist.reduce_scatter_single(part, x),
        }
        for kind, call in calls.items():
            sent[kind, size] = between_pauses(call)
    return sent


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 4])
def test_gloo_sends_what_the_formula_says(world):
    """Tiny calls, nearly all headers, within 20 %; others within 3 %; large ones are the payload alone within 1 %."""
    measured = in_own_network(run_ranks, gloo_bytes, world)[0]
    payload = {"all_gather": 1, "all_to_all": 1, "all_reduce": 2, "reduce_scatter": 2}
    for (kind, size), seen in measured.items():
        one = Collectives.of({(kind, "shard", size): 1})
        said = wire_bytes(one, Mesh(shard=world))
        assert said.payload_bytes == pytest.approx(payload[kind] * (world - 1) / world * size)
        assert world * said.on_wire() == pytest.approx(seen, rel=0.2 if size < 1000 else 0.03), (kind, size)
        if size >= 1 << 20:
            assert world * said.payload_bytes == pytest.approx(seen, rel=0.01), kind


def step_bytes(rank: int, world: int, job) -> tuple[Collectives, float]:
    step, mesh = prepared(rank, world, job)
    with CollectiveCounter(mesh) as counter:
        step()
    return counter.collectives, between_pauses(step)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "fields"),
    [
        (2, {"fsdp": {"strategy": "FULL_SHARD"}}),
        (2, {"fsdp": {"strategy": "NO_SHARD"}}),
        (4, {"fsdp": {"strategy": "HYBRID_SHARD"}, "mesh": {"replicate": 2, "shard": 2}}),
    ],
    ids=["full", "no_shard", "hybrid"],
)
def test_a_whole_step_on_the_wire(tiny, world, fields):
    job = make_job(tiny(layers=2), micro_batch=1, global_batch=world, **fields)
    plan = make_plan(job, world)
    for collectives, seen in in_own_network(run_ranks, step_bytes, world, job):
        assert world * wire_bytes(collectives, plan.mesh).on_wire() == pytest.approx(seen, rel=0.05)


@pytest.mark.parametrize(
    ("kind", "factor"), [("all_gather", 0.75), ("reduce_scatter", 0.75), ("all_to_all", 0.75), ("all_reduce", 1.5)]
)
def test_nccl_rings(kind, factor):
    assert wire_bytes(Collectives.of({(kind, "shard", 800): 2}), Mesh(shard=4), "nccl") == Traffic(
        payload_bytes=2 * factor * 800
    )


def test_groups_of_every_axis():
    mesh = Mesh(replicate=2, shard=2, tensor=2)
    assert groups("world", mesh) == [tuple(range(8))]
    assert groups("replicate", mesh) == [(0, 4), (1, 5), (2, 6), (3, 7)]
    assert groups("shard", mesh) == [(0, 2), (1, 3), (4, 6), (5, 7)]
    assert groups("tensor", mesh) == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert groups("shard/2", Mesh(shard=8)) == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert groups("shard/2", Mesh(shard=4, tensor=2)) == [(0, 2), (4, 6), (1, 3), (5, 7)]
    with pytest.raises(ValueError, match="ranks 0,3 is not an axis"):
        groups("ranks 0,3", mesh)


def test_what_no_step_has_is_refused():
    with pytest.raises(ValueError, match="how broadcast is sent is not known"):
        wire_bytes(Collectives.of({("broadcast", "world", 8): 1}), Mesh(shard=2))


@pytest.mark.parametrize(
    ("kind", "axis", "mesh", "there", "back"),
    [
        ("all_gather", "shard", Mesh(shard=2), 400, 400),
        ("all_gather", "shard", Mesh(shard=4), 600, 600),
        ("all_reduce", "shard", Mesh(shard=4), 1200, 1200),
        ("all_to_all", "shard", Mesh(shard=4), 800, 800),
        ("all_gather", "shard", Mesh(replicate=2, shard=2), None, None),
        ("all_reduce", "replicate", Mesh(replicate=2, shard=2), 1600, 1600),
        ("all_gather", "shard/2", Mesh(shard=4), None, None),
        ("all_gather", "shard", Mesh(shard=2, tensor=2), 800, 800),
        ("all_reduce", "tensor", Mesh(shard=2, tensor=2), None, None),
    ],
)
def test_what_crosses_between_two_hosts(kind, axis, mesh, there, back):
    """800 bytes; the first half of the ranks on one host, the rest on the other."""
    hosts = [rank * 2 // mesh.world for rank in range(mesh.world)]
    crossing = between_hosts(Collectives.of({(kind, axis, 800): 1}), mesh, hosts)
    assert {ends: traffic.payload_bytes for ends, traffic in crossing.items()} == (
        {} if there is None else {(0, 1): there, (1, 0): back}
    )


def test_a_ring_that_jumps_between_hosts_crosses_every_time():
    one = Collectives.of({("all_gather", "shard", 800): 1})
    neighbours = between_hosts(one, Mesh(shard=4), [0, 0, 1, 1])
    jumping = between_hosts(one, Mesh(shard=4), [0, 1, 0, 1])
    assert jumping[0, 1].payload_bytes == 2 * neighbours[0, 1].payload_bytes


@given(
    kind=st.sampled_from(["all_gather", "reduce_scatter", "all_to_all", "all_reduce"]),
    axis=st.sampled_from(["replicate", "shard", "tensor", "world"]),
    sizes=st.tuples(*[st.integers(1, 4)] * 3),
    size=st.integers(0, 1 << 30),
    backend=st.sampled_from(["gloo", "nccl"]),
)
def test_with_every_rank_on_a_host_of_its_own_all_that_is_sent_crosses(kind, axis, sizes, size, backend):
    mesh = Mesh(replicate=sizes[0], shard=sizes[1], tensor=sizes[2])
    one = Collectives.of({(kind, axis, size): 1})
    crossing = between_hosts(one, mesh, range(mesh.world), backend)
    sent = sum(traffic.payload_bytes for traffic in crossing.values())
    assert sent == pytest.approx(mesh.world * wire_bytes(one, mesh, backend).payload_bytes)
    assert between_hosts(one, mesh, [0] * mesh.world, backend) == {}
