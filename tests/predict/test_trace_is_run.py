"""The trace of a plan on CPU ranks is what really lives there: every category at the peak of every phase."""

from __future__ import annotations

import pytest

from harness.ranks import run_ranks
from predict.live_traces import Case, Peaks, differences, jobs_of, run_all, traced

FULL = {"fsdp": {"strategy": "FULL_SHARD"}}
BF16 = {"mixed_precision": {"param_dtype": "bf16"}}
FOUR = {"global_batch": 8}
HYBRID = {"fsdp": {"strategy": "HYBRID_SHARD"}, "mesh": {"replicate": 2, "shard": 2}, **FOUR}
ZERO2 = {"fsdp": {"strategy": "HYBRID_SHARD_ZERO2"}, "mesh": {"replicate": 2, "shard": 2}, **FOUR}
INTEGER = {"fsdp": {"strategy": "FULL_SHARD", "reshard_after_forward": 2}, **FOUR}
TENSOR = {**FULL, "mesh": {"shard": 2, "tensor": 2}}

TWO_FAST: dict[str, Case] = {
    "full shard": FULL,
    "shard gradients, lora": {"fsdp": {"strategy": "SHARD_GRAD_OP"}, "use_lora": True},
    "replicated, recomputed, bf16": {"fsdp": {"strategy": "NO_SHARD"}, "activation_checkpointing": "full", **BF16},
}
FOUR_FAST: dict[str, Case] = {
    "hybrid, gradients reduced once": {**HYBRID, "global_batch": 16, "accumulation": "defer_replicate"},
    "tensor parallel": TENSOR,
}

TWO_SLOW: dict[str, Case] = {
    "full shard, lora": {**FULL, "use_lora": True},
    "shard gradients": {"fsdp": {"strategy": "SHARD_GRAD_OP"}},
    "replicated": {"fsdp": {"strategy": "NO_SHARD"}},
    "replicated, lora": {"fsdp": {"strategy": "NO_SHARD"}, "use_lora": True},
    "recomputed": {**FULL, "activation_checkpointing": "full"},
    "recomputed, lora, bf16": {**FULL, "activation_checkpointing": "full", "use_lora": True, **BF16},
    "selective": {**FULL, "activation_checkpointing": "selective"},
    "selective, lora": {**FULL, "activation_checkpointing": "selective", "use_lora": True},
    "every second": {**FULL, "activation_checkpointing": "every_2"},
    "two micro-batches": {**FULL, "global_batch": 8},
    "five micro-batches": {**FULL, "global_batch": 20},
    "reduced in turn": {**FULL, "global_batch": 8, "reduce_scatter": {"asynchronous": False}},
    "deferred": {**FULL, "global_batch": 12, "accumulation": "defer_all"},
    "deferred, bf16": {**FULL, "global_batch": 12, "accumulation": "defer_all", **BF16},
    "own units": {**FULL, "units": {"embedding": "own", "head": "own"}},
    "own units, tied": {"tied": True, **FULL, "units": {"embedding": "own", "head": "own"}},
    "own units, lora": {**FULL, "units": {"embedding": "own", "head": "own"}, "use_lora": True},
    "parts as units": {**FULL, "units": {"wrap": ["LlamaMLP", "LlamaAttention"]}, "activation_checkpointing": "full"},
    "chunked": {**FULL, "loss_head": "chunked", "loss_chunk": 20},
    "chunked, lora, bf16": {**FULL, "loss_head": "chunked", "loss_chunk": 20, "use_lora": True, **BF16},
    "activations offloaded": {**FULL, "offload": {"activations": True}},
    "optimizer offloaded": {**FULL, "offload": {"optimizer": True}},
    "weights offloaded": {**FULL, "offload": {"parameters": True}},
    "bf16": {**FULL, **BF16},
    "bf16 reduced": {**FULL, "mixed_precision": {"param_dtype": "bf16", "reduce_dtype": "bf16"}},
    "bf16 stored": {**FULL, "mixed_precision": {"storage_dtype": "bf16", "param_dtype": "bf16"}},
    "fp16": {**FULL, "mixed_precision": {"param_dtype": "fp16"}},
    "gathered ahead": {**FULL, "prefetch": {"forward": 2, "backward": 2}},
    "gathered late": {**FULL, "prefetch": {"forward": 0, "backward": 0, "async_all_gather": False}},
    "sgd": {**FULL, "optimizer": "sgd", "momentum": 0.9},
    "one parameter at a time": {**FULL, "optimizer_implementation": "for_loop"},
    "qwen2": {"family": "qwen2", **FULL, **BF16},
    "gemma2": {"family": "gemma2", **FULL},
    "gpt2": {"family": "gpt2", **FULL},
    "mistral, lora": {"family": "mistral", **FULL, "use_lora": True},
    "more blocks": {"layers": 7, **FULL, "activation_checkpointing": "full", **BF16},
}
FOUR_SLOW: dict[str, Case] = {
    "full shard": {**FULL, **FOUR},
    "hybrid": HYBRID,
    "hybrid, lora": {**HYBRID, "use_lora": True},
    "hybrid, recomputed, bf16": {**HYBRID, "activation_checkpointing": "full", **BF16},
    "hybrid, gradients reduced once, bf16": {**HYBRID, "global_batch": 16, "accumulation": "defer_replicate", **BF16},
    "hybrid, deferred": {**HYBRID, "global_batch": 16, "accumulation": "defer_all"},
    "hybrid zero2": ZERO2,
    "hybrid zero2, lora, recomputed": {**ZERO2, "use_lora": True, "activation_checkpointing": "full"},
    "integer": INTEGER,
    "integer, lora": {**INTEGER, "use_lora": True},
    "tensor parallel, lora": {**TENSOR, "use_lora": True},
    "tensor parallel, recomputed": {**TENSOR, "activation_checkpointing": "full"},
    "sequence parallel": {**FULL, "mesh": {"shard": 2, "tensor": 2, "sequence_parallel": True}},
}


@pytest.fixture(scope="module")
def runs(tiny):
    """Return `runs(world, cases)`: what rank 0 really held in each, all cases of a world run by one set of ranks."""
    made: dict[tuple[int, int], dict[str, Peaks]] = {}

    def run(world: int, cases: dict[str, Case]) -> dict[str, Peaks]:
        key = (world, id(cases))
        if key not in made:
            made[key] = run_ranks(run_all, world, jobs_of(tiny, cases), timeout=600)[0]
        return made[key]

    return run


def _check(tiny, runs, world: int, cases: dict[str, Case], case: str) -> None:
    run, said = runs(world, cases)[case], traced(jobs_of(tiny, cases)[case], world)
    assert not differences(run, said), "\n".join(differences(run, said))


@pytest.mark.parametrize("case", sorted(TWO_FAST))
def test_two_ranks(tiny, runs, case):
    _check(tiny, runs, 2, TWO_FAST, case)


@pytest.mark.parametrize("case", sorted(FOUR_FAST))
def test_four_ranks(tiny, runs, case):
    _check(tiny, runs, 4, FOUR_FAST, case)


@pytest.mark.slow
@pytest.mark.parametrize("case", sorted(TWO_SLOW))
def test_two_ranks_in_every_mode(tiny, runs, case):
    _check(tiny, runs, 2, TWO_SLOW, case)


@pytest.mark.slow
@pytest.mark.parametrize("case", sorted(FOUR_SLOW))
def test_four_ranks_in_every_mode(tiny, runs, case):
    _check(tiny, runs, 4, FOUR_SLOW, case)


def test_ranks_forked_after_a_trace_do_not_take_rank_0s_shards_for_theirs(tiny):
    """DTensor remembers sizes of shards by mesh and shape; 1009 rows are 505 on rank 0 and 504 on rank 1."""
    jobs = jobs_of(tiny, {"full shard": FULL})
    traced(jobs["full shard"], 2)
    first, second = run_ranks(run_all, 2, jobs)
    assert first["full shard"]["forward"].live.keys() == second["full shard"]["forward"].live.keys()
