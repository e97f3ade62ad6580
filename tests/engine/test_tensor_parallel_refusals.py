"""What cannot be split is refused before a rank starts, with what would do."""

from __future__ import annotations

import pytest
from transformers import AutoConfig

from engine.training import make_job
from shardwise.engine.dtypes import TORCH_DTYPE
from shardwise.engine.load import build_skeleton
from shardwise.engine.source import build_on_meta, open_source
from shardwise.engine.tensor_parallel import STYLES, tensor_layout
from shardwise.engine.tp_check import check_tensor_parallel
from shardwise.spec.layout import Mesh
from shardwise.spec.problems import BadInput

SIZES = {
    "vocab_size": 104,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def _model(family, **options):
    config = AutoConfig.for_model(family, **{**SIZES, **options})
    return build_on_meta(config, attention=None, dtype=TORCH_DTYPE["fp32"])


def _problem(model, **mesh):
    with pytest.raises(BadInput) as refusal:
        check_tensor_parallel(model, Mesh(**mesh))
    (problem,) = refusal.value.problems
    return problem


def test_heads_that_do_not_divide_are_refused_with_the_numbers_that_do():
    problem = _problem(_model("llama"), tensor=4)
    assert problem.field == "mesh.tensor"
    assert problem.value == 4
    assert problem.reason == "does not divide heads of k_proj (2), heads of v_proj (2)"
    assert problem.allowed == "1, 2"
    assert problem.fix == "set mesh.tensor to 2"


def test_widths_that_do_not_divide_are_refused():
    problem = _problem(_model("llama", intermediate_size=97), tensor=2)
    assert "outputs of gate_proj (97)" in problem.reason
    assert "inputs of down_proj (97)" in problem.reason
    assert problem.allowed == "1"


def test_heads_of_a_fused_projection_are_counted():
    problem = _problem(_model("gpt_neox", num_attention_heads=2), tensor=4)
    assert "heads of query_key_value (2)" in problem.reason
    assert problem.allowed == "1, 2"


def test_heads_do_not_matter_where_the_attention_works_on_whole_activations():
    assert check_tensor_parallel(_model("phi3", num_key_value_heads=1, pad_token_id=1), Mesh(tensor=4)) == ()


def test_sizes_that_divide_are_accepted():
    assert check_tensor_parallel(_model("llama"), Mesh(tensor=2, sequence_parallel=True)) == ()
    assert check_tensor_parallel(_model("mixtral"), Mesh(shard=2)) == ()


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_a_vocabulary_that_does_not_divide_stays_whole_and_this_is_said(tied):
    (note,) = check_tensor_parallel(_model("llama", vocab_size=101, tie_word_embeddings=tied), Mesh(tensor=2))
    assert note == ("model.embed_tokens and lm_head stay whole on every rank: vocabulary 101 is not a multiple of 2")


def test_a_scaled_embedding_stays_whole_and_this_is_said():
    (note,) = check_tensor_parallel(_model("gemma3_text", tie_word_embeddings=True), Mesh(tensor=2))
    assert note.startswith("model.embed_tokens and lm_head stay whole")
    assert "Gemma3TextScaledWordEmbedding does more than look up" in note


@pytest.mark.parametrize(
    ("family", "options", "reason"),
    [
        ("mixtral", {}, "its plan says moe_tp_experts, packed_colwise"),
        (
            "deepseek_v3",
            {"num_key_value_heads": 4, "first_k_dense_replace": 1},
            "its plan says moe_tp_experts, packed_colwise",
        ),
        ("gpt2", {"n_head": 4, "n_embd": 64}, "attn.c_attn is not a plain linear layer"),
        ("codegen", {"n_head": 4, "n_embd": 64, "rotary_dim": 8}, "attn.qkv_proj holds several projections in one"),
        ("phi", {"qk_layernorm": True}, "q_layernorm works on a part of the heads"),
        ("cohere", {"use_qk_norm": True}, "q_norm works on a part of the heads"),
        ("mamba", {}, "mixer is not a plain linear layer"),
    ],
)
def test_what_would_be_wrong_without_an_error_is_refused(family, options, reason):
    model = _model(family, **options)
    problem = _problem(model, tensor=2)
    assert problem.field == "mesh.tensor"
    assert problem.value == type(model).__name__
    assert reason in problem.reason
    assert problem.fix == "remove mesh.tensor"


@pytest.mark.parametrize(
    ("family", "options", "reason"),
    [
        ("opt", {"ffn_dim": 96, "word_embed_proj_dim": 64}, "fc1 is a Linear, not a norm, an attention or an MLP"),
        ("bloom", {"n_head": 4}, "transformer has 2 norms after its blocks"),
        ("phi3", {"resid_pdrop": 0.1, "pad_token_id": 1}, "resid_attn_dropout drops activations"),
    ],
)
def test_models_without_sequence_parallelism_are_refused_with_the_reason(family, options, reason):
    model = _model(family, **options)
    check_tensor_parallel(model, Mesh(tensor=2))
    problem = _problem(model, tensor=2, sequence_parallel=True)
    assert problem.field == "mesh.sequence_parallel"
    assert reason in problem.reason
    assert type(model).__name__ in problem.reason


def test_the_check_sees_adapters(tiny):
    job = make_job(tiny("llama", kv=2, vocab=102), use_lora=True)
    source = open_source(job.model)
    model = build_skeleton(job, source.config, source.dtype, source).model
    assert check_tensor_parallel(model, Mesh(tensor=2)) == ()
    styles = tensor_layout(model, 2, sequence_parallel=False).styles
    down = "model.layers.0.mlp.down_proj"
    assert styles[f"{down}.base_layer"] == styles[f"{down}.lora_A.default"] == STYLES["rowwise"]
    assert f"{down}.lora_B.default" not in styles
