"""The parts of a Plan that a Job may name: mesh, units, prefetch, reduce-scatter, offload.

Each comes twice: as chosen in a Job, where None leaves the value to the planner, and as decided in a Plan.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from shardwise.spec.strict import NotNegative, PositiveInt, Strict

StrategyName = Literal["FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2", "NO_SHARD"]
"""PyTorch's names of the sharding strategies."""

AccumulationMode = Literal["reduce_each", "defer_all", "defer_replicate"]
"""What is reduced before the last micro-batch: everything; nothing; shards, but not over the replicas."""

LossHead = Literal["eager", "chunked", "fused"]
"""How logits become a loss: whole; some tokens at a time; by Liger's fused kernel (GPUs)."""

OptimizerKind = Literal["adamw", "adamw_8bit", "sgd"]
OptimizerImplementation = Literal["fused", "foreach", "for_loop"]

Place = Literal["root", "own"]
"""Whether a module belongs to the root unit or is a unit of its own."""


class MeshChoice(Strict):
    """Sizes of the mesh axes that a job asks for."""

    replicate: PositiveInt | None = None
    """Copies of the sharded model; default: what strategy, shard and tensor leave."""
    shard: PositiveInt | None = None
    """Ranks over which one copy is sharded; default: what strategy, replicate and tensor leave."""
    tensor: PositiveInt = 1
    """Ranks that share the matrix products of every layer (tensor parallelism)."""
    sequence_parallel: bool = False
    """Norms work on a part of the sequence each; needs `tensor` above 1."""


class Mesh(Strict):
    """Sizes of the device mesh axes; their product is the world size. Ranks of one `tensor` group are neighbours."""

    replicate: PositiveInt = 1
    """Copies of the sharded model."""
    shard: PositiveInt = 1
    """Ranks over which one copy is sharded."""
    tensor: PositiveInt = 1
    """Ranks that share the matrix products of every layer."""
    sequence_parallel: bool = False
    """Norms work on a part of the sequence each."""

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self.replicate * self.shard * self.tensor

    @property
    def data_ranks(self) -> int:
        """Ranks that see different rows; those of one `tensor` group see the same."""
        return self.replicate * self.shard


class Units(Strict):
    """Which modules are gathered and reduced together."""

    wrap: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """Class names of the modules that become units; empty: every decoder block."""
    embedding: Place = "root"
    """The input embedding."""
    head: Place = "root"
    """The output projection; tied to the embedding, both are one unit."""


class PrefetchChoice(Strict):
    """How far ahead a job wants weights gathered."""

    forward: NotNegative | None = None
    """Units gathered ahead of the one that computes, in forward; 0: none."""
    backward: NotNegative | None = None
    """The same in backward; 0: none, 1 is PyTorch's default."""
    async_all_gather: bool | None = None
    """On CPUs: gather in the background; default: on. On GPUs gathers always run on streams of their own."""


class Prefetch(Strict):
    """How far ahead weights are gathered."""

    forward: NotNegative
    """Units gathered ahead in forward."""
    backward: NotNegative
    """Units gathered ahead in backward."""
    async_all_gather: bool
    """Gathers return at once and are waited for where the weights are used; always so on GPUs, by streams."""


class ReduceScatterChoice(Strict):
    """How a job wants gradients reduced."""

    buffers: PositiveInt | None = None
    """Reductions in flight before backward waits for the oldest; default: 2 where asynchronous on CPUs, else 1."""
    separate_group: bool = False
    """Reduce on a communicator of its own, beside that of the gathers (torch 2.13 and later)."""
    asynchronous: bool | None = None
    """On CPUs: reduce in the background; default: where that is correct. On GPUs always, by streams."""


class ReduceScatter(Strict):
    """How gradients are reduced."""

    buffers: PositiveInt
    """Reductions in flight before backward waits for the oldest."""
    separate_group: bool
    """On a communicator of its own."""
    asynchronous: bool
    """In the background: streams on GPUs; on CPUs an all-to-all and a sum when it has arrived."""


class Offload(Strict):
    """What lives in host memory while it is not used."""

    optimizer: bool = False
    """Optimizer states."""
    parameters: bool = False
    """Shards of parameters and gradients; the optimizer then runs on the host, with its states."""
    activations: bool = False
    """Activations saved for backward."""

    @model_validator(mode="before")
    @classmethod
    def _optimizer_follows_parameters(cls, given: Any) -> Any:
        """The optimizer steps where its parameters live."""
        if isinstance(given, dict) and given.get("parameters") is True:
            return {"optimizer": True, **given}
        return given


def is_checkpointed(setting: str, index: int) -> bool:
    """Whether block `index` recomputes its activations under a Plan's `activation_checkpointing`."""
    if setting == "none":
        return False
    every = 1 if setting in ("full", "selective") else int(setting.removeprefix("every_"))
    return index % every == 0
