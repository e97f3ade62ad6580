"""Which program stands for which model of transformers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from shardwise.predict.blocks import alibi, falcon, gemma, gpt_like, llama_like, mixture, ops, phi3
from shardwise.predict.blocks.norms import Norm
from shardwise.predict.blocks.scene import Scene
from shardwise.predict.blocks.tape import Tensor
from shardwise.predict.blocks.walk import Program
from shardwise.spec.model_spec import ModelSpec
from shardwise.spec.problems import BadInput, Problem, did_you_mean


def unchanged(_: Scene, logits: Tensor) -> Tensor:
    """Return the head's output as it is."""
    return logits


@dataclass(frozen=True, kw_only=True)
class Family:
    """Models whose code is alike."""

    block: Program
    """A block's forward."""
    norm: Norm = "rms"
    """Kind of its norms."""
    activation: tuple[str, str] = ("hidden_act", "silu")
    """Field of the activation function, and its default."""
    last_norm: str = "model.norm"
    """Its name."""
    logits: Callable[[Scene, Tensor], Tensor] = unchanged
    """What the causal LM does to the head's output."""
    embedding: Literal["plain", "scaled"] = "plain"
    """Rows of a table, as they are or multiplied by a number."""
    first_norm: str = ""
    """Norm behind the embedding; the decoder's variables hold what it is given through all blocks."""
    positions: str = ""
    """Table of positions whose rows are added to them; the decoder's variables hold both through all blocks."""
    drops: tuple[str, float] = ("", 0.0)
    """Field of the rate of dropout behind the embedding, and its default."""
    positions_per_row: bool = False
    """Each row of a batch looks up its own positions."""
    cap: float | None = None
    """Soft cap of scores and logits where the configuration does not say."""
    masks: int = 1
    """Masks that eager attention is given: whole, and of a window."""
    fills_masks: bool = False
    """Blocks fill scores where a boolean mask says so, and backward does again."""
    always_masked: bool = False
    """Fused attention is given a mask even where it would need none."""
    returns_weights: bool = False
    """Blocks return the weights of attention; a variable holds them while the next block works."""
    biases: Literal["", "rows", "heads"] = ""
    """Biases of positions that blocks are given: for each head of each row, in the dtype of the computation; for each
    head, in fp32."""
    idle_masks: int = 0
    """Masks for fused attention that no block uses."""
    tables: int = 1
    """Pairs of rotary tables that blocks are given; 0: none."""
    tables_in_fp32: bool = False
    """They are in fp32 whatever the computation is in."""
    turns: float = 1.0
    """Share of each head that they turn, where the configuration does not say."""
    transposed: bool = False
    """Weights of linear layers are [inputs, outputs]."""


def divided(scene: Scene, logits: Tensor) -> Tensor:
    """Return logits divided by a number."""
    return ops.scale(scene.tape, logits)


LLAMA = Family(block=llama_like.block)
_GELU = ("hidden_activation", "gelu_pytorch_tanh")

_MIXTURE = Family(block=mixture.block)

FAMILIES: dict[str, Family] = {
    "llama": LLAMA,
    "mistral": LLAMA,
    "qwen2": LLAMA,
    "qwen3": LLAMA,
    "smollm3": LLAMA,
    "granite": Family(block=llama_like.scaled_block, embedding="scaled", logits=divided),
    "olmo2": Family(block=llama_like.normed_after, norm="rms_after", tables_in_fp32=True),
    "starcoder2": Family(block=llama_like.dropping, norm="layer", activation=("hidden_act", "gelu_pytorch_tanh")),
    "nemotron": Family(
        block=llama_like.partly_turned, norm="layer_plus_one", activation=("hidden_act", "relu2"), turns=0.5
    ),
    "phi": Family(
        block=llama_like.parallel,
        norm="layer",
        last_norm="model.final_layernorm",
        activation=("hidden_act", "gelu_new"),
        turns=0.5,
    ),
    "phi3": Family(block=phi3.block),
    "gemma": Family(
        block=llama_like.block, norm="gemma", activation=("hidden_act", "gelu_pytorch_tanh"), embedding="scaled"
    ),
    "gemma2": Family(
        block=gemma.block, norm="gemma", activation=_GELU, embedding="scaled", logits=gemma.capped, cap=30.0, masks=2
    ),
    "gemma3_text": Family(
        block=gemma.block, norm="gemma", activation=_GELU, embedding="scaled", logits=gemma.capped, tables=2, masks=2
    ),
    "mixtral": _MIXTURE,
    "qwen3_moe": _MIXTURE,
    "olmoe": _MIXTURE,
    "qwen2_moe": Family(block=mixture.shared_block, idle_masks=1, masks=2),
    "deepseek_v3": Family(block=mixture.deepseek),
    "deepseek_v2": Family(block=mixture.deepseek_v2, tables_in_fp32=True),
    "gpt2": Family(
        block=gpt_like.gpt2,
        norm="layer",
        last_norm="transformer.ln_f",
        activation=("activation_function", "gelu_new"),
        positions="transformer.wpe.weight",
        drops=("embd_pdrop", 0.1),
        tables=0,
        transposed=True,
    ),
    "gpt_bigcode": Family(
        block=gpt_like.gpt2,
        norm="layer",
        last_norm="transformer.ln_f",
        activation=("activation_function", "gelu_pytorch_tanh"),
        positions="transformer.wpe.weight",
        drops=("embd_pdrop", 0.1),
        tables=0,
    ),
    "bloom": Family(
        block=alibi.bloom,
        biases="rows",
        norm="layer",
        last_norm="transformer.ln_f",
        first_norm="transformer.word_embeddings_layernorm",
        tables=0,
        returns_weights=True,
    ),
    "mpt": Family(
        block=alibi.mpt,
        biases="heads",
        norm="layer",
        last_norm="transformer.norm_f",
        activation=("", "gelu"),
        tables=0,
        fills_masks=True,
        returns_weights=True,
    ),
    "falcon": Family(
        block=falcon.block,
        norm="layer",
        last_norm="transformer.ln_f",
        activation=("activation", "gelu"),
        returns_weights=True,
        always_masked=True,
    ),
    "gpt_neox": Family(
        block=gpt_like.neox,
        norm="layer",
        last_norm="gpt_neox.final_layer_norm",
        activation=("hidden_act", "gelu"),
        turns=0.25,
        drops=("hidden_dropout", 0.0),
    ),
    "opt": Family(
        block=gpt_like.opt,
        norm="layer",
        last_norm="model.decoder.final_layer_norm",
        activation=("activation_function", "relu"),
        positions="model.decoder.embed_positions.weight",
        positions_per_row=True,
        drops=("dropout", 0.1),
        tables=0,
    ),
}
"""transformers' `model_type` -> its program."""


def family_of(model: ModelSpec) -> Family:
    """Return the programs of a model.

    Raises:
        BadInput: a `model_type` without a program.
    """
    found = FAMILIES.get(model.model_type)
    if found is None:
        near = did_you_mean(model.model_type, FAMILIES)
        raise BadInput(
            Problem(
                field=f"{model.name}: model_type",
                value=model.model_type,
                reason="has no formula for what its blocks compute",
                allowed=", ".join(sorted(FAMILIES)),
                fix=f"{near} --by trace works for every causal LM of transformers: it builds the real model".strip(),
            )
        )
    return found
