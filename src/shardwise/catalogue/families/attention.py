"""Attention with separate query, key and value projections, as Llama and its descendants have it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from shardwise.catalogue.families.fields import Fields
from shardwise.catalogue.families.tree import Part, linear, module, norm
from shardwise.spec.model_spec import Attention


@dataclass(frozen=True, kw_only=True)
class Heads:
    """Sizes of an attention."""

    hidden: int
    """Elements of a hidden state."""
    heads: int
    """Query heads."""
    kv_heads: int
    """Key and value heads."""
    head_dim: int
    """Elements per head."""

    def attention(self, window: int | None) -> Attention:
        """Return the noun."""
        return Attention(
            heads=self.heads,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            value_dim=self.head_dim,
            window=window,
        )


def read_heads(
    fields: Fields,
    *,
    kv_default: int | None = None,
    kv_required: bool = False,
    head_dim_default: int | None = None,
    even: bool = False,
    hidden: int | None = None,
) -> Heads:
    """Read the sizes of an attention.

    Args:
        fields: The configuration.
        kv_default: `num_key_value_heads` where it is absent; where it is null, and with None, as many as query heads.
        kv_required: It has to be given.
        head_dim_default: `head_dim` where it is absent; None: hidden size / heads.
        even: transformers refuses a hidden size that is not a multiple of the heads, whatever `head_dim` says.
        hidden: The hidden size, where it was read already.
    """
    hidden = fields.size("hidden_size") if hidden is None else hidden
    heads = fields.size("num_attention_heads")
    kv_heads = (
        fields.size("num_key_value_heads")
        if kv_required
        else fields.optional_size("num_key_value_heads", kv_default) or heads
    )
    head_dim = fields.optional_size("head_dim", head_dim_default)
    if head_dim is None and head_dim_default is not None:
        fields.refuse("head_dim", "is null, which transformers does not take here", fix="leave it out")
    if even or head_dim is None:
        fields.divides("num_attention_heads", heads, "hidden_size", hidden)
    fields.divides("num_key_value_heads", kv_heads, "num_attention_heads", heads)
    fields.check()
    return Heads(hidden=hidden, heads=heads, kv_heads=kv_heads, head_dim=head_dim or hidden // heads)


def attention_part(
    sizes: Heads,
    prefix: str,
    *,
    qkv_bias: bool = False,
    out_bias: bool = False,
    out_name: str = "o_proj",
    qk_norm: Literal["", "head", "all"] = "",
    name: str = "self_attn",
) -> Part:
    """Return the modules of an attention.

    Args:
        sizes: Its sizes.
        prefix: What its classes begin with, such as `Llama`.
        qkv_bias: Query, key and value projections have a bias.
        out_bias: The output projection has one.
        out_name: Its name.
        qk_norm: Norms of queries and keys: over each head, or over all heads at once.
        name: Name of the attention in its block.
    """
    query, key = sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
    norm_kind = f"{prefix}RMSNorm"
    norms: tuple[Part, ...] = ()
    if qk_norm:
        query_width, key_width = (query, key) if qk_norm == "all" else (sizes.head_dim, sizes.head_dim)
        norms = (norm("q_norm", query_width, norm_kind), norm("k_norm", key_width, norm_kind))
    return module(
        name,
        f"{prefix}Attention",
        linear("q_proj", sizes.hidden, query, qkv_bias),
        linear("k_proj", sizes.hidden, key, qkv_bias),
        linear("v_proj", sizes.hidden, key, qkv_bias),
        linear(out_name, query, sizes.hidden, out_bias),
        *norms,
    )


def windows(
    fields: Fields, layers: int, *, window: int | None, default: tuple[str, ...] | None = None
) -> tuple[int | None, ...]:
    """Return the window of each block: by `layer_types`, else by `default`, else the same everywhere."""
    types = fields.words("layer_types", layers) or default
    fields.check()
    if types is None:
        return (window,) * layers
    return tuple(window if kind == "sliding_attention" else None for kind in types)
