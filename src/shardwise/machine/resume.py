"""Where a run starts from: its beginning, or a checkpoint that belongs to the same training."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from torch import nn

from shardwise.engine.optimizer import build_optimizer
from shardwise.report.run_folder import RunFolder, RunInfo, check_continues, check_same_run
from shardwise.spec.job import Job
from shardwise.spec.plan import Plan
from shardwise.spec.problems import BadInput, Problem
from shardwise.state.folders import resolve_resume
from shardwise.state.live import contents
from shardwise.state.manifest import Manifest, read_manifest


@dataclass(frozen=True, kw_only=True)
class Start:
    """What a start continues."""

    checkpoint: Path | None = None
    """Checkpoint folder; None: from the beginning."""
    step: int = 0
    """Optimizer steps done."""
    notes: list[str] = field(default_factory=list)
    """What the user should know."""


def as_before(job: Job, folder: RunFolder) -> Job:
    """Give a resumed job that names no global batch the one of the run that it continues, whatever its ranks."""
    if job.resume == "never" or job.global_batch is not None or not folder.config.is_file():
        return job
    return job.model_copy(update={"global_batch": folder.read_job().global_batch})


def find_start(folder: RunFolder, job: Job, info: RunInfo, model: nn.Module, plan: Plan) -> Start:
    """Return what the resolved `job` continues; reads manifests only.

    Args:
        folder: Where the job is to run.
        job: Resolved.
        info: Digests of data and model, number of steps.
        model: On the meta device, adapters included.
        plan: Of the job.

    Raises:
        BadInput: the folder or the checkpoint belongs to another training, or nothing is left to continue.
    """
    check_same_run(folder, job, info)
    checkpoint = resolve_resume(job.resume, folder.checkpoints)
    if checkpoint is None:
        return Start(notes=_from_the_beginning(folder, job))
    foreign = checkpoint.resolve().parent != folder.checkpoints.resolve()
    note = check_continues(checkpoint, job, info) if foreign else ""
    step = _checked(checkpoint, model, plan).step
    if step > info.total_steps or (foreign and step == info.total_steps):
        reason = f"has {step} steps done, and the job has {info.total_steps}"
        raise BadInput(Problem(field="resume", value=str(checkpoint), reason=reason, fix="raise steps"))
    return Start(checkpoint=checkpoint, step=step, notes=[note] if note else [])


def _from_the_beginning(folder: RunFolder, job: Job) -> list[str]:
    if job.resume != "auto":
        return []
    done = folder.read_status()["step"]
    if done:
        reason = f"{folder.path} got to step {done} and has no checkpoint left"
        raise BadInput(Problem(field="resume", value="auto", reason=reason, fix="start again with another output"))
    return [f"note: {folder.path} has no checkpoint yet: starting from the beginning"]


def _checked(path: Path, model: nn.Module, plan: Plan) -> Manifest:
    """Return the manifest of a checkpoint of this very model and method."""
    manifest, reason = read_manifest(path)
    here = contents(model, build_optimizer(model, plan, learning_rate=1.0, weight_decay=0.0))
    differences = [reason] if manifest is None else manifest.contents.differences(here)
    if manifest is None or differences:
        reason = "does not fit this model: " + "; ".join(differences[:3])
        fix = "resume with the configuration that the checkpoint was made with"
        raise BadInput(Problem(field="resume", value=str(path), reason=reason, fix=fix))
    return manifest
