"""Phi-3 and Phi-4: Llama with fused projections."""

from __future__ import annotations

from shardwise.catalogue.families.attention import read_heads
from shardwise.catalogue.families.fields import Fields
from shardwise.catalogue.families.llama import BEFORE_AND_AFTER, Recipe, finish
from shardwise.catalogue.families.tree import Block, Skeleton, linear, module, norm
from shardwise.spec.model_spec import Mlp

_RECIPE = Recipe(
    prefix="Phi3",
    positions=4096,
    rules={
        "self_attn.qkv_proj": "colwise_gather_output",
        "self_attn.o_proj": "rowwise_split_input",
        "mlp.gate_up_proj": "colwise_gather_output",
        "mlp.down_proj": "rowwise_split_input",
    },
)


def build(fields: Fields) -> Skeleton:
    """Return the tree of a Phi-3 configuration.

    Raises:
        BadInput: fields that are missing or wrong.
    """
    layers, width = fields.size("num_hidden_layers"), fields.size("intermediate_size")
    window = fields.optional_size("sliding_window")
    mlp = Mlp(gated=True, activation=fields.activation("hidden_act", default="silu"), width=width)
    sizes = read_heads(fields)
    query, key = sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
    part = module(
        "",
        "Phi3DecoderLayer",
        module(
            "self_attn",
            "Phi3Attention",
            linear("o_proj", query, sizes.hidden),
            linear("qkv_proj", sizes.hidden, query + 2 * key),
        ),
        module(
            "mlp",
            "Phi3MLP",
            linear("gate_up_proj", sizes.hidden, 2 * width),
            linear("down_proj", width, sizes.hidden),
        ),
        *(norm(name, sizes.hidden, "Phi3RMSNorm") for name in BEFORE_AND_AFTER),
    )
    block = Block(attention=sizes.attention(window), mlp=mlp, part=part)
    return finish(fields, _RECIPE, sizes, (block,) * layers)
