"""From a source and a plan to a live, sharded model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardwise.engine.adapters import add_adapters, init_adapters
from shardwise.engine.apply import apply
from shardwise.engine.blocks import keep_blocks
from shardwise.engine.buffers import fill_buffers
from shardwise.engine.dtypes import TORCH_DTYPE
from shardwise.engine.expected import expect
from shardwise.engine.precision import cast_buffers, move_buffers, store_trained
from shardwise.engine.readback import check_live_model
from shardwise.engine.source import Source, build_on_meta
from shardwise.engine.weights import ReadPlan, load_weights, plan_reads
from shardwise.spec.job import Job
from shardwise.spec.method import Lora
from shardwise.spec.plan import Plan
from shardwise.spec.strict import Dtype


@dataclass(frozen=True, kw_only=True)
class Skeleton:
    """A model on the meta device with its adapters, not yet sharded."""

    model: nn.Module
    """What is trained: the transformers model, or the PEFT model around it."""
    plain_model: Any
    """The transformers model."""
    reads: ReadPlan | None
    """How its weights are read; None when it was built from a configuration alone."""


def frozen_storage(job: Job, source_dtype: Dtype) -> Dtype | None:
    """Storage dtype of frozen weights: as asked, else the checkpoint's own; None when nothing is frozen."""
    return (job.model.dtype or source_dtype) if job.use_lora else None


def build_skeleton(job: Job, config: Any, stored: Dtype, source: Source | None) -> Skeleton:
    """Build the job's model without memory behind it.

    Raises:
        BadInput: unknown architecture, targets that match nothing, an incomplete checkpoint.
    """
    return skeleton_of(
        config,
        attention=job.model.attention,
        frozen=frozen_storage(job, stored),
        trained=job.mixed_precision.storage_dtype,
        lora=job.lora,
        tensor=job.mesh.tensor,
        source=source,
    )


def skeleton_of(
    config: Any,
    *,
    attention: str | None,
    frozen: Dtype | None,
    trained: Dtype,
    lora: Lora | None,
    tensor: int = 1,
    source: Source | None = None,
    blocks: Sequence[int] | None = None,
) -> Skeleton:
    """Build a model without memory behind it.

    Args:
        config: transformers' configuration.
        attention: Its attention implementation; None: transformers' choice.
        frozen: Storage dtype of frozen weights; None when nothing is frozen.
        trained: Storage dtype of what trains.
        lora: Adapters; None: every weight trains.
        tensor: Ranks of the mesh's tensor axis.
        source: Where its weights are; None: a configuration alone.
        blocks: Numbers of the blocks that it has, for a trace; None: all.

    Raises:
        BadInput: unknown architecture, targets that match nothing, an incomplete checkpoint.
    """
    plain = build_on_meta(config, attention=attention, dtype=TORCH_DTYPE[frozen or trained])
    if blocks is not None:
        keep_blocks(plain, blocks)
    reads = None if source is None else plan_reads(plain, source)
    model = plain if lora is None else add_adapters(plain, lora, tensor=tensor)
    store_trained(model, trained)
    return Skeleton(model=model, plain_model=plain, reads=reads)


def load_model(job: Job, plan: Plan, source: Source, mesh: DeviceMesh) -> nn.Module:
    """Return the sharded model with its weights; each rank holds its own shards only.

    Raises:
        BadInput: the weights do not fit the model.
        PlanNotHonoured: the live model is not what the plan says.
    """
    skeleton = build_skeleton(job, source.config, source.dtype, source)
    assert skeleton.reads is not None
    expected = expect(skeleton.model, plan)
    apply(skeleton.model, plan, mesh)
    gpu = torch.device("cuda", torch.cuda.current_device()) if mesh.device_type == "cuda" else None
    skeleton.model.to_empty(device="cpu" if gpu is None or plan.offload.parameters else gpu)
    fill_buffers(skeleton.model, skeleton.plain_model)
    load_weights(skeleton.model, skeleton.reads, source)
    if job.use_lora:
        init_adapters(skeleton.model, job.seed)
    cast_buffers(skeleton.model, plan.dtypes)
    if gpu is not None:
        move_buffers(skeleton.model, gpu)
    check_live_model(skeleton.model, plan, mesh, expected)
    return skeleton.model
