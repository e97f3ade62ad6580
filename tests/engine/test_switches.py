"""Every switch of a plan leaves the result as it is: bitwise the sums of one process, in the order of the mesh."""

from __future__ import annotations

import pytest
import torch

from engine.training import Order, make_job, train_alone, train_on_rank
from harness.ranks import run_ranks

HYBRID = {"fsdp": {"strategy": "HYBRID_SHARD"}, "mesh": {"replicate": 2, "shard": 2}}
HYBRID_2 = {"fsdp": {"strategy": "HYBRID_SHARD_ZERO2"}, "mesh": {"replicate": 2, "shard": 2}}
FULL = {"fsdp": {"strategy": "FULL_SHARD"}}
KEPT = {"fsdp": {"strategy": "SHARD_GRAD_OP"}}
NONE = {"fsdp": {"strategy": "NO_SHARD"}}

FOUR_RANKS = {
    "hybrid": HYBRID,
    "hybrid-zero2": HYBRID_2,
    "hybrid-defer-all": {**HYBRID, "accumulation": "defer_all"},
    "hybrid-defer-replicate": {**HYBRID, "accumulation": "defer_replicate"},
    "hybrid-zero2-defer-replicate": {**HYBRID_2, "accumulation": "defer_replicate"},
    "groups-of-2": {"fsdp": {"strategy": "FULL_SHARD", "reshard_after_forward": 2}},
    "full": FULL,
    "full-four-buffers": {**FULL, "reduce_scatter": {"buffers": 4}},
}

TWO_RANKS = {
    "defer-all": {**FULL, "accumulation": "defer_all"},
    "kept-defer-all": {**KEPT, "accumulation": "defer_all"},
    "replicated-defer-all": {**NONE, "accumulation": "defer_all"},
    "replicated-defer-replicate": {**NONE, "accumulation": "defer_replicate"},
    "blocking-gathers": {**FULL, "prefetch": {"async_all_gather": False}},
    "no-prefetch": {**FULL, "prefetch": {"forward": 0, "backward": 0}},
    "prefetch-2": {**FULL, "prefetch": {"forward": 2, "backward": 2}},
    "prefetch-beyond-the-model": {**FULL, "prefetch": {"forward": 9, "backward": 9}},
    "blocking-reductions": {**FULL, "reduce_scatter": {"asynchronous": False}},
    "one-buffer": {**FULL, "reduce_scatter": {"buffers": 1}},
    "own-group": {**FULL, "reduce_scatter": {"separate_group": True}},
    "own-embedding": {**FULL, "units": {"embedding": "own"}},
    "own-head": {**FULL, "units": {"head": "own"}},
    "own-both": {**KEPT, "units": {"embedding": "own", "head": "own"}},
    "every-linear": {**FULL, "units": {"wrap": ("Linear",)}},
    "every-linear-checkpointed": {**FULL, "units": {"wrap": ("Linear",)}, "activation_checkpointing": "full"},
    "nested": {**FULL, "units": {"wrap": ("LlamaDecoderLayer", "LlamaMLP")}},
    "offloaded": {**FULL, "offload": {"optimizer": True, "parameters": True}},
}


def _compare(job, world, order, close=False):
    """Bitwise; `close` to 1e-6 of each gradient's norm, where hooks of inner units change autograd's order of sums."""
    results = run_ranks(train_on_rank, world, job)
    live = results[0]
    alone = train_alone(job, world, job.global_batch // world // job.micro_batch, live.norms, order=order)
    assert live.norms == pytest.approx(alone.norms, rel=1e-6)
    assert live.losses == pytest.approx(alone.losses, rel=1e-6)
    assert live.gradients.keys() == alone.gradients.keys()
    for name, gradient in live.gradients.items():
        apart = float((gradient - alone.gradients[name]).norm())
        assert apart <= (1e-6 * float(gradient.norm()) if close else 0.0), f"gradient of {name}: {apart}"
    for name, weight in live.weights.items():
        assert close or torch.equal(weight, alone.weights[name]), f"weight {name}"
        assert all(torch.equal(weight, other.weights[name]) for other in results), f"{name} differs between ranks"


@pytest.mark.parametrize(("tied", "lora"), [(False, False), (True, True)], ids=["untied-full", "tied-lora"])
@pytest.mark.parametrize("name", TWO_RANKS)
def test_two_ranks(tiny, name, tied, lora):
    switches = TWO_RANKS[name]
    job = make_job(tiny("llama", tied=tied), use_lora=lora, micro_batch=1, **switches)
    shard = 1 if job.fsdp.strategy == "NO_SHARD" else 2
    _compare(job, 2, Order(mode=job.accumulation, shard=shard), close=lora and bool(job.units.wrap))


@pytest.mark.parametrize("lora", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["full", "lora"])
@pytest.mark.parametrize("name", FOUR_RANKS)
def test_four_ranks(tiny, name, lora):
    switches = FOUR_RANKS[name]
    job = make_job(tiny("llama"), use_lora=lora, global_batch=8, micro_batch=1, **switches)
    _compare(job, 4, Order(mode=job.accumulation, shard=job.mesh.shard))
