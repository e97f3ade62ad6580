"""The counter sees every collective, whoever issues it, and names its group."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from engine.training import make_job
from harness.ranks import run_ranks
from measure.steps import count_steps
from shardwise.engine.compat import UnsupportedRelease
from shardwise.engine.exchange import GATHER_TAG, REDUCE_TAG, exchange
from shardwise.measure.collectives import COLLECTIVES, LOCAL, CollectiveCounter, GroupNames
from shardwise.spec.collectives import Collectives

NOT_COUNTED = {"_c10d_functional::batch_p2p_ops"}
"""Sends and receives in one operator: refused, not miscounted."""


def test_every_collective_operator_of_this_torch_is_known():
    namespaces = ("c10d::", "_c10d_functional::")
    present = {schema.name for schema in torch._C._jit_get_all_schemas() if schema.name.startswith(namespaces)}
    assert present - set(COLLECTIVES) - set(LOCAL) == NOT_COUNTED
    for schema in torch._C._jit_get_all_schemas():
        if schema.name in COLLECTIVES:
            payload = COLLECTIVES[schema.name][1]
            assert payload in ("", "result", *(argument.name for argument in schema.arguments)), schema
            assert {"process_group", "group_name"} & {argument.name for argument in schema.arguments}, schema


def direct_calls(rank: int, world: int) -> Collectives:
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("shard",))
    x, y = torch.ones(8), torch.empty(16)
    with CollectiveCounter(mesh) as counter:
        dist.all_gather_single(y, x)
        dist.all_gather([torch.empty(8), torch.empty(8)], x)
        dist.reduce_scatter_single(torch.empty(4), x)
        work = dist.all_to_all_single(torch.empty(8), x, async_op=True)
        work.wait()
        dist.all_reduce(x)
        dist.all_reduce(x, async_op=True).wait()
        dist.broadcast(x, 0)
        dist.reduce(x, 0)
        dist.gather(x, [torch.empty(8), torch.empty(8)] if rank == 0 else None, 0)
        dist.scatter(x, [torch.ones(8), torch.ones(8)] if rank == 0 else None, 0)
        if rank == 0:
            dist.send(x, 1)
        else:
            dist.recv(x, 0)
        dist.barrier()
    dist.all_reduce(x)
    return counter.collectives


def test_direct_calls_by_kind_and_bytes():
    first, second = run_ranks(direct_calls, 2)
    assert {(row.kind, row.payload_bytes): row.count for row in first.rows} == {
        ("all_gather", 64): 2,
        ("reduce_scatter", 32): 1,
        ("all_to_all", 32): 1,
        ("all_reduce", 32): 2,
        ("broadcast", 32): 1,
        ("reduce", 32): 1,
        ("gather", 32): 1,
        ("scatter", 32): 1,
        ("send", 32): 1,
        ("barrier", 0): 1,
    }
    assert {row.axis for row in first.rows} == {"shard"}
    assert [str(line) for line in second.differences(first)] == [
        "recv over shard: counted 1 calls, 32 bytes; planned 0 calls, 0 bytes "
        "(only counted: 1 of 32 bytes; only planned: none)",
        "send over shard: counted 0 calls, 0 bytes; planned 1 calls, 32 bytes "
        "(only counted: none; only planned: 1 of 32 bytes)",
    ]


def below_dtensor(rank: int, world: int) -> list[Collectives]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tensor"))
    shard, tensor = mesh["shard"], mesh["tensor"]
    weight = torch.nn.Parameter(distribute_tensor(torch.ones(8, 4), tensor, [Shard(0)]))
    rows = torch.ones(3, 4)
    counts = []
    with CollectiveCounter(mesh) as counter:
        split = distribute_tensor(rows, tensor, [Replicate()], src_data_rank=None) @ weight.t()
        whole = split.redistribute(placements=[Replicate()])
    counts.append(counter.collectives)
    with CollectiveCounter(mesh) as counter:
        whole.sum().backward()
    counts.append(counter.collectives)
    with CollectiveCounter(mesh) as counter:
        given = torch.ones(4, requires_grad=True)
        functional.all_to_all_single_autograd(given, None, None, shard).sum().backward()
        functional.all_gather_tensor_autograd(given, 0, shard).sum().backward()
        functional.all_reduce(given.detach(), "sum", tensor).wait()
    counts.append(counter.collectives)
    with CollectiveCounter(mesh) as counter:
        partial = distribute_tensor(rows, shard, [Replicate()], src_data_rank=None)
        torch.nn.utils.get_total_norm([partial.redistribute(placements=[Shard(0)])]).full_tensor()
    counts.append(counter.collectives)
    return counts


def test_dtensor_autograd_and_functional_collectives():
    for forward, backward, direct, norm in run_ranks(below_dtensor, 4):
        assert str(forward) == "all_gather over tensor: 1 calls, 96 bytes"
        assert str(backward) == ""
        assert str(direct) == "\n".join(
            [
                "all_gather over shard: 1 calls, 32 bytes",
                "all_reduce over tensor: 1 calls, 16 bytes",
                "all_to_all over shard: 2 calls, 32 bytes",
                "reduce_scatter over shard: 1 calls, 32 bytes",
            ]
        )
        assert str(norm) == "all_reduce over shard: 1 calls, 4 bytes"


def names(rank: int, world: int) -> list[str]:
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("shard",))
    flat = GroupNames(mesh)
    grid = GroupNames(init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))
    odd = dist.new_group([0, 3])
    with CollectiveCounter(mesh) as counter:
        if rank in (0, 3):
            dist.all_reduce(torch.ones(1), group=odd)
    mine = (rank // 2 * 2, rank // 2 * 2 + 1)
    return [
        flat.name((0, 1, 2, 3)),
        flat.name(mine),
        grid.name((0, 1, 2, 3)),
        grid.name(mine),
        grid.name((rank % 2, rank % 2 + 2)),
        flat.name((0, 2)),
        str(counter.collectives),
    ]


def test_names_of_groups():
    by_rank = run_ranks(names, 4)
    for rank, given in enumerate(by_rank):
        assert given[:6] == ["shard", "shard/2", "world", "shard", "replicate", "ranks 0,2"]
        assert given[6] == ("all_reduce over ranks 0,3: 1 calls, 4 bytes" if rank in (0, 3) else "")


def unknown(rank: int, world: int) -> str:
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("shard",))
    library = torch.library.Library("c10d", "FRAGMENT")
    library.define("pretend_(Tensor x) -> Tensor")
    library.impl("pretend_", lambda x: x, "CompositeExplicitAutograd")
    try:
        with CollectiveCounter(mesh):
            torch.ops.c10d.pretend_(torch.ones(1))
    except UnsupportedRelease as error:
        return str(error)
    return "counted nothing, said nothing"


def test_an_unknown_collective_is_refused():
    (said,) = run_ranks(unknown, 1)
    assert "c10d::pretend_ is not known here" in said


def test_torch_counts_the_same(tiny):
    """torch's CommDebugMode, an independent count without bytes, agrees on a whole step.

    It counts no messages, of which reductions and gathers between two ranks are made; four ranks gather in a ring.
    """
    job = make_job(tiny(layers=2), global_batch=4, micro_batch=1, fsdp={"strategy": "FULL_SHARD"})
    for counted in run_ranks(lambda rank, world: count_steps(rank, world, job, by_torch=True), 4):
        ours = {
            kind: sum(row.count for row in counted.second.rows if row.kind == kind)
            for kind in ("all_gather", "all_to_all", "all_reduce")
        }
        assert counted.torch_counts == {
            "c10d._allgather_base_": ours["all_gather"],
            "c10d.allreduce_": ours["all_reduce"],
        }
        assert ours == {"all_gather": 5, "all_to_all": 3, "all_reduce": 3}


def _messages(rank: int, world: int, receive: bool) -> Collectives:
    """Messages of gathers and reductions on two ranks, one of them perhaps without its receive."""
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("shard",))
    part, other = torch.ones(3), torch.empty(3)
    with CollectiveCounter(mesh) as counter:
        exchange([part] * 2, [other] * 2, mesh.get_group(), GATHER_TAG).wait()
        exchange([part] * 2, [other] * 2, mesh.get_group(), REDUCE_TAG).wait()
        sent = dist.isend(part, group=mesh.get_group(), group_dst=1 - rank, tag=GATHER_TAG)
        if receive:
            dist.irecv(other, group=mesh.get_group(), group_src=1 - rank, tag=GATHER_TAG).wait()
            sent.wait()
    return counter.collectives


def test_messages_of_an_exchange_count_as_the_collective_that_they_make_up():
    for counted in run_ranks(_messages, 2, True):
        assert [(row.kind, row.payload_bytes, row.count) for row in counted.rows] == [
            ("all_gather", 24, 2),
            ("all_to_all", 24, 1),
        ]


def test_messages_that_make_up_no_collective_are_shown_as_they_are():
    for counted in run_ranks(_messages, 2, False):
        assert {(row.kind, row.count) for row in counted.rows} == {("all_to_all", 1), ("send", 2), ("recv", 1)}
