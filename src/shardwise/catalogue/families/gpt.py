"""GPT-2 and what came between it and Llama: fused projections, LayerNorm, MLPs of two layers."""

from __future__ import annotations

from collections.abc import Callable

from shardwise.catalogue.families.fields import Fields
from shardwise.catalogue.families.rules import rules
from shardwise.catalogue.families.tree import Block, Part, Skeleton, conv1d, embedding, linear, module, norm
from shardwise.spec.model_spec import Attention, Mlp


def _layer_norm(name: str, width: int) -> Part:
    return norm(name, width, "LayerNorm", True)


def _attention(heads: int, kv_heads: int, hidden: int) -> Attention:
    head_dim = hidden // heads
    return Attention(heads=heads, kv_heads=kv_heads, head_dim=head_dim, value_dim=head_dim)


def _blocks(
    fields: Fields, sizes: tuple[int, int, int, int], activation: tuple[str, str], width: int, part: Part
) -> tuple[Block, ...]:
    """Return equal blocks; `sizes` are blocks, hidden size, heads and key-value heads."""
    layers, hidden, heads, kv_heads = sizes
    mlp = Mlp(gated=False, activation=fields.activation(activation[0], default=activation[1]), width=width)
    fields.check()
    return (Block(attention=_attention(heads, kv_heads, hidden), mlp=mlp, part=part),) * layers


def _gpt_sizes(fields: Fields) -> tuple[int, int, int, int, int]:
    """Return blocks, hidden size, heads, inner width and positions of a GPT-2 configuration, in its own words."""
    layers = fields.size("n_layer", "num_hidden_layers")
    hidden = fields.size("n_embd", "hidden_size")
    heads = fields.size("n_head", "num_attention_heads")
    fields.divides("n_head", heads, "n_embd", hidden)
    width = fields.size("n_inner", default=4 * hidden)
    positions = fields.size("n_positions", "max_position_embeddings")
    return layers, hidden, heads, width, positions


def _gpt(fields: Fields, prefix: str, *, activation: str, conv: bool) -> Skeleton:
    """Return GPT-2's tree; `conv`: with its own linear layers, without: nn.Linear, and one key-value head."""
    layers, hidden, heads, width, positions = _gpt_sizes(fields)
    kv_heads = heads if conv or not fields.flag("multi_query", True) else 1
    vocab, tied = fields.size("vocab_size"), fields.flag("tie_word_embeddings", True)
    if fields.flag("add_cross_attention", False):
        fields.refuse("add_cross_attention", "is not known by formula", value=True, fix="set it to false")
    fields.check()
    fused = hidden + 2 * kv_heads * (hidden // heads)
    make: Callable[[str, int, int], Part] = conv1d if conv else _biased
    part = module(
        "",
        f"{prefix}Block",
        _layer_norm("ln_1", hidden),
        module("attn", f"{prefix}Attention", make("c_attn", hidden, fused), make("c_proj", hidden, hidden)),
        _layer_norm("ln_2", hidden),
        module("mlp", f"{prefix}MLP", make("c_fc", hidden, width), make("c_proj", width, hidden)),
    )
    return Skeleton(
        kind=f"{prefix}LMHeadModel" if conv else f"{prefix}ForCausalLM",
        path=(("transformer", f"{prefix}Model"),),
        before=(embedding("wte", vocab, hidden), embedding("wpe", positions, hidden)),
        blocks_name="h",
        blocks=_blocks(fields, (layers, hidden, heads, kv_heads), ("activation_function", activation), width, part),
        after=(_layer_norm("ln_f", hidden),),
        head=linear("lm_head", hidden, vocab),
        tied=tied,
        hidden=hidden,
        vocab=vocab,
        max_positions=positions,
    )


def _biased(name: str, into: int, out: int) -> Part:
    return linear(name, into, out, True)


def gpt2(fields: Fields) -> Skeleton:
    """Return the tree of a GPT-2 configuration; raises BadInput."""
    return _gpt(fields, "GPT2", activation="gelu_new", conv=True)


def gpt_bigcode(fields: Fields) -> Skeleton:
    """Return the tree of a StarCoder configuration; raises BadInput."""
    return _gpt(fields, "GPTBigCode", activation="gelu_pytorch_tanh", conv=False)


def gpt_neox(fields: Fields) -> Skeleton:
    """Return the tree of a GPT-NeoX or Pythia configuration; raises BadInput."""
    layers, hidden = fields.size("num_hidden_layers"), fields.size("hidden_size")
    heads, width = fields.size("num_attention_heads"), fields.size("intermediate_size")
    fields.divides("num_attention_heads", heads, "hidden_size", hidden)
    bias, tied = fields.flag("attention_bias", True), fields.flag("tie_word_embeddings", False)
    vocab, positions = fields.size("vocab_size"), fields.size("max_position_embeddings", default=2048)
    fields.check()
    part = module(
        "",
        "GPTNeoXLayer",
        _layer_norm("input_layernorm", hidden),
        _layer_norm("post_attention_layernorm", hidden),
        module(
            "attention",
            "GPTNeoXAttention",
            linear("query_key_value", hidden, 3 * hidden, bias),
            linear("dense", hidden, hidden, bias),
        ),
        module(
            "mlp",
            "GPTNeoXMLP",
            _biased("dense_h_to_4h", hidden, width),
            _biased("dense_4h_to_h", width, hidden),
        ),
    )
    inside = {
        "attention.query_key_value": "colwise",
        "attention.dense": "rowwise",
        "mlp.dense_h_to_4h": "colwise",
        "mlp.dense_4h_to_h": "rowwise",
    }
    return Skeleton(
        kind="GPTNeoXForCausalLM",
        path=(("gpt_neox", "GPTNeoXModel"),),
        before=(embedding("embed_in", vocab, hidden),),
        blocks_name="layers",
        blocks=_blocks(fields, (layers, hidden, heads, heads), ("hidden_act", "gelu"), width, part),
        after=(_layer_norm("final_layer_norm", hidden),),
        head=linear("lm_head", hidden, vocab),
        tied=tied,
        hidden=hidden,
        vocab=vocab,
        max_positions=positions,
        tensor_rules=rules("gpt_neox.embed_in", "gpt_neox.layers", inside),
    )


def opt(fields: Fields) -> Skeleton:
    """Return the tree of an OPT configuration; raises BadInput."""
    layers, hidden = fields.size("num_hidden_layers"), fields.size("hidden_size")
    heads, width = fields.size("num_attention_heads"), fields.size("ffn_dim")
    fields.divides("num_attention_heads", heads, "hidden_size", hidden)
    vocab, positions = fields.size("vocab_size"), fields.size("max_position_embeddings", default=2048)
    inner, tied = fields.size("word_embed_proj_dim", default=hidden), fields.flag("tie_word_embeddings", True)
    bias, affine = fields.flag("enable_bias", True), fields.flag("layer_norm_elementwise_affine", True)
    last = fields.flag("do_layer_norm_before", True) and not fields.flag("_remove_final_layer_norm", False)
    fields.check()

    def normed(name: str) -> Part | None:
        return _layer_norm(name, hidden) if affine else None

    names = ("k_proj", "v_proj", "q_proj", "out_proj")
    part = module(
        "",
        "OPTDecoderLayer",
        module("self_attn", "OPTAttention", *(linear(name, hidden, hidden, bias) for name in names)),
        normed("self_attn_layer_norm"),
        linear("fc1", hidden, width, bias),
        linear("fc2", width, hidden, bias),
        normed("final_layer_norm"),
    )
    projections = (linear("project_out", hidden, inner), linear("project_in", inner, hidden))
    final = normed("final_layer_norm") if last else None
    return Skeleton(
        kind="OPTForCausalLM",
        path=(("model", "OPTModel"), ("decoder", "OPTDecoder")),
        before=(
            embedding("embed_tokens", vocab, inner),
            embedding("embed_positions", positions + 2, hidden, "OPTLearnedPositionalEmbedding"),
            *(projections if inner != hidden else ()),
            *((final,) if final is not None else ()),
        ),
        blocks_name="layers",
        blocks=_blocks(fields, (layers, hidden, heads, heads), ("activation_function", "relu"), width, part),
        after=(),
        head=linear("lm_head", inner, vocab),
        tied=tied,
        hidden=hidden,
        vocab=vocab,
        max_positions=positions,
    )


def bloom(fields: Fields) -> Skeleton:
    """Return the tree of a BLOOM configuration; raises BadInput."""
    layers = fields.size("n_layer", "num_hidden_layers")
    hidden, heads = fields.size("n_embed", "hidden_size"), fields.size("n_head", "num_attention_heads")
    fields.divides("n_head", heads, "hidden_size", hidden)
    vocab, tied = fields.size("vocab_size"), fields.flag("tie_word_embeddings", True)
    fields.check()
    part = module(
        "",
        "BloomBlock",
        _layer_norm("input_layernorm", hidden),
        module(
            "self_attention",
            "BloomAttention",
            _biased("query_key_value", hidden, 3 * hidden),
            _biased("dense", hidden, hidden),
        ),
        _layer_norm("post_attention_layernorm", hidden),
        module(
            "mlp",
            "BloomMLP",
            _biased("dense_h_to_4h", hidden, 4 * hidden),
            _biased("dense_4h_to_h", 4 * hidden, hidden),
        ),
    )
    return Skeleton(
        kind="BloomForCausalLM",
        path=(("transformer", "BloomModel"),),
        before=(embedding("word_embeddings", vocab, hidden), _layer_norm("word_embeddings_layernorm", hidden)),
        blocks_name="h",
        blocks=_blocks(fields, (layers, hidden, heads, heads), ("", "gelu"), 4 * hidden, part),
        after=(_layer_norm("ln_f", hidden),),
        head=linear("lm_head", hidden, vocab),
        tied=tied,
        hidden=hidden,
        vocab=vocab,
        max_positions=None,
    )
