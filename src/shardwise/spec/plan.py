"""The Plan: every sharding decision, frozen and printable. No decision lives anywhere else."""

from __future__ import annotations

import hashlib
import json
from typing import Annotated, Literal

from pydantic import Field

from shardwise.spec.layout import (
    AccumulationMode,
    LossHead,
    Mesh,
    Offload,
    OptimizerImplementation,
    OptimizerKind,
    Prefetch,
    ReduceScatter,
    StrategyName,
    Units,
)
from shardwise.spec.strict import Dtype, Strict

__all__ = ["Dtypes", "Mesh", "Offload", "Plan", "Prefetch", "ReduceScatter", "Units"]


class Dtypes(Strict):
    """Dtype of each role."""

    frozen_storage: Dtype | Literal["checkpoint"] | None
    """Stored shards of frozen weights; `checkpoint`: as stored in a model that is not here; None: nothing is frozen."""
    trained_storage: Literal["fp32", "bf16"] = "fp32"
    """Stored shards of trained weights and their gradients."""
    optimizer_state: Literal["fp32", "bf16"] = "fp32"
    """Optimizer states between steps (of an 8-bit optimizer: those it keeps whole)."""
    param: Dtype
    """Gathered weights and computation."""
    reduce: Dtype
    """Gradient reduction."""
    output: Dtype
    """Logits."""
    buffer: Dtype | None
    """Floating-point buffers other than rotary tables; None: as loaded."""
    loss_scaling: bool
    """Dynamic loss scaling, on exactly when the computation is in fp16."""


class Plan(Strict):
    """How one training step is laid out over the ranks."""

    strategy: StrategyName
    """PyTorch's name."""
    mesh: Mesh
    """Ranks along each axis."""
    reshard_after_forward: bool | Annotated[int, Field(ge=2)]
    """Gathered weights of a unit are freed after forward and gathered again in backward; a number: kept sharded over
    groups of that many ranks instead. The root unit stays gathered in between, as its backward comes first."""
    units: Units = Units()
    """Which modules are gathered and reduced together."""
    prefetch: Prefetch
    """How far ahead weights are gathered."""
    reduce_scatter: ReduceScatter
    """How gradients are reduced."""
    dtypes: Dtypes
    """Dtype by role."""
    activation_checkpointing: str
    """`none`, `full`, `selective` or `every_<k>`."""
    offload: Offload = Offload()
    """What lives in host memory while it is not used."""
    attention: Literal["sdpa", "eager", "flash_attention_2"]
    """Attention implementation of the model."""
    micro_batch: int = Field(ge=1)
    """Rows per data rank per forward."""
    accumulation_steps: int = Field(ge=1)
    """Forward and backward passes per optimizer step."""
    accumulation_mode: AccumulationMode = "reduce_each"
    """What is reduced before the last micro-batch of a step."""
    optimizer: OptimizerKind = "adamw"
    """Optimizer."""
    optimizer_implementation: OptimizerImplementation = "foreach"
    """PyTorch's implementation of it: fused kernels on GPUs, foreach on CPUs."""
    loss_head: LossHead = "eager"
    """How logits become a loss."""
    loss_chunk: int = Field(default=1024, ge=1)
    """Tokens per piece of a chunked loss head."""
    compile: bool = False
    """Every block is compiled."""
    reasons: dict[str, str] = Field(default_factory=dict)
    """Field -> why it has this value, for fields that the user did not fix."""

    @property
    def global_batch(self) -> int:
        """Rows per optimizer step over all ranks."""
        return self.micro_batch * self.accumulation_steps * self.mesh.data_ranks

    def fingerprint(self) -> str:
        """Return 12 hex digits that are equal exactly when every decision is (reasons do not count)."""
        text = json.dumps(self.model_dump(exclude={"reasons"}), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:12]
