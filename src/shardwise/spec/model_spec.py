"""The ModelSpec: a model's shape, from which everything about its size and work follows. Needs no torch."""

from __future__ import annotations

import math
from typing import Any, Literal

from pydantic import Field

from shardwise.spec.strict import NotNegative, PositiveInt, Strict

Activation = Literal["silu", "gelu", "relu", "relu2"]


class Tensor(Strict):
    """One parameter."""

    name: str
    """Dotted name, within its block or (outside blocks) within the model, such as `self_attn.q_proj.weight`."""
    shape: tuple[PositiveInt, ...]
    """Its shape, as transformers makes it."""
    fp32: bool = False
    """Its class makes it in fp32, in whatever dtype the model is built: frozen, it is stored so."""

    @property
    def elements(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


class Module(Strict):
    """One module that holds parameters, itself or in modules within."""

    name: str
    """Dotted name, within its block (the block itself: empty) or, outside blocks, within the model (likewise)."""
    kind: str
    """Its class, such as `Linear`, `LlamaRMSNorm` or `LlamaAttention`."""


class Attention(Strict):
    """The attention of a block."""

    kind: Literal["grouped", "latent"] = "grouped"
    """`grouped`: queries share key and value heads (as many as query heads: plain multi-head attention); `latent`:
    DeepSeek's, through low-rank projections."""
    heads: PositiveInt
    """Query heads."""
    kv_heads: PositiveInt
    """Key and value heads."""
    head_dim: PositiveInt
    """Elements of a query and a key per head."""
    value_dim: PositiveInt
    """Elements of a value per head."""
    window: PositiveInt | None = None
    """Tokens that a token looks back on; None: all."""


class Mlp(Strict):
    """The feed-forward part of a block."""

    gated: bool
    """Three matrices (`down(act(gate) * up)`), else two."""
    activation: Activation
    """Activation function."""
    width: PositiveInt
    """Inner width; of a mixture, of one expert."""
    experts: NotNegative = 0
    """Routed experts; 0: dense."""
    active: NotNegative = 0
    """Experts that each token goes through, shared ones not counted."""
    shared_width: NotNegative = 0
    """Inner width of all shared experts together."""


class BlockKind(Strict):
    """Blocks that are alike in everything."""

    name: str
    """What sets it apart, such as `block`, `sliding window`, `dense`, `mixture of experts`."""
    attention: Attention
    """Its attention."""
    mlp: Mlp
    """Its feed-forward part."""
    tensors: tuple[Tensor, ...]
    """Its parameters, in the order of `named_parameters()`."""
    modules: tuple[Module, ...] = ()
    """Its modules with parameters, in the order of `named_modules()`: the block itself first."""

    @property
    def parameters(self) -> int:
        """Elements of all its parameters."""
        return sum(tensor.elements for tensor in self.tensors)


class ModelSpec(Strict):
    """The shape of a causal language model of transformers."""

    name: str
    """Name in the catalogue, hub id, folder, or what its dimensions are."""
    model_type: str
    """transformers' `model_type`, such as `llama`."""
    config: dict[str, Any]
    """Fields of transformers' configuration, `model_type` among them: enough to build the real model."""
    hidden: PositiveInt
    """Elements of a hidden state."""
    vocab: PositiveInt
    """Rows of the embedding."""
    max_positions: PositiveInt | None
    """Longest sequence that it has positions for; None: no limit known."""
    kinds: tuple[BlockKind, ...]
    """Kinds of blocks, in the order of their first block."""
    blocks: tuple[NotNegative, ...]
    """Kind of each block, as a place in `kinds`."""
    block_list: str
    """Dotted name of the list of blocks, such as `model.layers`."""
    embedding: str
    """Dotted name of the module that embeds tokens, such as `model.embed_tokens`."""
    head: str
    """Dotted name of the output projection, such as `lm_head`."""
    tied: bool
    """The head's weight is the embedding's."""
    outside: tuple[Tensor, ...]
    """Parameters outside blocks, in the order of `named_parameters()`, a tied one once (the embedding's name)."""
    modules: tuple[Module, ...] = ()
    """Modules with parameters that lie in no block, in the order of `named_modules()`: the model itself first, the list
    of blocks among them, a tied head too."""
    tensor_rules: dict[str, str] = Field(default_factory=dict)
    """How transformers' own plan splits modules over a tensor axis: name, `*` for the number of a block -> its word
    (`colwise`, `rowwise`, ...); empty where it has none."""
    note: str = ""
    """What a reader has to know, such as that another class stands in for a model of remote code."""

    @property
    def layers(self) -> int:
        """Number of blocks."""
        return len(self.blocks)

    @property
    def parameters(self) -> int:
        """Elements of all parameters; tied ones count once."""
        per_kind = [kind.parameters for kind in self.kinds]
        return sum(per_kind[kind] for kind in self.blocks) + sum(tensor.elements for tensor in self.outside)

    @property
    def active_parameters(self) -> int:
        """Elements of the parameters that one token goes through: of routed experts only the active ones."""
        total = self.parameters
        for place in self.blocks:
            kind = self.kinds[place]
            if kind.mlp.experts:
                per_expert = (3 if kind.mlp.gated else 2) * self.hidden * kind.mlp.width
                total -= (kind.mlp.experts - kind.mlp.active) * per_expert
        return total
