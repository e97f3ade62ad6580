"""A model of given sizes: the class of transformers that comes nearest to them.

A name that means a catalogue entry of the same sizes brings that entry's class, with tied weights and positions as
given: it knows more than sizes say. Otherwise:

- swiglu: Llama; with biases of queries, keys and values Qwen2; with norms of queries and keys Qwen3; Mistral where the
  hidden size is not a multiple of the heads, which Llama's class refuses;
- geglu: Gemma;
- relu2: Nemotron;
- gelu with learned positions: GPT-2, or with one key-value head StarCoder's GPT-BigCode;
- gelu without: GPT-NeoX, or Phi where key-value heads are shared or heads do not fill the hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

from shardwise.catalogue.entries import catalogue_name, config_of_entry, spec_of_entry
from shardwise.catalogue.families.registry import spec_by_formula
from shardwise.spec.model_spec import ModelSpec
from shardwise.spec.problems import BadInput, Problem, did_you_mean

MlpName = Literal["swiglu", "geglu", "gelu", "relu2"]
"""`swiglu`, `geglu`: three matrices; `gelu`, `relu2`: two."""

MLPS: tuple[str, ...] = get_args(MlpName)

ROTARY_POSITIONS = 131072
"""`max_positions` of models whose positions take no memory, where it is not given."""


@dataclass(frozen=True, kw_only=True)
class Dimensions:
    """Sizes of a decoder."""

    layers: int
    """Blocks."""
    hidden: int
    """Elements of a hidden state."""
    heads: int
    """Query heads."""
    kv_heads: int
    """Key and value heads."""
    head_dim: int
    """Elements per head."""
    ffn: int
    """Inner width of the MLP."""
    vocab: int
    """Rows of the embedding."""
    tied: bool
    """The head's weight is the embedding's."""
    max_positions: int | None
    """Longest sequence."""


def model_from_dimensions(
    *,
    layers: int,
    hidden: int,
    heads: int,
    ffn: int,
    vocab: int,
    mlp: MlpName,
    tied: bool,
    kv_heads: int | None = None,
    head_dim: int | None = None,
    learned_positions: bool = False,
    max_positions: int | None = None,
    qkv_bias: bool = False,
    qk_norm: bool = False,
    name: str | None = None,
) -> ModelSpec:
    """Return the shape of a model of given sizes, built by a real class of transformers.

    Args:
        layers: Blocks.
        hidden: Elements of a hidden state.
        heads: Query heads.
        ffn: Inner width of the MLP.
        vocab: Rows of the embedding.
        mlp: Kind of the MLP.
        tied: The head's weight is the embedding's.
        kv_heads: Key and value heads; default: as many as query heads.
        head_dim: Elements per head; default: hidden / heads.
        learned_positions: A table of positions, `max_positions` x `hidden`.
        max_positions: Longest sequence; needed with learned positions.
        qkv_bias: Query, key and value projections have biases (swiglu).
        qk_norm: Queries and keys are normed per head (swiglu).
        name: What it is called; may mean a catalogue entry.

    Raises:
        BadInput: sizes that are not above 0 or do not fit each other, or that no class of transformers has.
    """
    _check_options(mlp, learned_positions, qkv_bias=qkv_bias, qk_norm=qk_norm)
    sizes = _fitting(
        Dimensions(
            layers=layers,
            hidden=hidden,
            heads=heads,
            kv_heads=heads if kv_heads is None else kv_heads,
            head_dim=hidden // max(heads, 1) if head_dim is None else head_dim,
            ffn=ffn,
            vocab=vocab,
            tied=tied,
            max_positions=max_positions,
        ),
        even=head_dim is None,
    )
    entry = None if name is None or qkv_bias or qk_norm else _same_entry(name, sizes, mlp, learned_positions)
    if entry is not None:
        positions = {"n_positions": max_positions} if learned_positions and max_positions else {}
        config = {**config_of_entry(entry), "tie_word_embeddings": tied, **positions}
        return spec_by_formula(config, name=name or entry, note=spec_of_entry(entry).note)
    config = _with_table(sizes) if learned_positions else _rotary(sizes, mlp, qkv_bias=qkv_bias, qk_norm=qk_norm)
    return spec_by_formula(config, name=name or f"{layers} blocks of {hidden}")


def _check_options(mlp: str, learned_positions: bool, *, qkv_bias: bool, qk_norm: bool) -> None:
    """Refuse options that no class of transformers has together."""
    if mlp not in MLPS:
        fix = did_you_mean(mlp, MLPS)
        raise BadInput(Problem(field="mlp", value=mlp, reason="is unknown", allowed=", ".join(MLPS), fix=fix))
    if learned_positions and mlp != "gelu":
        reason = f"no class of transformers has it with mlp {mlp}"
        raise BadInput(Problem(field="learned_positions", value=True, reason=reason, allowed="mlp gelu"))
    for field, given in (("qkv_bias", qkv_bias), ("qk_norm", qk_norm)):
        if given and mlp != "swiglu":
            reason = f"can be chosen with mlp swiglu only, not {mlp}"
            raise BadInput(Problem(field=field, value=True, reason=reason, fix="remove it"))


def _rotary(sizes: Dimensions, mlp: MlpName, *, qkv_bias: bool, qk_norm: bool) -> dict[str, Any]:
    """Return the configuration of a model with rotary positions."""
    fills = sizes.heads * sizes.head_dim == sizes.hidden
    model_type = {"geglu": "gemma", "relu2": "nemotron", "gelu": "phi", "swiglu": "llama"}[mlp]
    if mlp == "gelu" and fills and sizes.kv_heads == sizes.heads:
        model_type = "gpt_neox"
    elif qk_norm:
        model_type = "qwen3"
    elif qkv_bias:
        model_type = "qwen2"
    elif mlp == "swiglu" and sizes.hidden % sizes.heads:
        model_type = "mistral"
    config: dict[str, Any] = {
        "model_type": model_type,
        "hidden_size": sizes.hidden,
        "num_hidden_layers": sizes.layers,
        "num_attention_heads": sizes.heads,
        "intermediate_size": sizes.ffn,
        "vocab_size": sizes.vocab,
        "max_position_embeddings": sizes.max_positions or ROTARY_POSITIONS,
        "tie_word_embeddings": sizes.tied,
    }
    if model_type == "gpt_neox":
        return config
    config |= {"num_key_value_heads": sizes.kv_heads, "head_dim": sizes.head_dim}
    if qk_norm:
        config["attention_bias"] = qkv_bias
    if model_type == "mistral":
        config["sliding_window"] = None
    return config


def _with_table(sizes: Dimensions) -> dict[str, Any]:
    """Return the configuration of a model with learned positions."""
    problems = []
    if sizes.max_positions is None:
        problems.append(Problem(field="max_positions", reason="is missing: it is the size of the table of positions"))
    if sizes.heads * sizes.head_dim != sizes.hidden:
        reason = f"heads x head_dim has to be hidden ({sizes.hidden}) in a model with learned positions"
        problems.append(Problem(field="head_dim", value=sizes.head_dim, reason=reason))
    if sizes.kv_heads not in (1, sizes.heads):
        reason = "no class of transformers with learned positions has it"
        problems.append(Problem(field="kv_heads", value=sizes.kv_heads, reason=reason, allowed=f"1, {sizes.heads}"))
    if problems:
        raise BadInput(problems)
    return {
        "model_type": "gpt2" if sizes.kv_heads == sizes.heads else "gpt_bigcode",
        "n_embd": sizes.hidden,
        "n_layer": sizes.layers,
        "n_head": sizes.heads,
        "n_inner": sizes.ffn,
        "n_positions": sizes.max_positions,
        "vocab_size": sizes.vocab,
        "tie_word_embeddings": sizes.tied,
    }


def _same_entry(name: str, sizes: Dimensions, mlp: MlpName, learned_positions: bool) -> str | None:
    """Return the catalogue entry that `name` means, when its sizes are these."""
    entry = catalogue_name(name)
    if entry is None:
        return None
    spec = spec_of_entry(entry)
    kind = spec.kinds[0]
    theirs = (
        spec.layers,
        spec.hidden,
        kind.attention.heads,
        kind.attention.kv_heads,
        kind.attention.head_dim,
        kind.mlp.width,
        spec.vocab,
        kind.mlp.gated,
        any(module.kind == "Embedding" and module.name != spec.embedding for module in spec.modules),
    )
    ours = (
        sizes.layers,
        sizes.hidden,
        sizes.heads,
        sizes.kv_heads,
        sizes.head_dim,
        sizes.ffn,
        sizes.vocab,
        mlp in ("swiglu", "geglu"),
        learned_positions,
    )
    return entry if theirs == ours and not kind.mlp.experts else None


def _fitting(sizes: Dimensions, *, even: bool) -> Dimensions:
    """Return the sizes; refuse those that are not above 0 or do not fit each other.

    `even`: the hidden size has to be a multiple of the heads.
    """
    given = {name: value for name, value in vars(sizes).items() if name != "tied" and value is not None}
    if even:
        del given["head_dim"]
    wrong = [
        Problem(field=name, value=value, reason="has to be a whole number above 0")
        for name, value in given.items()
        if isinstance(value, bool) or not isinstance(value, int) or value <= 0
    ]
    if wrong:
        raise BadInput(wrong)
    pairs = [("kv_heads", sizes.kv_heads, "heads", sizes.heads)]
    if even:
        pairs.append(("heads", sizes.heads, "hidden", sizes.hidden))
    for part, part_value, whole, whole_value in pairs:
        if whole_value % part_value:
            raise BadInput(Problem(field=whole, value=whole_value, reason=f"is not a multiple of {part} {part_value}"))
    return sizes
