"""The Plan: every sharding decision, frozen and printable. No decision lives anywhere else."""

from __future__ import annotations

import hashlib
import json
from typing import Literal

from pydantic import Field

from shardwise.spec.job import Dtype, StrategyName, Strict


class Mesh(Strict):
    """Sizes of the device mesh axes; their product is the world size."""

    replicate: int = Field(default=1, ge=1)
    """Copies of the sharded model."""
    shard: int = Field(default=1, ge=1)
    """Ranks over which one copy is sharded."""

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self.replicate * self.shard


class Dtypes(Strict):
    """Dtype of each role."""

    frozen_storage: Dtype | Literal["checkpoint"] | None
    """Stored shards of frozen weights; `checkpoint`: as stored in a model that is not here; None: nothing is frozen."""
    trained_storage: Literal["fp32"] = "fp32"
    """Stored shards of trained weights, their gradients and optimizer states."""
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
    reshard_after_forward: bool
    """Gathered block weights are freed after forward and gathered again in backward. The root unit (embedding, final
    norm, head) stays gathered between forward and backward, as its backward comes first."""
    dtypes: Dtypes
    """Dtype by role."""
    activation_checkpointing: str
    """`none`, `full` or `every_<k>`."""
    attention: Literal["sdpa", "eager", "flash_attention_2"]
    """Attention implementation of the model."""
    micro_batch: int = Field(ge=1)
    """Rows per rank per forward."""
    accumulation_steps: int = Field(ge=1)
    """Forward and backward passes per optimizer step."""
    accumulation_mode: Literal["reduce_each"] = "reduce_each"
    """Gradients are reduced after every micro-batch and added up as shards."""
    optimizer: Literal["adamw"] = "adamw"
    """Optimizer."""
    optimizer_implementation: Literal["fused", "foreach"] = "foreach"
    """PyTorch's implementation of it: fused kernels on GPUs, foreach on CPUs."""
    loss_head: Literal["eager"] = "eager"
    """The loss is computed from the whole logits of a micro-batch."""
    reasons: dict[str, str] = Field(default_factory=dict)
    """Field -> why it has this value, for fields that the user did not fix."""

    @property
    def global_batch(self) -> int:
        """Rows per optimizer step over all ranks."""
        return self.micro_batch * self.accumulation_steps * self.mesh.world

    def fingerprint(self) -> str:
        """Return 12 hex digits that are equal exactly when every decision is (reasons do not count)."""
        text = json.dumps(self.model_dump(exclude={"reasons"}), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:12]
