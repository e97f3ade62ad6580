"""What is loaded is what transformers loads, for every kind of checkpoint."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

from engine.training import make_job, make_plan
from harness.ranks import run_ranks
from shardwise.engine.load import load_model
from shardwise.engine.mesh import build_mesh
from shardwise.engine.source import open_source

TOKENS = torch.tensor([[1, 5, 9, 33, 77, 100, 4, 2, 9]])

FAMILIES = {
    "llama": {},
    "qwen2": {},  # biases
    "gemma3_text": {},  # two rotary tables, sliding windows, scaled embedding
    "phi3": {"pad_token_id": 1},  # fused projections
    "gpt2": {"n_embd": 64, "n_layer": 3, "n_head": 2, "n_positions": 128},  # Conv1D, learnt positions, eager masks
    "gpt_neox": {},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},  # experts built from several checkpoint tensors
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "decoder_sparse_step": 1},
}


def _logits(rank, world, job):
    plan = make_plan(job, world)
    model = load_model(job, plan, open_source(job.model), build_mesh(plan.mesh, "cpu")).eval()
    with torch.no_grad():
        return model(input_ids=TOKENS, attention_mask=torch.ones_like(TOKENS)).logits


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("family", FAMILIES)
def test_sharded_logits_equal_transformers(tiny, family, lora):
    folder = tiny(family, **FAMILIES[family])
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        expected = reference(input_ids=TOKENS, attention_mask=torch.ones_like(TOKENS)).logits
    job = make_job(folder, use_lora=lora, fsdp={"strategy": "FULL_SHARD"}, micro_batch=3)
    for logits in run_ranks(_logits, 2, job):
        assert torch.equal(logits, expected)


def test_bf16_base_stays_bf16_and_adapters_are_fp32(tiny):
    """read-back inside load_model compares every parameter's storage; here the plan itself is looked at."""
    folder = tiny("llama", dtype=torch.bfloat16)
    job = make_job(
        folder, use_lora=True, fsdp={"strategy": "FULL_SHARD"}, micro_batch=3, mixed_precision={"param_dtype": "bf16"}
    )
    plan = make_plan(job, 2)
    assert plan.dtypes.frozen_storage == "bf16"
    assert plan.dtypes.reduce == plan.dtypes.output == "fp32"
    first, second = run_ranks(_logits, 2, job)
    assert first.dtype == torch.float32
    assert torch.equal(first, second)
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    with torch.no_grad():
        expected = reference(input_ids=TOKENS).logits
    assert torch.equal(first, expected.float())
