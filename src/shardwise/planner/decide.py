"""From a Job to a Plan by the article's rule of thumb; every choice that the user did not make carries its reason."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from shardwise.spec.job import Dtype, Job, StrategyName
from shardwise.spec.plan import Dtypes, Mesh, Plan
from shardwise.spec.problems import BadInput, Problem

RULE_OF_THUMB_PARAMETERS = 13_000_000_000
"""From this size on the rule of thumb shards everything."""

ROWS_PER_RANK = 8
"""Rows per rank and step when the job names no global batch."""


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What the planner must know besides the job."""

    world: int
    """Number of ranks."""
    device_type: str
    """`cuda` or `cpu`."""
    parameters: int
    """Parameters of the model, adapters included."""
    frozen_storage: Dtype | Literal["checkpoint"] | None
    """Storage dtype of frozen weights; None when nothing is frozen."""
    attention: Literal["sdpa", "eager", "flash_attention_2"]
    """Attention implementation that the model has when the job names none."""


def decide(job: Job, facts: Facts) -> Plan:
    """Return the plan of a job.

    Raises:
        BadInput: batch sizes that do not divide, with the sizes that would.
    """
    reasons: dict[str, str] = {}
    strategy = _strategy(job, facts, reasons)
    micro_batch, accumulation = _batch(job, facts.world, reasons)
    precision = job.mixed_precision
    replicated = strategy == "NO_SHARD"
    fused = facts.device_type == "cuda" and precision.param_dtype != "fp16"
    if job.model.attention is None:
        reasons["attention"] = "transformers' choice for this model"
    reasons["optimizer_implementation"] = "fused kernels on GPUs without loss scaling, foreach elsewhere"
    return Plan(
        strategy=strategy,
        mesh=Mesh(replicate=facts.world if replicated else 1, shard=1 if replicated else facts.world),
        reshard_after_forward=strategy != "SHARD_GRAD_OP",
        dtypes=Dtypes(
            frozen_storage=facts.frozen_storage,
            param=precision.param_dtype,
            reduce=precision.reduce_dtype,
            output=precision.output_dtype,
            buffer=precision.buffer_dtype,
            loss_scaling=precision.param_dtype == "fp16",
        ),
        activation_checkpointing=job.activation_checkpointing,
        attention=job.model.attention or facts.attention,
        micro_batch=micro_batch,
        accumulation_steps=accumulation,
        optimizer_implementation="fused" if fused else "foreach",
        reasons=reasons,
    )


def _strategy(job: Job, facts: Facts, reasons: dict[str, str]) -> StrategyName:
    if job.fsdp.strategy != "auto":
        return job.fsdp.strategy
    billions = facts.parameters / 1e9
    if facts.world == 1:
        reasons["strategy"] = "auto: one rank, nothing to shard over"
        return "NO_SHARD"
    rule = "rule of thumb, not a prediction of memory or time"
    if facts.parameters >= RULE_OF_THUMB_PARAMETERS:
        reasons["strategy"] = f"auto: {billions:.1f}B parameters, 13B or more: shard everything ({rule})"
        return "FULL_SHARD"
    lora = " and LoRA" if job.use_lora else ""
    reasons["strategy"] = f"auto: {billions:.2f}B parameters, below 13B{lora}: keep weights gathered ({rule})"
    return "SHARD_GRAD_OP"


def _batch(job: Job, world: int, reasons: dict[str, str]) -> tuple[int, int]:
    """Return (micro batch, accumulation steps) of the job's global batch."""
    global_batch = job.global_batch
    if global_batch is None:
        global_batch = ROWS_PER_RANK * world
        if job.micro_batch is not None and ROWS_PER_RANK % job.micro_batch:
            global_batch = job.micro_batch * world
        reasons["global_batch"] = f"global batch by default: {global_batch // world} rows per rank"
    micro_batch = job.micro_batch
    if micro_batch is None:
        micro_batch = 1
        reasons["micro_batch"] = "micro batch by default: 1 row, the least memory; raise it when memory allows"
    unit = world * micro_batch
    if global_batch % unit:
        below, above = global_batch // unit * unit, (global_batch // unit + 1) * unit
        near = " or ".join(str(size) for size in (below, above) if size > 0)
        reason = f"is not a multiple of {world} ranks x micro_batch {micro_batch} = {unit}"
        raise BadInput(Problem(field="global_batch", value=global_batch, reason=reason, fix=f"use {near}"))
    return micro_batch, global_batch // unit
