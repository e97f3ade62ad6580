"""Mixtures of experts with Llama's attention: Mixtral, Qwen2-MoE, Qwen3-MoE, OLMoE. Experts lie in fused tensors."""

from __future__ import annotations

from dataclasses import dataclass, field

from shardwise.catalogue.families.attention import attention_part, read_heads, windows
from shardwise.catalogue.families.fields import Fields
from shardwise.catalogue.families.llama import BEFORE_AND_AFTER, Recipe, finish, mlp_part
from shardwise.catalogue.families.rules import EXPERTS, GATED_MLP, HEAD_NORMS, SPLIT_ATTENTION, WHOLE_ATTENTION
from shardwise.catalogue.families.tree import Block, Part, Skeleton, linear, module, norm
from shardwise.spec.model_spec import Mlp


def experts_part(kind: str, experts: int, hidden: int, width: int) -> Part:
    """Return the fused tensors of gated experts: [experts, 2 x width, hidden] and [experts, hidden, width]."""
    own = (("gate_up_proj", (experts, 2 * width, hidden)), ("down_proj", (experts, hidden, width)))
    return Part(name="experts", kind=kind, own=own)


def router_part(kind: str, experts: int, hidden: int, *, fp32: bool = False) -> Part:
    """Return the layer that chooses experts: weight [experts, hidden]."""
    return Part(name="gate", kind=kind, own=(("weight", (experts, hidden)),), fp32=fp32)


@dataclass(frozen=True, kw_only=True)
class Mixture:
    """What sets one family of mixtures apart."""

    recipe: Recipe
    """Its attention and what is around the blocks."""
    experts: tuple[str, ...]
    """Names of the field that counts experts; the first is transformers' own."""
    experts_default: int
    """That count where it is absent."""
    active_default: int
    """`num_experts_per_tok` where it is absent."""
    width: str
    """Field of an expert's inner width."""
    router_last: bool = False
    """The router comes after the experts."""
    shared_gate: bool = False
    """A shared expert of `shared_expert_intermediate_size`, with a gate of its own."""
    dense_blocks: bool = False
    """`decoder_sparse_step` and `mlp_only_layers` make some blocks dense."""
    extra_rules: dict[str, str] = field(default_factory=dict)
    """Further rules of its tensor-parallel plan."""


MIXTURES: dict[str, Mixture] = {
    "mixtral": Mixture(
        recipe=Recipe(prefix="Mixtral", kv_default=8, positions=131072, rules={**SPLIT_ATTENTION, **EXPERTS}),
        experts=("num_local_experts", "num_experts"),
        experts_default=8,
        active_default=2,
        width="intermediate_size",
    ),
    "qwen2_moe": Mixture(
        recipe=Recipe(
            prefix="Qwen2Moe",
            kv_default=16,
            qkv_bias="qkv_bias",
            bias_default=True,
            positions=32768,
            rules={**SPLIT_ATTENTION, **EXPERTS, **GATED_MLP},
        ),
        experts=("num_experts",),
        experts_default=60,
        active_default=4,
        width="moe_intermediate_size",
        shared_gate=True,
        dense_blocks=True,
    ),
    "qwen3_moe": Mixture(
        recipe=Recipe(
            prefix="Qwen3Moe",
            kv_default=4,
            qkv_bias="attention_bias",
            out_bias="attention_bias",
            qk_norm="head",
            positions=32768,
            rules={**SPLIT_ATTENTION, **HEAD_NORMS, **EXPERTS, **GATED_MLP},
        ),
        experts=("num_local_experts", "num_experts"),
        experts_default=128,
        active_default=8,
        width="moe_intermediate_size",
        router_last=True,
        dense_blocks=True,
    ),
    "olmoe": Mixture(
        recipe=Recipe(
            prefix="Olmoe",
            kv_default=16,
            qkv_bias="attention_bias",
            out_bias="attention_bias",
            qk_norm="all",
            positions=4096,
            rules={**WHOLE_ATTENTION, **EXPERTS},
        ),
        experts=("num_experts", "num_local_experts"),
        experts_default=64,
        active_default=8,
        width="intermediate_size",
    ),
}
"""Families by transformers' `model_type`."""


def build(fields: Fields, family: Mixture) -> Skeleton:
    """Return the tree of a family in MIXTURES.

    Raises:
        BadInput: fields that are missing or wrong.
    """
    recipe = family.recipe
    layers = fields.size("num_hidden_layers")
    activation = fields.activation("hidden_act", default="silu")
    sparse_mlp = Mlp(
        gated=True,
        activation=activation,
        width=fields.size(family.width),
        experts=fields.size(*family.experts, default=family.experts_default),
        active=fields.size("num_experts_per_tok", default=family.active_default),
        shared_width=fields.size("shared_expert_intermediate_size") if family.shared_gate else 0,
    )
    sparse = _sparse_blocks(fields, family, layers)
    dense_width = sparse_mlp.width if all(sparse) else fields.size("intermediate_size")
    qkv_bias, out_bias = (
        fields.flag(given, recipe.bias_default) if isinstance(given, str) else given
        for given in (recipe.qkv_bias, recipe.out_bias)
    )
    sizes = read_heads(fields, kv_default=recipe.kv_default)
    attention = attention_part(sizes, recipe.prefix, qkv_bias=qkv_bias, out_bias=out_bias, qk_norm=recipe.qk_norm)
    norms = tuple(norm(name, sizes.hidden, f"{recipe.prefix}RMSNorm") for name in BEFORE_AND_AFTER)
    made: dict[tuple[bool, int | None], Block] = {}
    blocks = []
    for has_experts, window in zip(sparse, _windows(fields, family, layers), strict=True):
        if (has_experts, window) not in made:
            mlp = sparse_mlp if has_experts else Mlp(gated=True, activation=activation, width=dense_width)
            inner = (
                _sparse_part(family, sparse_mlp, sizes.hidden)
                if has_experts
                else mlp_part(recipe, sizes.hidden, dense_width, False)
            )
            part = module("", f"{recipe.prefix}DecoderLayer", attention, inner, *norms)
            made[has_experts, window] = Block(attention=sizes.attention(window), mlp=mlp, part=part)
        blocks.append(made[has_experts, window])
    return finish(fields, recipe, sizes, tuple(blocks))


def _windows(fields: Fields, family: Mixture, layers: int) -> tuple[int | None, ...]:
    if family.recipe.prefix == "Mixtral":
        return (fields.optional_size("sliding_window"),) * layers
    if not family.dense_blocks or not fields.flag("use_sliding_window", False):
        return (None,) * layers
    window = fields.optional_size("sliding_window", 4096)
    if family.recipe.prefix == "Qwen3Moe":
        return (window,) * layers
    below = fields.count("max_window_layers", 28)
    types = tuple("full_attention" if i % 2 or i >= below else "sliding_attention" for i in range(layers))
    return windows(fields, layers, window=window, default=types)


def _sparse_blocks(fields: Fields, family: Mixture, layers: int) -> tuple[bool, ...]:
    """Return which blocks have experts."""
    if not family.dense_blocks:
        return (True,) * layers
    step, dense = fields.size("decoder_sparse_step", default=1), set(fields.numbers("mlp_only_layers"))
    return tuple(index not in dense and (index + 1) % step == 0 for index in range(layers))


def _sparse_part(family: Mixture, mlp: Mlp, hidden: int) -> Part:
    prefix = family.recipe.prefix
    experts = experts_part(f"{prefix}Experts", mlp.experts, hidden, mlp.width)
    router = router_part(f"{prefix}TopKRouter", mlp.experts, hidden)
    parts: list[Part] = [experts, router] if family.router_last else [router, experts]
    if family.shared_gate:
        parts.append(_shared_part(prefix, hidden, mlp.shared_width))
        parts.append(linear("shared_expert_gate", hidden, 1))
    return module("mlp", f"{prefix}SparseMoeBlock", *parts)


def _shared_part(prefix: str, hidden: int, width: int) -> Part:
    return module(
        "shared_expert",
        f"{prefix}MLP",
        linear("gate_proj", hidden, width),
        linear("up_proj", hidden, width),
        linear("down_proj", width, hidden),
    )
