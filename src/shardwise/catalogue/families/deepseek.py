"""DeepSeek-V2 and V3: attention through low-rank projections, first blocks dense, then mixtures with shared experts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from shardwise.catalogue.families.attention import Heads
from shardwise.catalogue.families.fields import Fields
from shardwise.catalogue.families.llama import BEFORE_AND_AFTER, Recipe, finish, mlp_part
from shardwise.catalogue.families.mixture import experts_part, router_part
from shardwise.catalogue.families.rules import EXPERTS, GATED_MLP, SHARED_EXPERTS
from shardwise.catalogue.families.tree import Block, Part, Skeleton, linear, module, norm
from shardwise.spec.model_spec import Attention, Mlp

_V2_ATTENTION = {
    "self_attn.q_proj": "colwise",
    "self_attn.q_b_proj": "colwise",
    "self_attn.kv_a_proj_with_mqa": "mla_kv_a_proj",
    "self_attn.kv_b_proj": "colwise",
    "self_attn.o_proj": "rowwise",
}


@dataclass(frozen=True, kw_only=True)
class Family:
    """What sets one generation apart."""

    recipe: Recipe
    """What is around the blocks."""
    defaults: dict[str, Any]
    """transformers' defaults of sizes that may be absent."""
    mlp_bias: bool
    """The flag `mlp_bias` exists."""
    mixture: str
    """Class of a mixture."""


FAMILIES: dict[str, Family] = {
    "deepseek_v2": Family(
        recipe=Recipe(prefix="DeepseekV2", rules={**_V2_ATTENTION, **EXPERTS, **SHARED_EXPERTS, **GATED_MLP}),
        defaults={
            "first_k_dense_replace": 0,
            "n_routed_experts": 64,
            "n_shared_experts": 2,
            "num_experts_per_tok": None,
        },
        mlp_bias=True,
        mixture="DeepseekV2Moe",
    ),
    "deepseek_v3": Family(
        recipe=Recipe(prefix="DeepseekV3", positions=4096, rules={**EXPERTS, **SHARED_EXPERTS, **GATED_MLP}),
        defaults={
            "first_k_dense_replace": 3,
            "n_routed_experts": 256,
            "n_shared_experts": 1,
            "num_experts_per_tok": 8,
        },
        mlp_bias=False,
        mixture="DeepseekV3MoE",
    ),
}
"""Families by transformers' `model_type`."""


@dataclass(frozen=True, kw_only=True)
class _Latent:
    """Sizes of the attention."""

    hidden: int
    heads: int
    query_rank: int | None
    kv_rank: int
    rotary: int
    plain: int
    value: int
    bias: bool

    @property
    def head_dim(self) -> int:
        return self.rotary + self.plain

    def attention(self) -> Attention:
        return Attention(
            kind="latent", heads=self.heads, kv_heads=self.heads, head_dim=self.head_dim, value_dim=self.value
        )


def build(fields: Fields, family: Family) -> Skeleton:
    """Return the tree of a family in FAMILIES.

    Raises:
        BadInput: fields that are missing or wrong.
    """
    recipe, prefix, defaults = family.recipe, family.recipe.prefix, family.defaults
    layers, width = fields.size("num_hidden_layers"), fields.size("intermediate_size")
    activation = fields.activation("hidden_act", default="silu")
    first = fields.count("first_k_dense_replace", defaults["first_k_dense_replace"])
    mlp_bias = family.mlp_bias and fields.flag("mlp_bias", False)
    sizes = _read(fields)
    expert_width = fields.size("moe_intermediate_size") if first < layers else width
    sparse_mlp = Mlp(
        gated=True,
        activation=activation,
        width=expert_width,
        experts=fields.size("n_routed_experts", default=defaults["n_routed_experts"]),
        active=fields.size("num_experts_per_tok", default=defaults["num_experts_per_tok"]),
        shared_width=expert_width * fields.size("n_shared_experts", default=defaults["n_shared_experts"]),
    )
    fields.divides("num_attention_heads", sizes.heads, "hidden_size", sizes.hidden)
    fields.check()
    attention = _attention_part(prefix, sizes)
    norms = tuple(norm(name, sizes.hidden, f"{prefix}RMSNorm") for name in BEFORE_AND_AFTER)
    kind = f"{prefix}DecoderLayer"
    dense = Block(
        attention=sizes.attention(),
        mlp=Mlp(gated=True, activation=activation, width=width),
        part=module("", kind, attention, mlp_part(recipe, sizes.hidden, width, mlp_bias), *norms),
    )
    sparse = Block(
        attention=sizes.attention(),
        mlp=sparse_mlp,
        part=module("", kind, attention, _sparse_part(family, sparse_mlp, sizes.hidden, mlp_bias), *norms),
    )
    blocks = tuple(dense if index < first else sparse for index in range(layers))
    around = Heads(hidden=sizes.hidden, heads=sizes.heads, kv_heads=sizes.heads, head_dim=sizes.head_dim)
    return finish(fields, recipe, around, blocks)


def _read(fields: Fields) -> _Latent:
    return _Latent(
        hidden=fields.size("hidden_size"),
        heads=fields.size("num_attention_heads"),
        query_rank=fields.optional_size("q_lora_rank", 1536),
        kv_rank=fields.size("kv_lora_rank", default=512),
        rotary=fields.size("qk_rope_head_dim", default=64),
        plain=fields.size("qk_nope_head_dim", default=128),
        value=fields.size("v_head_dim", default=128),
        bias=fields.flag("attention_bias", False),
    )


def _attention_part(prefix: str, sizes: _Latent) -> Part:
    hidden, rank, query = sizes.hidden, sizes.query_rank, sizes.heads * sizes.head_dim
    norm_kind = f"{prefix}RMSNorm"
    queries = [linear("q_proj", hidden, query)]
    if rank is not None:
        queries = [
            linear("q_a_proj", hidden, rank, sizes.bias),
            norm("q_a_layernorm", rank, norm_kind),
            linear("q_b_proj", rank, query),
        ]
    return module(
        "self_attn",
        f"{prefix}Attention",
        *queries,
        linear("kv_a_proj_with_mqa", hidden, sizes.kv_rank + sizes.rotary, sizes.bias),
        norm("kv_a_layernorm", sizes.kv_rank, norm_kind),
        linear("kv_b_proj", sizes.kv_rank, sizes.heads * (sizes.plain + sizes.value)),
        linear("o_proj", sizes.heads * sizes.value, hidden, sizes.bias),
    )


def _sparse_part(family: Family, mlp: Mlp, hidden: int, mlp_bias: bool) -> Part:
    prefix = family.recipe.prefix
    shared = mlp_part(family.recipe, hidden, mlp.shared_width, mlp_bias)
    return module(
        "mlp",
        family.mixture,
        experts_part(f"{prefix}Experts", mlp.experts, hidden, mlp.width),
        router_part(f"{prefix}TopkRouter", mlp.experts, hidden, fp32=True),
        Part(name="shared_experts", kind=shared.kind, inner=shared.inner),
    )
