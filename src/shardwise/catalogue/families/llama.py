"""Llama and the dense families built like it: norms around an attention with q, k and v projections and an MLP."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from shardwise.catalogue.families.attention import Heads, attention_part, read_heads, windows
from shardwise.catalogue.families.fields import Fields
from shardwise.catalogue.families.rules import GATED_MLP, HEAD_NORMS, SPLIT_ATTENTION, WHOLE_ATTENTION, rules
from shardwise.catalogue.families.tree import Block, Part, Skeleton, embedding, linear, module, norm
from shardwise.spec.model_spec import Mlp

Windows = Callable[[Fields, int], tuple[int | None, ...]]
"""The window of each block, of a configuration and its number of blocks."""


def _none(_: Fields, layers: int) -> tuple[int | None, ...]:
    return (None,) * layers


def _same_everywhere(default: int | None) -> Windows:
    """Every block has `sliding_window`; `default` where it is absent."""

    def found(fields: Fields, layers: int) -> tuple[int | None, ...]:
        return (fields.optional_size("sliding_window", default),) * layers

    return found


def _upper_blocks(fields: Fields, layers: int) -> tuple[int | None, ...]:
    """Qwen: with `use_sliding_window`, blocks from `max_window_layers` on have a window."""
    if not fields.flag("use_sliding_window", False):
        return windows(fields, layers, window=None)
    window, first = fields.optional_size("sliding_window", 4096), fields.count("max_window_layers", 28)
    upper = tuple("sliding_attention" if index >= first else "full_attention" for index in range(layers))
    return windows(fields, layers, window=window, default=upper)


def _without_positions(fields: Fields, layers: int) -> tuple[int | None, ...]:
    """SmolLM3: with `use_sliding_window`, blocks without rotary positions have a window."""
    window = fields.optional_size("sliding_window") if fields.flag("use_sliding_window", False) else None
    every = fields.size("no_rope_layer_interval", default=4)
    rotary = fields.numbers("no_rope_layers") or tuple(int((index + 1) % every != 0) for index in range(layers))
    if len(rotary) != layers:
        fields.refuse("no_rope_layers", f"has {len(rotary)} entries, but the model has {layers} blocks")
    fields.check()
    return windows(
        fields,
        layers,
        window=window,
        default=tuple("full_attention" if has or window is None else "sliding_attention" for has in rotary),
    )


def alternating(every: int, default: int) -> Windows:
    """Gemma: every `every`-th block sees everything, the others have a window."""

    def found(fields: Fields, layers: int) -> tuple[int | None, ...]:
        step = fields.size("sliding_window_pattern", "_sliding_window_pattern", default=every)
        types = tuple("full_attention" if (index + 1) % step == 0 else "sliding_attention" for index in range(layers))
        return windows(fields, layers, window=fields.optional_size("sliding_window", default), default=types)

    return found


BEFORE_AND_AFTER = ("input_layernorm", "post_attention_layernorm")


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What sets one family apart. Biases are always there, never, or by the flag of that name."""

    prefix: str
    """What its classes begin with."""
    model: str = "{}ForCausalLM"
    """Class of the causal LM; `{}` stands for the prefix."""
    decoder: str = "{}Model"
    """Class of the decoder."""
    embedding: str = "Embedding"
    """Class of the embedding."""
    norm: str = "{}RMSNorm"
    """Class of the norms; empty: norms without parameters."""
    norm_bias: bool = False
    """Norms have a bias."""
    norms: tuple[str, ...] = BEFORE_AND_AFTER
    """Norms of a block, in order."""
    last_norm: str = "norm"
    """Norm after the blocks."""
    kv_default: int | None = None
    """`num_key_value_heads` where it is absent; None: as many as query heads."""
    kv_required: bool = False
    """`num_key_value_heads` has to be given."""
    head_dim_default: int | None = None
    """`head_dim` where it is absent; None: hidden size / heads."""
    even: bool = False
    """The hidden size has to be a multiple of the heads."""
    qkv_bias: bool | str = False
    """Biases of query, key and value projections."""
    out_bias: bool | str = False
    """Bias of the attention's output projection."""
    out_name: str = "o_proj"
    """Name of that projection."""
    qk_norm: Literal["", "head", "all"] = ""
    """Norms of queries and keys."""
    mlp: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj")
    """Linear layers of the MLP, the last leading back; three: gated."""
    mlp_bias: bool | str = False
    """Their biases."""
    bias_default: bool = False
    """Flags of biases where they are absent."""
    activation: tuple[str, str] = ("hidden_act", "silu")
    """Field of the activation function, and its default."""
    tied: bool = False
    """`tie_word_embeddings` where it is absent."""
    positions: int = 2048
    """`max_position_embeddings` where it is absent."""
    head_bias: bool = False
    """The head has a bias."""
    windows: Windows = _none
    """Windows of its blocks."""
    rules: Mapping[str, str] = field(default_factory=lambda: {**SPLIT_ATTENTION, **GATED_MLP})
    """transformers' tensor-parallel plan inside a block."""


_NORMED = {**SPLIT_ATTENTION, **HEAD_NORMS, **GATED_MLP}
_GEMMA_NORMS = (*BEFORE_AND_AFTER, "pre_feedforward_layernorm", "post_feedforward_layernorm")
_OLMO_NORMS = ("post_attention_layernorm", "post_feedforward_layernorm")
_GELU = ("hidden_activation", "gelu_pytorch_tanh")

RECIPES: dict[str, Recipe] = {
    "llama": Recipe(
        prefix="Llama", even=True, mlp_bias="mlp_bias", qkv_bias="attention_bias", out_bias="attention_bias"
    ),
    "mistral": Recipe(prefix="Mistral", kv_default=8, positions=131072, windows=_same_everywhere(4096)),
    "qwen2": Recipe(prefix="Qwen2", kv_default=32, qkv_bias=True, positions=32768, windows=_upper_blocks),
    "qwen3": Recipe(
        prefix="Qwen3",
        kv_default=32,
        head_dim_default=128,
        qkv_bias="attention_bias",
        out_bias="attention_bias",
        qk_norm="head",
        positions=32768,
        windows=_upper_blocks,
        rules=_NORMED,
    ),
    "smollm3": Recipe(
        prefix="SmolLM3",
        kv_default=4,
        qkv_bias="attention_bias",
        out_bias="attention_bias",
        mlp_bias="mlp_bias",
        tied=True,
        positions=32768,
        windows=_without_positions,
    ),
    "granite": Recipe(prefix="Granite", qkv_bias="attention_bias", out_bias="attention_bias", mlp_bias="mlp_bias"),
    "olmo2": Recipe(
        prefix="Olmo2",
        qkv_bias="attention_bias",
        out_bias="attention_bias",
        qk_norm="all",
        norms=_OLMO_NORMS,
        rules={**WHOLE_ATTENTION, **GATED_MLP},
    ),
    "starcoder2": Recipe(
        prefix="Starcoder2",
        norm="LayerNorm",
        norm_bias=True,
        kv_default=2,
        qkv_bias="use_bias",
        out_bias="use_bias",
        mlp=("c_fc", "c_proj"),
        mlp_bias="use_bias",
        bias_default=True,
        activation=("hidden_act", "gelu_pytorch_tanh"),
        tied=True,
        positions=4096,
        windows=_same_everywhere(None),
        rules={**SPLIT_ATTENTION, "mlp.c_fc": "colwise", "mlp.c_proj": "rowwise"},
    ),
    "nemotron": Recipe(
        prefix="Nemotron",
        norm="{}LayerNorm1P",
        norm_bias=True,
        kv_required=True,
        qkv_bias="attention_bias",
        out_bias="attention_bias",
        mlp=("up_proj", "down_proj"),
        mlp_bias="mlp_bias",
        activation=("hidden_act", "relu2"),
        positions=4096,
        rules={**SPLIT_ATTENTION, "mlp.up_proj": "colwise", "mlp.down_proj": "rowwise"},
    ),
    "phi": Recipe(
        prefix="Phi",
        norm="LayerNorm",
        norm_bias=True,
        norms=("input_layernorm",),
        last_norm="final_layernorm",
        qkv_bias=True,
        out_bias=True,
        out_name="dense",
        mlp=("fc1", "fc2"),
        mlp_bias=True,
        activation=("hidden_act", "gelu_new"),
        head_bias=True,
        rules={
            **{name: word for name, word in SPLIT_ATTENTION.items() if word == "colwise"},
            "self_attn.dense": "rowwise",
            "mlp.fc1": "colwise",
            "mlp.fc2": "rowwise",
        },
    ),
    "gemma": Recipe(
        prefix="Gemma",
        embedding="GemmaTextScaledWordEmbedding",
        kv_default=16,
        head_dim_default=256,
        qkv_bias="attention_bias",
        out_bias="attention_bias",
        activation=("hidden_act", "gelu_pytorch_tanh"),
        tied=True,
        positions=8192,
    ),
    "gemma2": Recipe(
        prefix="Gemma2",
        embedding="Gemma2TextScaledWordEmbedding",
        norms=_GEMMA_NORMS,
        kv_default=4,
        head_dim_default=256,
        even=True,
        qkv_bias="attention_bias",
        out_bias="attention_bias",
        activation=_GELU,
        tied=True,
        positions=8192,
        windows=alternating(2, 4096),
    ),
    "gemma3_text": Recipe(
        prefix="Gemma3",
        decoder="{}TextModel",
        embedding="Gemma3TextScaledWordEmbedding",
        norms=_GEMMA_NORMS,
        kv_default=4,
        head_dim_default=256,
        even=True,
        qkv_bias="attention_bias",
        out_bias="attention_bias",
        qk_norm="head",
        activation=_GELU,
        tied=True,
        positions=131072,
        windows=alternating(6, 4096),
        rules=_NORMED,
    ),
}
"""Families by transformers' `model_type`; `phi3` and the mixtures are made elsewhere."""


def mlp_part(recipe: Recipe, hidden: int, width: int, bias: bool) -> Part:
    """Return the modules of a dense MLP."""
    *ups, down = recipe.mlp
    return module(
        "mlp",
        f"{recipe.prefix}MLP",
        *(linear(up, hidden, width, bias) for up in ups),
        linear(down, width, hidden, bias),
    )


def build(fields: Fields, recipe: Recipe) -> Skeleton:
    """Return the tree of a family in RECIPES.

    Raises:
        BadInput: fields that are missing or wrong.
    """
    layers, width = fields.size("num_hidden_layers"), fields.size("intermediate_size")
    qkv_bias, out_bias, mlp_bias = (
        fields.flag(given, recipe.bias_default) if isinstance(given, str) else given
        for given in (recipe.qkv_bias, recipe.out_bias, recipe.mlp_bias)
    )
    field_name, default = recipe.activation
    mlp = Mlp(
        gated=len(recipe.mlp) == 3,
        activation=fields.activation(field_name, default=default),
        width=width,
    )
    sizes = read_heads(
        fields,
        kv_default=recipe.kv_default,
        kv_required=recipe.kv_required,
        head_dim_default=recipe.head_dim_default,
        even=recipe.even,
    )
    attention = attention_part(
        sizes,
        recipe.prefix,
        qkv_bias=qkv_bias,
        out_bias=out_bias,
        out_name=recipe.out_name,
        qk_norm=recipe.qk_norm,
    )
    part = module(
        "",
        f"{recipe.prefix}DecoderLayer",
        attention,
        mlp_part(recipe, sizes.hidden, width, mlp_bias),
        *(_norm(recipe, name, sizes.hidden) for name in recipe.norms),
    )
    found = recipe.windows(fields, layers)
    by_window = {window: Block(attention=sizes.attention(window), mlp=mlp, part=part) for window in found}
    return finish(fields, recipe, sizes, tuple(by_window[window] for window in found))


def _norm(recipe: Recipe, name: str, hidden: int) -> Part:
    return norm(name, hidden, recipe.norm.format(recipe.prefix), recipe.norm_bias)


def finish(fields: Fields, recipe: Recipe, sizes: Heads, blocks: tuple[Block, ...]) -> Skeleton:
    """Return the tree around the blocks of a family."""
    vocab = fields.size("vocab_size")
    positions = fields.size("max_position_embeddings", default=recipe.positions)
    tied = fields.flag("tie_word_embeddings", recipe.tied)
    fields.check()
    return Skeleton(
        kind=recipe.model.format(recipe.prefix),
        path=(("model", recipe.decoder.format(recipe.prefix)),),
        before=(embedding("embed_tokens", vocab, sizes.hidden, recipe.embedding),),
        blocks_name="layers",
        blocks=blocks,
        after=(_norm(recipe, recipe.last_norm, sizes.hidden),),
        head=linear("lm_head", sizes.hidden, vocab, recipe.head_bias),
        tied=tied,
        hidden=sizes.hidden,
        vocab=vocab,
        max_positions=positions,
        tensor_rules=rules("model.embed_tokens", "model.layers", recipe.rules),
    )
