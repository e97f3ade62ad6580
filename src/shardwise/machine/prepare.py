"""Everything that happens before ranks start: check, read, plan, and write the run folder."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from shardwise.data.prepared import PreparedData, prepare
from shardwise.engine.check import check_plan
from shardwise.engine.compat import attention_of
from shardwise.engine.load import Skeleton, build_skeleton, frozen_storage
from shardwise.engine.source import (
    ModelNotHere,
    Source,
    declared_dtype,
    has_weights,
    locate,
    open_folder,
    open_source,
    read_config,
)
from shardwise.engine.unit_table import unit_table
from shardwise.machine.detect import Devices, detect, planned_devices
from shardwise.machine.resume import as_before, find_start
from shardwise.planner.decide import Facts, decide, fit_seq_len
from shardwise.report.run_folder import RunFolder, RunInfo, choose_folder
from shardwise.spec.job import Job
from shardwise.spec.plan import Plan
from shardwise.spec.problems import BadInput, Problem
from shardwise.spec.strict import Dtype
from shardwise.spec.units import UnitTable

DEFAULT_LEARNING_RATE = {True: 2e-4, False: 1e-5}
"""Peak learning rate by `use_lora`, when the job names none."""


@dataclass(frozen=True, kw_only=True)
class Preview:
    """What can be said of a job without reading data or weights."""

    job: Job
    """With every default filled in that needs no data."""
    plan: Plan
    """The decisions."""
    units: UnitTable | None
    """None when the model is not here."""
    devices: Devices
    """The ranks."""

    def warnings(self) -> list[str]:
        """What will work and disappoint."""
        if self.devices.device_type == "cpu" and self.plan.dtypes.param == "fp16":
            return ["warning: on CPUs fp16 matrix products are about 40 times slower than fp32; use fp32 or bf16 here"]
        return []


@dataclass(frozen=True, kw_only=True)
class PreparedRun:
    """A run that is ready to start."""

    folder: RunFolder
    """Written, except when nothing may be."""
    preview: Preview
    """Job, plan and units."""
    info: RunInfo
    """Ranks and steps."""
    data_lines: list[str]
    """What the data is, in sentences."""


def preview(job: Job, *, nproc: int | None = None) -> Preview:
    """Resolve a job and decide its plan; reads the model's configuration, no weights and no data.

    Named cards need not be here: the plan is that of the cluster.

    Raises:
        BadInput: with every reason found.
    """
    devices = planned_devices(job, nproc)
    try:
        folder = locate(job.model, weights=False)
    except ModelNotHere:
        return _preview_without_model(job, devices)
    source = open_folder(folder) if has_weights(folder) else None
    config = read_config(folder) if source is None else source.config
    stored = declared_dtype(config) if source is None else source.dtype
    job = fit_seq_len(job, getattr(config, "max_position_embeddings", None))
    skeleton = build_skeleton(job, config, stored, source)
    plan = decide(job, _facts(skeleton, devices, stored, job))
    check_plan(skeleton.model, plan, devices.device_type)
    return _resolved(job, skeleton.model, plan, devices)


def _facts(skeleton: Skeleton, devices: Devices, stored: Dtype, job: Job) -> Facts:
    return Facts(
        world=devices.world,
        device_type=devices.device_type,
        parameters=sum(p.numel() for p in skeleton.model.parameters()),
        frozen_storage=frozen_storage(job, stored),
        attention=attention_of(skeleton.plain_model),
        ranks_per_node=devices.per_node or int(os.environ.get("LOCAL_WORLD_SIZE", devices.world)),
    )


def _preview_without_model(job: Job, devices: Devices) -> Preview:
    if job.fsdp.strategy == "auto" and devices.world > 1:
        raise BadInput(
            Problem(
                field="fsdp",
                value="auto",
                reason=f"needs the model's size, and {job.model.path!r} is not here",
                fix="name a strategy, or give a model that is here",
            )
        )
    facts = Facts(
        world=devices.world,
        device_type=devices.device_type,
        parameters=0,
        frozen_storage=(job.model.dtype or "checkpoint") if job.use_lora else None,
        attention="sdpa",
        ranks_per_node=devices.per_node,
    )
    plan = decide(job, facts)
    return Preview(job=_fill(job, plan), plan=plan, units=None, devices=devices)


def _fill(job: Job, plan: Plan) -> Job:
    return job.model_copy(
        update={
            "global_batch": plan.global_batch,
            "micro_batch": plan.micro_batch,
            "learning_rate": job.learning_rate or DEFAULT_LEARNING_RATE[job.use_lora],
            "epochs": 1.0 if job.steps is None and job.epochs is None else job.epochs,
            "lora_alpha": float(job.lora_alpha or 2 * job.lora_rank) if job.use_lora else None,
        }
    )


def _resolved(job: Job, model: nn.Module, plan: Plan, devices: Devices) -> Preview:
    return Preview(job=_fill(job, plan), plan=plan, units=unit_table(model, plan), devices=devices)


def prepare_run(job: Job, *, name: str, nproc: int | None, command: Callable[[Job], str]) -> PreparedRun:
    """Check everything, then write the run folder. Nothing is written when anything is wrong.

    Args:
        job: As read.
        name: The configuration's name, which the default run folder takes.
        nproc: Number of ranks, when given from outside.
        command: Makes the line that resumes the run from its job.

    Raises:
        BadInput: before any process starts.
    """
    folder = choose_folder(job, name)
    job = as_before(job, folder)
    devices = detect(job, nproc)
    source = open_source(job.model)
    job = fit_seq_len(job, getattr(source.config, "max_position_embeddings", None))
    skeleton = build_skeleton(job, source.config, source.dtype, source)
    plan = decide(job, _facts(skeleton, devices, source.dtype, job))
    split_notes = check_plan(skeleton.model, plan, devices.device_type)
    data = _prepare_data(job, source, skeleton.plain_model)
    seen = _resolved(job, skeleton.model, plan, devices)
    resolved = seen.job.model_copy(update={"output": str(folder.path)})
    info = RunInfo(
        name=name,
        device_type=devices.device_type,
        backend=devices.backend,
        world=devices.world,
        total_steps=_total_steps(resolved, data),
        data_digest=data.train.digest() + (data.held_out.digest() if data.held_out is not None else ""),
        model_digest=source.digest(),
        resume_command=command(resolved),
    )
    notes = _check_together(resolved, data, info.total_steps)
    start = find_start(folder, resolved, info, skeleton.model, plan)
    info = info.model_copy(update={"resume_from": None if start.checkpoint is None else str(start.checkpoint)})
    assert seen.units is not None
    assert skeleton.reads is not None
    folder.write(resolved, plan, seen.units, info, step=start.step)
    data.write(folder.data)
    return PreparedRun(
        folder=folder,
        preview=Preview(job=resolved, plan=plan, units=seen.units, devices=devices),
        info=info,
        data_lines=[*data.summary.lines(), *skeleton.reads.notes(), *split_notes, *notes, *start.notes],
    )


def _prepare_data(job: Job, source: Source, model: Any) -> PreparedData:
    assert job.data is not None  # the reader asks for it
    rows = model.get_input_embeddings().weight.shape[0]
    return prepare(job.data, source.tokenizer(), seq_len=job.seq_len, seed=job.seed, vocab_size=rows)


def _total_steps(job: Job, data: PreparedData) -> int:
    if job.steps is not None:
        return job.steps
    assert job.epochs is not None
    assert job.global_batch is not None
    steps_per_epoch = math.ceil(len(data.train) / job.global_batch)
    return max(1, math.ceil(job.epochs * steps_per_epoch))


def _check_together(job: Job, data: PreparedData, total_steps: int) -> list[str]:
    """Refuse settings that the data leaves without effect; returns warnings."""
    problems = []
    if job.log.evaluate_every and data.held_out is None:
        problems.append(
            Problem(
                field="log.evaluate_every",
                value=job.log.evaluate_every,
                reason="has no effect: no rows are held out",
                fix="set data.held_out to a fraction or a file",
            )
        )
    if job.warmup_steps > total_steps:
        problems.append(
            Problem(field="warmup_steps", value=job.warmup_steps, reason=f"is more than the run's {total_steps} steps")
        )
    if problems:
        raise BadInput(problems)
    if job.global_batch is not None and job.global_batch > len(data.train):
        rows = len(data.train)
        return [f"warning: a global batch of {job.global_batch} rows holds only the {rows} there are, and padding"]
    return []


def run_name(config: Path) -> str:
    """Name of a run from its configuration file."""
    return config.stem
