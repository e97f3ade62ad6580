"""Falcon and MPT: two-layer MLPs with few or no biases, key-value heads shared (Falcon), ALiBi (MPT)."""

from __future__ import annotations

from shardwise.catalogue.families.fields import Fields
from shardwise.catalogue.families.tree import Block, Part, Skeleton, embedding, linear, module, norm
from shardwise.spec.model_spec import Attention, Mlp


def falcon(fields: Fields) -> Skeleton:
    """Return the tree of a Falcon configuration; raises BadInput."""
    layers, hidden = fields.size("num_hidden_layers"), fields.size("n_embed", "hidden_size")
    heads = fields.size("num_attention_heads")
    fields.divides("num_attention_heads", heads, "hidden_size", hidden)
    new, multi_query = fields.flag("new_decoder_architecture", False), fields.flag("multi_query", True)
    kv_heads = 1 if multi_query and not new else fields.size("num_kv_heads", default=heads)
    if not new and not multi_query:
        kv_heads = heads
    width, bias = fields.size("ffn_hidden_size", default=4 * hidden), fields.flag("bias", False)
    vocab, tied = fields.size("vocab_size"), fields.flag("tie_word_embeddings", True)
    positions = fields.size("max_position_embeddings", default=2048)
    mlp = Mlp(gated=False, activation=fields.activation("activation", default="gelu"), width=width)
    norms = _falcon_norms(fields, new, hidden)
    fields.check()
    head_dim = hidden // heads
    part = module(
        "",
        "FalconDecoderLayer",
        module(
            "self_attention",
            "FalconAttention",
            linear("query_key_value", hidden, hidden + 2 * kv_heads * head_dim, bias, "FalconLinear"),
            linear("dense", hidden, hidden, bias, "FalconLinear"),
        ),
        module(
            "mlp",
            "FalconMLP",
            linear("dense_h_to_4h", hidden, width, bias, "FalconLinear"),
            linear("dense_4h_to_h", width, hidden, bias, "FalconLinear"),
        ),
        *norms,
    )
    attention = Attention(heads=heads, kv_heads=kv_heads, head_dim=head_dim, value_dim=head_dim)
    return Skeleton(
        kind="FalconForCausalLM",
        path=(("transformer", "FalconModel"),),
        before=(embedding("word_embeddings", vocab, hidden),),
        blocks_name="h",
        blocks=(Block(attention=attention, mlp=mlp, part=part),) * layers,
        after=(norm("ln_f", hidden, "LayerNorm", True),),
        head=linear("lm_head", hidden, vocab),
        tied=tied,
        hidden=hidden,
        vocab=vocab,
        max_positions=positions,
    )


def _falcon_norms(fields: Fields, new: bool, hidden: int) -> tuple[Part, ...]:
    """Return the norms of a block: one or two before parallel parts, else one before each part."""
    count = fields.size("num_ln_in_parallel_attn", default=2 if new else 1)
    names: tuple[str, ...] = ("ln_attn", "ln_mlp") if count == 2 else ("input_layernorm",)
    if not fields.flag("parallel_attn", True):
        names = ("post_attention_layernorm", "input_layernorm")
    return tuple(norm(name, hidden, "LayerNorm", True) for name in names)


def mpt(fields: Fields) -> Skeleton:
    """Return the tree of an MPT configuration; raises BadInput."""
    layers, hidden = fields.size("n_layers", "num_hidden_layers"), fields.size("d_model", "hidden_size")
    heads = fields.size("n_heads", "num_attention_heads")
    fields.divides("n_heads", heads, "d_model", hidden)
    vocab, tied = fields.size("vocab_size"), fields.flag("tie_word_embeddings", True)
    positions = fields.size("max_seq_len", default=2048)
    fields.check()
    width = 4 * hidden  # whatever expansion_ratio says: transformers does not read it
    part = module(
        "",
        "MptBlock",
        norm("norm_1", hidden, "LayerNorm"),
        module("attn", "MptAttention", linear("Wqkv", hidden, 3 * hidden), linear("out_proj", hidden, hidden)),
        norm("norm_2", hidden, "LayerNorm"),
        module(
            "ffn",
            "MptMLP",
            linear("up_proj", hidden, width),
            linear("down_proj", width, hidden),
        ),
    )
    head_dim = hidden // heads
    attention = Attention(heads=heads, kv_heads=heads, head_dim=head_dim, value_dim=head_dim)
    mlp = Mlp(gated=False, activation="gelu", width=width)
    return Skeleton(
        kind="MptForCausalLM",
        path=(("transformer", "MptModel"),),
        before=(embedding("wte", vocab, hidden),),
        blocks_name="blocks",
        blocks=(Block(attention=attention, mlp=mlp, part=part),) * layers,
        after=(norm("norm_f", hidden, "LayerNorm"),),
        head=linear("lm_head", hidden, vocab),
        tied=tied,
        hidden=hidden,
        vocab=vocab,
        max_positions=positions,
    )
