"""What a walk depends on: everything that changes what one block keeps and computes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from shardwise.predict.blocks.norms import Norm
from shardwise.spec.model_spec import BlockKind
from shardwise.spec.runtime import Runtime

Device = Literal["cuda", "cpu"]
Mode = Literal["none", "full", "selective", "every_second_matmul"]
"""What one block does in backward: nothing again; all of its forward; all but attention and matrix products with an
inner dimension above 256; all but attention and every second matrix product (torchtitan's)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """One plan as the computation of one rank sees it. Sizes are those of the rank's own part."""

    rows: int
    """Rows of the micro-batch."""
    length: int
    """Tokens of each row."""
    item: int
    """Bytes of an element of gathered weights and activations."""
    device: Device
    """What it runs on: CUDA's kernels and a CPU's keep different things."""
    generation: str
    """Generation of the card, as far as kernels depend on it (`predict.workspace`)."""
    attention: Literal["sdpa", "eager", "flash_attention_2"]
    """Attention implementation."""
    padded: bool
    """Attention gets a mask of rows x length x length."""
    tensor: int
    """Ranks that share the matrix products."""
    sequence_parallel: bool
    """Between attention and MLP each of them has a part of the sequence."""
    fused_norms: bool
    """Norms are one kernel."""
    compiled: bool
    """Pointwise chains are one kernel."""
    training: bool = True
    """Dropout drops."""
    adds_gradients: bool = False
    """Gradients of weights are there from micro-batches before, and those that arrive are added to them."""
    program: Runtime = field(default_factory=Runtime)
    """The program, as far as it computes otherwise than shardwise."""

    def stream(self, norm: Norm) -> int:
        """Bytes of an element of hidden states between blocks.

        Layer norms under autocast give fp32, and quantised linear layers hand that on.
        """
        wide = norm in ("layer", "layer_plus_one") and self.program.autocast
        return 4 if wide and self.program.base_quantization is not None else self.item

    @property
    def tokens(self) -> int:
        """Tokens of the micro-batch."""
        return self.rows * self.length

    @property
    def padded_length(self) -> int:
        """Tokens of each row inside blocks: a multiple of the ranks that share the sequence."""
        return -(-self.length // self.tensor) * self.tensor if self.sequence_parallel else self.length

    @property
    def own_tokens(self) -> int:
        """Tokens of the micro-batch between the parts of a block, on one rank."""
        return self.rows * self.padded_length // (self.tensor if self.sequence_parallel else 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class Site:
    """A linear layer of a block, whole."""

    inputs: int
    """Elements that it takes per token."""
    outputs: int
    """Elements that it gives per token."""
    bias: bool
    """It adds a bias."""
    rank: int
    """Rank of its adapter; 0: it has none."""
    word: str | None = None
    """How the tensor axis splits it (transformers' word); None: it is whole on every rank."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Layers:
    """The parameters of a kind of block, read once from its list of tensors."""

    kind: BlockKind
    """The kind."""
    hidden: int
    """Elements of a hidden state."""
    sites: dict[str, Site]
    """Linear layers by name."""
    sizes: dict[str, int]
    """Elements of every parameter by name."""
    trained: set[str]
    """Names of those that train."""
    dropout: float
    """Dropout in front of every adapter."""
    norm: Norm
    """Kind of its norms."""
    activation: str
    """transformers' word for its activation function."""
    masked: bool
    """Fused attention is always given a mask."""
    cap: float | None
    """Soft cap of scores and logits where the configuration does not say."""
    config: dict[str, object]
    """The model's configuration."""
