"""Every strategy does what one process does."""

from __future__ import annotations

import pytest
import torch

from engine.training import GLOBAL_BATCH, make_job, train_alone, train_on_rank, whole_batch
from harness.ranks import run_ranks

STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD")


def _job(tiny, strategy, lora, checkpointing, accumulation, tied, world, family="llama"):
    return make_job(
        tiny(family, tied=tied),
        fsdp={"strategy": strategy},
        use_lora=lora,
        activation_checkpointing=checkpointing,
        micro_batch=GLOBAL_BATCH // world // accumulation,
    )


def _plain(job):
    """The same training without layout: one reference serves every layout."""
    return job.model_copy(
        update={"fsdp": type(job.fsdp)(), "micro_batch": GLOBAL_BATCH, "activation_checkpointing": "none"}
    ).model_dump_json()


def _assert_close(live, alone, tolerance):
    assert live.losses == pytest.approx(alone.losses, abs=tolerance)
    assert live.norms == pytest.approx(alone.norms, rel=tolerance, abs=tolerance)
    assert live.weights.keys() == alone.weights.keys()
    for name, weight in live.weights.items():
        torch.testing.assert_close(
            weight, alone.weights[name], atol=tolerance, rtol=0, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("checkpointing", ["none", "full"])
@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_two_ranks_equal_one_process(tiny, strategy, lora, checkpointing, accumulation, tied):
    job = _job(tiny, strategy, lora, checkpointing, accumulation, tied, world=2)
    live, other = run_ranks(train_on_rank, 2, job)

    alone = train_alone(job, 2, accumulation, live.norms)
    assert live.norms == pytest.approx(alone.norms, rel=1e-6)
    assert live.gradients.keys() == alone.gradients.keys()
    for name, gradient in live.gradients.items():
        assert torch.equal(gradient, alone.gradients[name]), f"gradient of {name}"
    for name, weight in live.weights.items():
        assert torch.equal(weight, alone.weights[name]), f"weight {name}"
        assert torch.equal(weight, other.weights[name]), f"{name} differs between ranks"
    assert max(live.norms) > job.max_grad_norm, "clipping was never active"

    _assert_close(live, whole_batch(_plain(job)), 1e-5)


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("world", [1, 3])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_other_worlds_agree_with_the_whole_batch(tiny, strategy, lora, world):
    """Three ranks over vocabulary 101 and odd ranks of adapters: shards of unequal size, some empty."""
    job = _job(tiny, strategy, lora, "every_2", 2, tied=True, world=world)
    results = run_ranks(train_on_rank, world, job)
    for live in results:
        _assert_close(live, whole_batch(_plain(job)), 1e-5)


def test_four_ranks_agree_with_the_whole_batch(tiny):
    job = make_job(tiny("qwen2"), fsdp={"strategy": "FULL_SHARD"}, global_batch=8, micro_batch=1)
    whole = train_alone(job.model_copy(update={"micro_batch": 8}), 1, 1, None)
    for live in run_ranks(train_on_rank, 4, job):
        _assert_close(live, whole, 1e-5)
