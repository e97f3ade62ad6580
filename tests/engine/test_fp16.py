"""fp16 with loss scaling over sharded gradients."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.tensor import DTensor

from engine.training import batches_of, full, make_job, make_plan, train_on_rank
from harness.ranks import run_ranks
from shardwise.engine.load import load_model
from shardwise.engine.mesh import build_mesh
from shardwise.engine.optimizer import build_optimizer
from shardwise.engine.scaler import build_scaler
from shardwise.engine.source import open_source
from shardwise.train.step import training_step


def _job(tiny, strategy="FULL_SHARD", lora=False, **fields):
    return make_job(
        tiny("llama"),
        fsdp={"strategy": strategy},
        use_lora=lora,
        micro_batch=3,
        mixed_precision={"param_dtype": "fp16"},
        **fields,
    )


def _overflow_once(rank, world, job, overflowing_rank):
    """Three steps; in the second, one rank's shard of one gradient becomes infinite."""
    source, plan = open_source(job.model), make_plan(job, world)
    model = load_model(job, plan, source, build_mesh(plan.mesh, "cpu"))
    optimizer = build_optimizer(model, plan, learning_rate=1e-3, weight_decay=0.0)
    scaler, batches = build_scaler(plan, "cpu"), batches_of(job, plan, rank, world)
    trained = [p for p in model.parameters() if p.requires_grad]
    armed = False

    def poison(parameter):
        if armed and rank == overflowing_rank:
            local = parameter.grad.to_local() if isinstance(parameter.grad, DTensor) else parameter.grad
            local.view(-1)[:1] = float("inf")

    # not the last one: rank 1 holds no row of a LoRA matrix of rank 1, and must still take part
    handle = trained[0].register_post_accumulate_grad_hook(poison)
    seen = []
    for step in range(3):
        armed = step == 1
        before = [full(p) for p in trained]
        result = training_step(
            model,
            batches.micro_batches(0),
            plan=plan,
            optimizer=optimizer,
            scaler=scaler,
            max_grad_norm=1.0,
            device=torch.device("cpu"),
        )
        moved = any(not torch.equal(a, full(p)) for a, p in zip(before, trained, strict=True))
        seen.append((result.skipped, result.scale, moved))
    handle.remove()
    return seen


@pytest.mark.parametrize("overflowing_rank", [0, 1])
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
def test_an_overflow_on_one_rank_skips_the_step_on_all(tiny, strategy, overflowing_rank):
    first, second = run_ranks(_overflow_once, 2, _job(tiny, strategy), overflowing_rank)
    assert first == second == [(False, 65536.0, True), (True, 32768.0, False), (False, 32768.0, True)]


def test_adapters_of_rank_one_leave_a_rank_without_a_row(tiny):
    job = _job(tiny, lora=True, lora_rank=1)
    first, second = run_ranks(_overflow_once, 2, job, 0)
    assert first == second
    assert [skipped for skipped, _, _ in first] == [False, True, False]


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_fp16_follows_fp32(tiny, lora):
    half = run_ranks(train_on_rank, 2, _job(tiny, lora=lora))[0]
    single = run_ranks(
        train_on_rank,
        2,
        _job(tiny, lora=lora).model_copy(update={"mixed_precision": type(_job(tiny).mixed_precision)()}),
    )[0]
    assert half.losses == pytest.approx(single.losses, rel=2e-3)
    assert half.norms == pytest.approx(single.norms, rel=2e-2)
    assert all(gradient.dtype == torch.float32 for gradient in half.gradients.values())


def test_bf16_reduce_dtype_is_obeyed(tiny):
    """Reducing in bf16 rounds the gradients; reducing in fp32 does not."""

    def job(**precision):
        return make_job(
            tiny("llama"),
            fsdp={"strategy": "FULL_SHARD"},
            micro_batch=3,
            mixed_precision={"param_dtype": "bf16", **precision},
        )

    fine = run_ranks(train_on_rank, 2, job(), 1)[0]
    coarse = run_ranks(train_on_rank, 2, job(reduce_dtype="bf16"), 1)[0]
    name = "model.layers.1.mlp.up_proj.weight"
    # clipping rescales; undo it before looking at the bits
    assert not torch.equal(fine.gradients[name], coarse.gradients[name])
    torch.testing.assert_close(fine.gradients[name], coarse.gradients[name], rtol=2e-2, atol=1e-4)
