"""Reductions in the background: how many are in flight, when they are finished, and where they may not be used."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from engine.training import batches_of, full, make_job, make_plan
from harness.ranks import run_ranks
from shardwise.engine import reductions
from shardwise.engine.apply import units
from shardwise.engine.compat import unit_facts
from shardwise.engine.load import load_model
from shardwise.engine.loss_head import token_loss
from shardwise.engine.mesh import build_mesh
from shardwise.engine.source import open_source

FULL = {"fsdp": {"strategy": "FULL_SHARD"}, "micro_batch": 1}


def _loaded(rank, world, job):
    source, plan = open_source(job.model), make_plan(job, world)
    model = load_model(job, plan, source, build_mesh(plan.mesh, "cpu"))
    return model, batches_of(job, plan, rank, world).micro_batches(0)


@pytest.mark.parametrize("buffers", [1, 2, 9])
def test_no_more_in_flight_than_the_plan_says_and_none_after_backward(tiny, buffers):
    job = make_job(tiny("llama"), reduce_scatter={"buffers": buffers}, **FULL)

    def body(rank, world):
        model, batches = _loaded(rank, world, job)
        queue = unit_facts(units(model)[0]).reduce_scatter.queue
        depths = []
        add = queue.add

        def counted(reduction):
            add(reduction)
            depths.append(len(queue._queue))

        queue.add = counted
        token_loss(model, batches[0]).backward()
        return depths, len(queue._queue)

    for depths, left in run_ranks(body, 2):
        assert depths == [min(number, buffers) for number in (1, 2, 3, 4)]
        assert left == 0


def test_gradients_are_right_as_soon_as_backward_returns_whatever_reads_them(tiny):
    """Twice backward into the same `.grad`, and hooks: FSDP2 reads the result at once, so it has to be there."""
    job = make_job(tiny("llama"), **FULL)

    def body(rank, world):
        model, batches = _loaded(rank, world, job)
        token_loss(model, batches[0]).backward()
        first = {name: full(p.grad) for name, p in model.named_parameters()}
        hooked: dict[str, torch.Tensor] = {}
        for name, parameter in model.named_parameters():
            parameter.register_post_accumulate_grad_hook(
                lambda p, name=name: hooked.setdefault(name, p.grad.to_local().clone())
            )
        model.zero_grad()
        token_loss(model, batches[0]).backward()
        apart = max(
            float((hooked[name] - p.grad.to_local()).abs().max()) if p.grad.to_local().numel() else 0.0
            for name, p in model.named_parameters()
        )
        token_loss(model, batches[0]).backward()
        twice = all(torch.equal(full(p.grad), 2 * first[name]) for name, p in model.named_parameters())
        return apart, twice

    assert run_ranks(body, 2) == [(0.0, True)] * 2


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_sum_is_in_the_order_of_ranks(world, dtype):
    def body(rank, world):
        generator = torch.Generator().manual_seed(rank)
        mine = torch.randn(world * 5, generator=generator).to(dtype)
        everyone = [torch.empty_like(mine) for _ in range(world)]
        dist.all_gather(everyone, mine)
        output = torch.empty(5, dtype=dtype)
        unit = torch.nn.Linear(1, 1)
        comm = reductions.ExchangedReduce(None, unit)
        comm(output_tensor=output, input_tensor=mine, group=dist.group.WORLD, op=dist.ReduceOp.SUM)
        expected = everyone[0][5 * rank : 5 * rank + 5].clone()
        for other in everyone[1:]:
            expected += other[5 * rank : 5 * rank + 5]
        return torch.equal(output, expected)

    assert run_ranks(body, world) == [True] * world


def test_only_sums_are_made():
    def body(rank, world):
        comm = reductions.ExchangedReduce(None, torch.nn.Linear(1, 1))
        with pytest.raises(NotImplementedError, match="summed here"):
            comm(torch.empty(1), torch.empty(2), dist.group.WORLD, dist.ReduceOp.AVG)
        return True

    assert run_ranks(body, 2) == [True, True]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"mixed_precision": {"reduce_dtype": "bf16"}}, "cast from bf16 to fp32"),
        ({"offload": {"optimizer": True, "parameters": True}}, "moved to host memory"),
        ({"fsdp": {"strategy": "NO_SHARD"}}, "nothing is reduced"),
    ],
)
def test_where_the_result_is_read_at_once_backward_waits_and_the_plan_says_why(tiny, fields, words):
    job = make_job(tiny("llama"), **{**FULL, **fields})
    plan = make_plan(job, 2)
    assert not plan.reduce_scatter.asynchronous
    assert words in plan.reasons["reduce_scatter.asynchronous"]

    def body(rank, world):
        model, batches = _loaded(rank, world, job)
        token_loss(model, batches[0]).backward()
        return all(isinstance(p.grad, DTensor) for p in model.parameters())

    assert run_ranks(body, 2) == [True, True]
