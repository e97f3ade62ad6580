"""What decays, what is refused, and the learning rate as a function of the optimizer step alone."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM

from engine.training import make_job, make_plan
from shardwise.engine import eight_bit
from shardwise.engine.adapters import add_adapters
from shardwise.engine.optimizer import Schedule, build_optimizer, check_optimizer, decays, set_learning_rate
from shardwise.engine.resting_state import optimizer_name
from shardwise.spec.problems import BadInput


def _rates(kind, warmup, total):
    schedule = Schedule(kind=kind, peak=1.0, warmup_steps=warmup, total_steps=total)
    return [schedule.at(step) for step in range(total)]


def test_constant_after_warm_up():
    assert _rates("constant", 3, 6) == pytest.approx([0.25, 0.5, 0.75, 1, 1, 1])


def test_linear_falls_to_zero_at_the_end():
    assert _rates("linear", 0, 4) == pytest.approx([1, 0.75, 0.5, 0.25])
    assert Schedule(kind="linear", peak=1.0, warmup_steps=0, total_steps=4).at(4) == 0


def test_cosine_is_half_way_in_the_middle():
    assert _rates("cosine", 0, 4) == pytest.approx([1, 0.853553, 0.5, 0.146447], abs=1e-6)


@given(
    kind=st.sampled_from(["constant", "linear", "cosine"]),
    warmup=st.integers(0, 50),
    total=st.integers(1, 200),
    peak=st.floats(1e-7, 1.0),
)
def test_laws(kind, warmup, total, peak):
    schedule = Schedule(kind=kind, peak=peak, warmup_steps=min(warmup, total), total_steps=total)
    rates = [schedule.at(step) for step in range(total)]
    assert all(0 <= rate <= peak * (1 + 1e-12) for rate in rates)
    rising, falling = rates[: schedule.warmup_steps], rates[schedule.warmup_steps :]
    assert rising == sorted(rising)
    assert falling == sorted(falling, reverse=True)
    assert not falling or falling[0] == pytest.approx(peak)


def _on_meta(family, **options):
    config = {"vocab_size": 101, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "head_dim": 32}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    tokens = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **config | heads | tokens | options))


@pytest.mark.parametrize(
    ("family", "options", "decayed", "kept"),
    [
        ("qwen2", {}, ("embed_tokens.weight", "q_proj.weight", "lm_head.weight"), ("q_proj.bias", "norm.weight")),
        ("gpt2", {}, ("wte.weight", "wpe.weight", "c_attn.weight"), ("c_attn.bias", "ln_f.weight", "ln_1.bias")),
        ("cohere", {"use_qk_norm": True}, ("q_proj.weight",), ("q_norm.weight", "input_layernorm.weight")),
        (
            "gpt_oss",
            {"num_local_experts": 4},
            ("experts.gate_up_proj", "experts.down_proj", "router.weight"),
            ("experts.gate_up_proj_bias", "experts.down_proj_bias", "router.bias", "self_attn.sinks"),
        ),
        ("qwen2_moe", {"num_experts": 4}, ("experts.down_proj", "shared_expert_gate.weight"), ("q_proj.bias",)),
        ("mamba", {"state_size": 4}, ("conv1d.weight", "x_proj.weight"), ("A_log", "mixer.D", "conv1d.bias")),
        ("rwkv", {}, ("attention.key.weight",), ("attention.time_mix_key", "attention.time_decay")),
    ],
)
def test_weights_decay_and_nothing_else(family, options, decayed, kept):
    model = _on_meta(family, **options)
    names = [name for name, _ in model.named_parameters()]
    for ending in (*decayed, *kept):
        found = [name for name in names if name.endswith(ending)]
        assert found, ending
        assert all(decays(model, name) is (ending in decayed) for name in found), ending


def test_both_matrices_of_an_adapter_decay(tiny):
    job = make_job(tiny("llama", layers=1), use_lora=True, lora_rank=1)
    model = add_adapters(_on_meta("llama"), job.lora)
    optimizer = build_optimizer(model, make_plan(job, 1), learning_rate=1.0, weight_decay=0.1)
    (group,) = optimizer.param_groups
    assert group["weight_decay"] == 0.1
    assert {p.shape[0] for p in group["params"]} > {1}, "A of rank 1 is one row"
    assert len(group["params"]) == 14


def test_groups_hold_every_parameter_once(tiny):
    model, plan = _on_meta("gpt_oss", num_local_experts=4), make_plan(make_job(tiny("llama", layers=1)), 1)
    first, second = build_optimizer(model, plan, learning_rate=0.5, weight_decay=0.1).param_groups
    assert (first["weight_decay"], second["weight_decay"], first["lr"]) == (0.1, 0.0, 0.5)
    held = [id(p) for p in first["params"] + second["params"]]
    assert sorted(held) == sorted(id(p) for p in model.parameters())


def _plan(tiny, **fields):
    return make_plan(make_job(tiny("llama", layers=1), **fields), 1)


def test_eight_bits_without_torchao_are_refused(tiny, monkeypatch):
    plan = _plan(tiny, optimizer="adamw_8bit")
    check_optimizer(plan)
    monkeypatch.setattr(eight_bit, "installed", lambda: False)
    told = r"optimizer: 'adamw_8bit': needs torchao.*pip install 'shardwise\[int8\]'"
    with pytest.raises(BadInput, match=told):
        check_optimizer(plan)
    with pytest.raises(BadInput, match=told):
        build_optimizer(torch.nn.Linear(2, 2), plan, learning_rate=1.0, weight_decay=0.0)
    check_optimizer(_plan(tiny))


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"offload": {"optimizer": True}}, "offload.optimizer: True: states of adamw_8bit stay on the device"),
        ({"optimizer_state_dtype": "bf16"}, "optimizer_state_dtype: 'bf16': .*; allowed: fp32"),
        ({"mixed_precision": {"storage_dtype": "bf16"}}, "mixed_precision.storage_dtype: 'bf16': .*; allowed: fp32"),
    ],
)
def test_what_eight_bits_do_not_go_with(tiny, fields, told):
    with pytest.raises(BadInput, match=told):
        check_optimizer(_plan(tiny, optimizer="adamw_8bit", **fields))
    check_optimizer(_plan(tiny, **fields))


@pytest.mark.parametrize("fields", [{}, {"optimizer": "adamw_8bit"}, {"optimizer_state_dtype": "bf16"}])
def test_the_learning_rate_is_set_in_every_group(tiny, fields):
    """torchao keeps it as a tensor and refuses a number in its place."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.LayerNorm(2))
    torch.compiler.set_stance("force_eager")
    try:
        optimizer = build_optimizer(model, _plan(tiny, **fields), learning_rate=1.0, weight_decay=0.0)
        set_learning_rate(optimizer, 0.25)
        assert [float(group["lr"]) for group in optimizer.param_groups] == [0.25, 0.25]
        before = model[0].weight.detach().clone()
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    finally:
        torch.compiler.set_stance("default")
    torch.testing.assert_close(before - model[0].weight, torch.full((2, 3), 0.25))


@pytest.mark.parametrize(
    ("fields", "kind"),
    [
        ({}, "AdamW"),
        ({"optimizer": "sgd"}, "SGD"),
        ({"optimizer": "sgd", "optimizer_implementation": "fused"}, "RestingOptimizer"),
        ({"offload": {"optimizer": True}}, "RestingOptimizer"),
        ({"optimizer_state_dtype": "bf16"}, "RestingOptimizer"),
        ({"offload": {"optimizer": True, "parameters": True}}, "AdamW"),
        ({"offload": {"parameters": True}, "optimizer_state_dtype": "bf16"}, "RestingOptimizer"),
    ],
)
def test_states_rest_elsewhere_only_where_they_must(tiny, fields, kind):
    """With parameters on the host, PyTorch's own states are there too."""
    optimizer = build_optimizer(torch.nn.Linear(2, 2), _plan(tiny, **fields), learning_rate=1.0, weight_decay=0.0)
    assert type(optimizer).__name__ == kind
    if kind == "RestingOptimizer":
        assert optimizer_name(optimizer) in ("AdamW", "SGD")
