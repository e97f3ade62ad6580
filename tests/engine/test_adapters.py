"""One seed gives one adapter, whatever the ranks; targets that match nothing are refused."""

from __future__ import annotations

import math

import pytest
import torch
from transformers import AutoConfig

from engine.training import full, make_job, make_plan
from harness.ranks import run_ranks
from shardwise.engine.adapters import add_adapters
from shardwise.engine.load import build_skeleton, load_model
from shardwise.engine.mesh import build_mesh
from shardwise.engine.names import base_name
from shardwise.engine.source import build_on_meta, open_source
from shardwise.spec.method import Lora
from shardwise.spec.problems import BadInput


def _adapters(rank, world, job):
    plan = make_plan(job, world)
    model = load_model(job, plan, open_source(job.model), build_mesh(plan.mesh, "cpu"))
    return {base_name(n): full(p) for n, p in model.named_parameters() if p.requires_grad}


def _job(tiny, **fields):
    return make_job(
        tiny("llama"), use_lora=True, micro_batch=1, global_batch=12, fsdp={"strategy": "FULL_SHARD"}, **fields
    )


def test_adapters_are_the_same_on_one_two_and_four_ranks(tiny):
    job = _job(tiny)
    one, two, four = (run_ranks(_adapters, world, job)[0] for world in (1, 2, 4))
    assert one.keys() == two.keys() == four.keys()
    for name, weight in one.items():
        assert torch.equal(weight, two[name]), name
        assert torch.equal(weight, four[name]), name
    other = run_ranks(_adapters, 2, job.model_copy(update={"seed": 5}))[0]
    name = "model.layers.0.self_attn.q_proj.lora_A.default.weight"
    assert not torch.equal(one[name], other[name])


def test_adapters_start_as_peft_starts_them(tiny):
    """A is uniform within 1 / sqrt(inputs), as PEFT's kaiming_uniform(a=sqrt 5) is; B is zero."""
    for name, weight in run_ranks(_adapters, 2, _job(tiny, lora_rank=64))[0].items():
        if ".lora_B." in name:
            assert not weight.any()
        else:
            bound = 1 / math.sqrt(weight.shape[1])
            assert weight.abs().max() <= bound
            assert weight.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.05)


def test_all_linear_layers_but_the_head_get_one(tiny):
    names = {name.split(".lora_")[0].rpartition(".")[2] for name in run_ranks(_adapters, 1, _job(tiny))[0]}
    assert names == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


def _skeleton(job):
    source = open_source(job.model)
    return build_skeleton(job, source.config, source.dtype, source)


def test_targets_that_match_nothing_are_refused(tiny):
    with pytest.raises(BadInput) as caught:
        _skeleton(_job(tiny, lora_targets=["q_proj", "v_prj", "query_key_value"]))
    assert [problem.value for problem in caught.value.problems] == ["v_prj", "query_key_value"]
    assert "did you mean 'v_proj'?" in str(caught.value)


def test_a_target_that_is_only_part_of_a_name_is_refused(tiny):
    with pytest.raises(BadInput, match="matches no linear layer"):
        _skeleton(_job(tiny, lora_targets=["proj"]))


def test_targets_are_obeyed(tiny):
    model = _skeleton(_job(tiny, lora_targets=["q_proj", "layers.1.mlp.up_proj"])).model
    found = {
        n.split(".lora_")[0].removeprefix("base_model.model.model.")
        for n, p in model.named_parameters()
        if p.requires_grad
    }
    assert found == {*(f"layers.{i}.self_attn.q_proj" for i in range(3)), "layers.1.mlp.up_proj"}


MIXTURE_WITH_A_DENSE_BLOCK = {
    "model_type": "qwen3_moe",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "mlp_only_layers": [0],
    "vocab_size": 101,
}


def test_adapters_that_peft_puts_elsewhere_are_refused():
    """PEFT takes gate_proj for experts, in dense blocks of the same model too, which then would get none."""
    config = dict(MIXTURE_WITH_A_DENSE_BLOCK)
    model = build_on_meta(
        AutoConfig.for_model(config.pop("model_type"), **config), attention=None, dtype=torch.bfloat16
    )
    with pytest.raises(BadInput, match=r"none on model\.layers\.0\.mlp\.down_proj and one on model\.layers\.1\.mlp"):
        add_adapters(model, Lora(rank=2))
