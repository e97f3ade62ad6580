"""Activation checkpointing changes what is computed in backward, and nothing else."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from engine.whole_models import Collectives, assert_equal, gradients, make_batch, make_model, shard
from harness.ranks import run_ranks
from shardwise.engine import checkpointing
from shardwise.engine.blocks import find_blocks
from shardwise.engine.checkpointing import checkpointing_of, is_kept, wrap_blocks
from shardwise.engine.compat import operator_argument, operator_name
from shardwise.engine.loss import token_loss_sum

SETTINGS = ["full", "every_2", "selective"]
LAYERS = 3
WIDE = {"hidden_size": 320, "num_attention_heads": 10, "intermediate_size": 288, "num_hidden_layers": LAYERS}
"""Every inner dimension of the base is above 256: 320 and 288."""
PRODUCTS = {"aten::mm", "aten::bmm", "aten::addmm", "aten::baddbmm"}
ATTENTION = "aten::_scaled_dot_product_flash_attention_for_cpu"


class _Calls(TorchDispatchMode):
    """Counts matrix products and forward attention."""

    def __init__(self):
        super().__init__()
        self.counted = Counter()

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        name = operator_name(operator)
        if name in PRODUCTS:
            self.counted["products"] += 1
        if name == ATTENTION:
            self.counted["attention"] += 1
        return operator(*args, **(kwargs or {}))


def _wrapped(setting, *args, **options):
    model = make_model(*args, **options)
    wrap_blocks(find_blocks(model).modules, setting)
    return model


def _backward_calls(model):
    batch = make_batch()
    with _Calls() as forward:
        logits = model(input_ids=batch.input_ids, use_cache=False).logits
    loss = token_loss_sum(logits, batch.labels)
    with _Calls() as backward:
        loss.backward()
    return forward.counted, backward.counted


@pytest.mark.parametrize(
    ("setting", "again", "attention"),
    [("none", 0, 0), ("full", 6 * LAYERS, LAYERS), ("every_2", 6 * 2, 2), ("selective", 0, 0)],
)
def test_products_and_attention_in_backward(setting, again, attention):
    """A Llama block has 7 products. A recompute ends before the last one, which saves nothing it computes."""
    forward, backward = _backward_calls(_wrapped(setting, "llama", **WIDE))
    products = 7 * LAYERS + 1
    assert forward == {"products": products, "attention": LAYERS}
    assert backward["products"] == 2 * products + again
    assert backward["attention"] == attention


@pytest.mark.parametrize(("setting", "again"), [("none", 0), ("full", 3 * 7 - 1), ("selective", 6)])
def test_selective_computes_the_wide_half_of_adapters_again(setting, again):
    """B of 7 adapters, the last of which the recompute does not reach; A and the base are kept.

    In backward: two products for each half, one for a frozen base, none for the first block's inputs.
    """
    _, plain = _backward_calls(_wrapped("none", "llama", lora={}, **WIDE))
    _, backward = _backward_calls(_wrapped(setting, "llama", lora={}, **WIDE))
    assert backward["products"] == plain["products"] + LAYERS * again


@pytest.mark.parametrize(("setting", "again"), [("full", 6 + 2), ("selective", 2)])
def test_selective_computes_attention_scores_again_where_they_are_products(setting, again):
    """Eager attention: scores over heads of 32, and their product with values over 11 tokens, are cheap."""
    _, plain = _backward_calls(_wrapped("none", "llama", attn_implementation="eager", **WIDE))
    _, backward = _backward_calls(_wrapped(setting, "llama", attn_implementation="eager", **WIDE))
    assert backward["products"] == plain["products"] + LAYERS * again


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llama", {"attention_dropout": 0.3}),
        ("llama", {"attention_dropout": 0.3, "lora": {"lora_dropout": 0.3}}),
        ("gpt_neox", {"attention_dropout": 0.3, "hidden_dropout": 0.3}),
        ("qwen3_moe", {"attention_dropout": 0.3}),
        ("qwen3_moe", {"experts_implementation": "eager"}),
    ],
)
def test_gradients_with_dropout_are_the_same(monkeypatch, setting, family, options):
    monkeypatch.setattr(checkpointing, "CHEAP_INNER", 40)  # hidden 64 is kept, heads of 32 and ranks of 3 are not
    batch = make_batch()
    plain = gradients(make_model(family, **options), batch)
    assert_equal(gradients(_wrapped(setting, family, **options), batch), plain)
    if "attention_dropout" in options:
        without = {name: 0.0 for name in options if name.endswith("_dropout")}
        dry = gradients(make_model(family, **{**options, **without, "lora": options.get("lora") and {}}), batch)
        assert not torch.equal(dry.loss, plain.loss), "no dropout was drawn"


def _on_ranks(rank, world, setting, family, options, strategy):
    checkpointing.CHEAP_INNER = 40
    model = shard(_wrapped(setting, family, **options), strategy=strategy)
    with Collectives() as collectives:
        found = gradients(model, make_batch(seed=rank))
    return found, collectives.counted


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
@pytest.mark.parametrize(
    ("family", "options"), [("llama", {}), ("gpt_neox", {"hidden_dropout": 0.3}), ("llama", {"lora": {}})]
)
def test_on_two_ranks_nothing_but_the_recompute_is_different(family, options, strategy):
    def body(rank, world):
        results = []
        for setting in ("none", *SETTINGS):
            found, counts = _on_ranks(rank, world, setting, family, options, strategy)
            results.append((found, counts))
        return results

    for (plain, collectives), *others in run_ranks(body, 2):
        assert collectives.total() > 0
        for found, counts in others:
            assert_equal(found, plain)
            assert counts == collectives


def test_routing_on_two_ranks_is_recomputed_equally():
    def body(rank, world):
        return [_on_ranks(rank, world, s, "qwen3_moe", {}, "FULL_SHARD")[0] for s in ("none", *SETTINGS)]

    for plain, *others in run_ranks(body, 2):
        for found in others:
            assert_equal(found, plain)


def test_what_a_block_does_is_read_from_it():
    assert [checkpointing_of(b) for b in find_blocks(_wrapped("every_2", num_hidden_layers=3)).modules] == [
        "full",
        "none",
        "full",
    ]
    for setting in ("none", "full", "selective"):
        assert {checkpointing_of(b) for b in find_blocks(_wrapped(setting)).modules} == {setting}


def _attention(name):
    return getattr(torch.ops.aten, name).default


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("_scaled_dot_product_flash_attention", 3),
        ("_scaled_dot_product_efficient_attention", 5),
        ("_scaled_dot_product_cudnn_attention", 5),
        ("_scaled_dot_product_flash_attention_for_cpu", 3),
        ("_scaled_dot_product_fused_attention_overrideable", 4),
    ],
)
def test_attention_with_dropout_is_not_kept(name, place):
    """It would draw nothing in the recompute, and shift every later draw of its block (seen on GPUs only)."""
    arguments = [None] * place
    assert is_kept(_attention(name), tuple(arguments), {})
    assert is_kept(_attention(name), (*arguments, 0.0), {})
    assert not is_kept(_attention(name), (*arguments, 0.3), {})
    assert not is_kept(_attention(name), tuple(arguments), {"dropout_p": 0.3})


def test_operators_are_read_by_name():
    operator = torch.ops.aten.addmm.default
    assert operator_name(operator) == "aten::addmm"
    assert operator_argument(operator, "beta", (1, 2, 3), {}) == 1
    assert operator_argument(operator, "beta", (1, 2, 3), {"beta": 4}) == 4
    assert operator_argument(operator, "mat1", (1, 2, 3), {}) == 2
    assert operator_argument(operator, "dropout_p", (1, 2, 3), {}) is None


def test_products_are_kept_by_their_inner_dimension():
    def kept(inner):
        return is_kept(torch.ops.aten.mm.default, (torch.empty(4, inner), torch.empty(inner, 999)), {})

    assert [kept(checkpointing.CHEAP_INNER), kept(checkpointing.CHEAP_INNER + 1)] == [False, True]
    bias = nn.Linear(1, 1).bias
    assert is_kept(torch.ops.aten.addmm.default, (bias, torch.empty(4, 300), torch.empty(300, 1)), {})
    assert not is_kept(torch.ops.aten.relu.default, (torch.empty(4, 300),), {})
