"""From a Job to a Plan by the article's rule of thumb; every choice that the user did not make carries its reason."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from shardwise.planner.communication import prefetch, reduce_scatter
from shardwise.planner.layout import decide_accumulation, decide_mesh, decide_reshard
from shardwise.spec.job import Job
from shardwise.spec.layout import OptimizerImplementation, StrategyName
from shardwise.spec.plan import Dtypes, Plan
from shardwise.spec.problems import BadInput, Problem
from shardwise.spec.strict import Dtype

RULE_OF_THUMB_PARAMETERS = 13_000_000_000
"""From this size on the rule of thumb shards everything."""

ROWS_PER_RANK = 8
"""Rows per data rank and step when the job names no global batch."""


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
    ranks_per_node: int | None = None
    """Ranks on one node; None: all of them."""


def decide(job: Job, facts: Facts) -> Plan:
    """Return the plan of a job.

    Raises:
        BadInput: sizes that do not divide, with the sizes that would; options that cannot hold together.
    """
    reasons: dict[str, str] = {}
    strategy = _strategy(job, facts, reasons)
    mesh = decide_mesh(job, strategy, facts.world, facts.ranks_per_node or facts.world, reasons)
    micro_batch, accumulation = _batch(job, mesh.data_ranks, reasons)
    precision = job.mixed_precision
    dtypes = Dtypes(
        frozen_storage=facts.frozen_storage,
        trained_storage=precision.storage_dtype,
        optimizer_state=job.optimizer_state_dtype or precision.storage_dtype,
        param=precision.param_dtype,
        reduce=precision.reduce_dtype,
        output=precision.output_dtype,
        buffer=precision.buffer_dtype,
        loss_scaling=precision.param_dtype == "fp16",
    )
    if job.model.attention is None:
        reasons["attention"] = "transformers' choice for this model"
    return Plan(
        strategy=strategy,
        mesh=mesh,
        reshard_after_forward=decide_reshard(job, strategy, mesh),
        units=job.units,
        prefetch=prefetch(job, facts.device_type, reasons),
        reduce_scatter=reduce_scatter(job, facts.device_type, mesh, dtypes, reasons),
        dtypes=dtypes,
        activation_checkpointing=job.activation_checkpointing,
        offload=job.offload,
        attention=job.model.attention or facts.attention,
        micro_batch=micro_batch,
        accumulation_steps=accumulation,
        accumulation_mode=decide_accumulation(job, mesh),
        optimizer=job.optimizer,
        optimizer_implementation=_implementation(job, facts.device_type, reasons),
        loss_head=job.loss_head,
        loss_chunk=job.loss_chunk,
        compile=job.compile,
        reasons=reasons,
    )


def fit_seq_len(job: Job, longest: int | None) -> Job:
    """Cut the default row length to what the model has positions for (None: no limit); refuse a longer one that was
    asked for.

    Raises:
        BadInput: naming the longest.
    """
    if longest is None or job.seq_len <= longest:
        return job
    if "seq_len" not in job.model_fields_set:
        return job.model_copy(update={"seq_len": longest})
    reason = f"is longer than the {longest} positions of this model"
    raise BadInput(Problem(field="seq_len", value=job.seq_len, reason=reason, fix=f"use {longest} or less"))


def _strategy(job: Job, facts: Facts, reasons: dict[str, str]) -> StrategyName:
    if job.fsdp.strategy != "auto":
        return job.fsdp.strategy
    ranks = facts.world // job.mesh.tensor
    replicate, shard = job.mesh.replicate or 1, job.mesh.shard
    if ranks <= 1 or shard == 1 or replicate == ranks:
        why = "nothing to shard over" if ranks <= 1 else "the mesh names replicas only"
        reasons["strategy"] = f"auto: {'one rank' if facts.world == 1 else f'{max(ranks, 1)} data ranks'}, {why}"
        return "NO_SHARD"
    frees, why = _frees(job, facts)
    reasons["strategy"] = f"auto: {why}"
    hybrid = replicate > 1 or (shard is not None and shard < ranks)
    if hybrid:
        return "HYBRID_SHARD" if frees else "HYBRID_SHARD_ZERO2"
    return "FULL_SHARD" if frees else "SHARD_GRAD_OP"


def _frees(job: Job, facts: Facts) -> tuple[bool, str]:
    """Return whether weights are freed after forward, and why."""
    asked = job.fsdp.reshard_after_forward
    if asked is not None:
        return asked is not False, f"what reshard_after_forward: {str(asked).lower()} asks for"
    billions = facts.parameters / 1e9
    rule = "rule of thumb, not a prediction of memory or time"
    if facts.parameters >= RULE_OF_THUMB_PARAMETERS:
        return True, f"{billions:.1f}B parameters, 13B or more: shard everything ({rule})"
    lora = " and LoRA" if job.use_lora else ""
    return False, f"{billions:.2f}B parameters, below 13B{lora}: keep weights gathered ({rule})"


def _implementation(job: Job, device_type: str, reasons: dict[str, str]) -> OptimizerImplementation:
    if job.optimizer_implementation is not None:
        return job.optimizer_implementation
    if job.optimizer == "adamw_8bit":
        reasons["optimizer_implementation"] = "the 8-bit optimizer has its own"
        return "foreach"
    if device_type == "cuda" and not job.offload.parameters:
        reasons["optimizer_implementation"] = "fused kernels on GPUs"
        return "fused"
    reasons["optimizer_implementation"] = "foreach where fused kernels bring nothing"
    return "foreach"


def _batch(job: Job, data_ranks: int, reasons: dict[str, str]) -> tuple[int, int]:
    """Return (micro batch, accumulation steps) of the job's global batch."""
    global_batch = job.global_batch
    if global_batch is None:
        global_batch = ROWS_PER_RANK * data_ranks
        if job.micro_batch is not None and ROWS_PER_RANK % job.micro_batch:
            global_batch = job.micro_batch * data_ranks
        reasons["global_batch"] = f"global batch by default: {global_batch // data_ranks} rows per rank"
    micro_batch = job.micro_batch
    if micro_batch is None:
        micro_batch = 1
        reasons["micro_batch"] = "micro batch by default: 1 row, the least memory; raise it when memory allows"
    unit = data_ranks * micro_batch
    if global_batch % unit:
        below, above = global_batch // unit * unit, (global_batch // unit + 1) * unit
        near = " or ".join(str(size) for size in (below, above) if size > 0)
        reason = f"is not a multiple of {data_ranks} data ranks x micro_batch {micro_batch} = {unit}"
        raise BadInput(Problem(field="global_batch", value=global_batch, reason=reason, fix=f"use {near}"))
    return micro_batch, global_batch // unit
