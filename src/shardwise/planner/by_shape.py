"""A Job planned by its model's shape alone: no torch, no weights, no data."""

from __future__ import annotations

from dataclasses import dataclass, replace

from shardwise.planner.decide import Facts, decide, fit_seq_len
from shardwise.predict.unit_rows import unit_table
from shardwise.spec.cluster import Cluster
from shardwise.spec.job import Job
from shardwise.spec.model_spec import ModelSpec
from shardwise.spec.plan import Plan
from shardwise.spec.plan_rules import broken_rules
from shardwise.spec.problems import BadInput
from shardwise.spec.strict import Dtype
from shardwise.spec.units import UnitTable
from shardwise.spec.workload import Workload

_DTYPES: dict[str, Dtype] = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


@dataclass(frozen=True, kw_only=True)
class Planned:
    """What a job comes to on a cluster."""

    job: Job
    """With row length and batch filled in."""
    workload: Workload
    """What a step computes."""
    cluster: Cluster
    """Where it runs."""
    plan: Plan
    """The decisions."""
    units: UnitTable
    """What is gathered and stored together."""


def plan_by_shape(job: Job, model: ModelSpec, cluster: Cluster) -> Planned:
    """Decide a job's plan.

    Args:
        job: What is asked for; `data` and `cluster` are not read.
        model: The shape of the job's model.
        cluster: The machines.

    Raises:
        BadInput: what cannot be, and what can instead.
    """
    job = fit_seq_len(job, model.max_positions)
    held_out = job.data is not None and job.data.held_out is not None
    workload = Workload(model=model, seq_len=job.seq_len, lora=job.lora, held_out=held_out)
    facts = Facts(
        world=cluster.world,
        device_type=cluster.device_type,
        parameters=model.parameters,
        frozen_storage=(job.model.dtype or stored_dtype(model)) if job.use_lora else None,
        attention="sdpa",
        ranks_per_node=cluster.per_node,
    )
    if job.use_lora and job.fsdp.strategy == "auto":  # adapters count where the size decides
        fixed = decide(job.model_copy(update={"fsdp": job.fsdp.model_copy(update={"strategy": "FULL_SHARD"})}), facts)
        facts = replace(facts, parameters=unit_table(workload, fixed).parameters)
    plan = decide(job, facts)
    problems = tuple(broken_rules(plan, cluster.device_type))
    if problems:
        raise BadInput(problems)
    filled = {"global_batch": plan.global_batch, "micro_batch": plan.micro_batch}
    return Planned(
        job=job.model_copy(update=filled),
        workload=workload,
        cluster=cluster,
        plan=plan,
        units=unit_table(workload, plan),
    )


def stored_dtype(model: ModelSpec) -> Dtype:
    """Return the dtype that a configuration declares for its weights; fp32, transformers' default, when none."""
    declared = model.config.get("dtype") or model.config.get("torch_dtype") or "float32"
    return _DTYPES.get(str(declared), "fp32")
