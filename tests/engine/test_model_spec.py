"""The shape by formula is the shape of the real model, for the catalogue and for every option of every family."""

from __future__ import annotations

import json

import pytest
import torch

from catalogue.shapes import ODD
from shardwise.catalogue.families.registry import FORMULAS
from shardwise.catalogue.models import find_model, model_from_config, model_from_dimensions, model_names
from shardwise.engine.model_spec import config_of, model_spec_of
from shardwise.engine.source import build_on_meta
from shardwise.spec.problems import BadInput


def assert_equal_to_the_real_model(spec):
    """The whole ModelSpec: names, shapes, classes, kinds, blocks, tied weights, tensor rules."""
    model = build_on_meta(config_of(spec), attention=None, dtype=torch.bfloat16)
    real = model_spec_of(model, spec.config, name=spec.name, note=spec.note)
    for field in type(spec).model_fields:
        assert getattr(spec, field) == getattr(real, field), field
    assert spec == real
    assert spec.parameters == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("fields", ODD, ids=lambda fields: f"{fields['model_type']}-{len(json.dumps(fields))}")
def test_formulas_equal_the_real_model(fields):
    assert_equal_to_the_real_model(model_from_config(fields, name="odd"))


def test_every_formula_is_compared():
    assert {fields["model_type"] for fields in ODD} == set(FORMULAS)


SIZES = {"layers": 3, "hidden": 60, "heads": 6, "ffn": 100, "vocab": 101}
DIMENSIONS = [
    {"mlp": "swiglu", "tied": False, "kv_heads": 2},
    {"mlp": "swiglu", "tied": True, "kv_heads": 3, "head_dim": 14},
    {"mlp": "swiglu", "tied": False, "hidden": 62, "head_dim": 8},
    {"mlp": "swiglu", "tied": False, "qkv_bias": True},
    {"mlp": "swiglu", "tied": True, "qk_norm": True, "head_dim": 12},
    {"mlp": "swiglu", "tied": True, "qk_norm": True, "qkv_bias": True},
    {"mlp": "geglu", "tied": False, "kv_heads": 1, "head_dim": 16},
    {"mlp": "relu2", "tied": False, "kv_heads": 2, "head_dim": 12},
    {"mlp": "gelu", "tied": True, "learned_positions": True, "max_positions": 33},
    {"mlp": "gelu", "tied": False, "learned_positions": True, "max_positions": 33, "kv_heads": 1},
    {"mlp": "gelu", "tied": True},
    {"mlp": "gelu", "tied": False, "kv_heads": 2, "head_dim": 16},
]


@pytest.mark.parametrize("given", DIMENSIONS, ids=lambda given: "-".join(f"{v}" for v in given.values()))
def test_models_of_given_sizes_equal_the_real_model(given):
    spec = model_from_dimensions(**{**SIZES, **given})
    assert_equal_to_the_real_model(spec)
    attention, mlp = spec.kinds[0].attention, spec.kinds[0].mlp
    hidden = given.get("hidden", SIZES["hidden"])
    assert (spec.layers, spec.hidden, spec.vocab, spec.tied) == (3, hidden, 101, given["tied"])
    assert (attention.heads, attention.kv_heads) == (6, given.get("kv_heads", 6))
    assert attention.head_dim == given.get("head_dim", hidden // 6)
    assert (mlp.width, mlp.gated) == (100, given["mlp"] in ("swiglu", "geglu"))


@pytest.mark.parametrize("name", model_names()[::3])
def test_catalogue_equals_the_real_model(name):
    assert_equal_to_the_real_model(find_model(name))


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for place, name in enumerate(model_names()) if place % 3])
def test_the_rest_of_the_catalogue_equals_the_real_model(name):
    assert_equal_to_the_real_model(find_model(name))


def test_a_family_without_a_formula_is_read_off_the_model():
    from transformers import AutoConfig

    fields = {"num_hidden_layers": 3, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}
    fields |= {"num_key_value_heads": 2, "vocab_size": 101, "pad_token_id": 0}
    model = build_on_meta(AutoConfig.for_model("cohere", **fields), attention=None, dtype=torch.float32)
    spec = model_spec_of(model, {"model_type": "cohere", **fields}, name="cohere")
    assert spec.model_type == "cohere"
    assert spec.parameters == sum(p.numel() for p in model.parameters())
    attention, mlp = spec.kinds[0].attention, spec.kinds[0].mlp
    assert (attention.heads, attention.kv_heads, attention.head_dim) == (4, 2, 16)
    assert (mlp.gated, mlp.activation, mlp.width) == (True, "silu", 96)


def test_a_model_without_attention_is_refused():
    from transformers import AutoConfig

    config = AutoConfig.for_model("mamba", num_hidden_layers=2, hidden_size=32, vocab_size=50, pad_token_id=0)
    model = build_on_meta(config, attention=None, dtype=torch.float32)
    with pytest.raises(BadInput, match="block 0 holds no attention"):
        model_spec_of(model, {"model_type": "mamba"}, name="mamba")


def test_transformers_refusal_is_one_line():
    spec = model_from_config({**ODD[0], "initializer_range": "wide"}, name="wide")
    with pytest.raises(BadInput, match=r"'wide': transformers does not take .*initializer_range") as refused:
        config_of(spec)
    assert "\n" not in str(refused.value)
