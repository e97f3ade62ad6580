"""The same plan run on real gloo ranks and traced without any, and where the two differ."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import torch

from engine.training import make_plan
from measure.live_storages import LENGTH, tensors_of, trainer, whole_rows, wide_job
from shardwise.catalogue.clusters import find_cluster
from shardwise.catalogue.models import find_model
from shardwise.engine.load import load_model
from shardwise.engine.mesh import build_mesh
from shardwise.engine.source import open_source
from shardwise.measure.storages import StorageTracker, peaks
from shardwise.predict.trace import trace
from shardwise.spec.footprint import CATEGORIES, Instant, Phase
from shardwise.spec.job import Job
from shardwise.spec.workload import Workload
from shardwise.train.evaluate import held_out_loss
from shardwise.train.signals import StopSignal

Peaks = dict[Phase, Instant]
"""The highest instant of each phase of one step."""

PHASES: tuple[Phase, ...] = ("load", "forward", "backward", "optimizer_step", "evaluation")

TOLERANCE = 16 * 1024
"""Bytes by which a category may differ, or 1 % where that is more."""

Case = Mapping[str, object]


def jobs_of(tiny: Callable[..., Path], cases: Mapping[str, Case]) -> dict[str, Job]:
    """The jobs of some cases; `family` and `layers` are the model's, everything else the job's."""
    return {name: wide_job(tiny, **case) for name, case in cases.items()}


def run_all(rank: int, world: int, jobs: Mapping[str, Job]) -> dict[str, Peaks]:
    """Body for `run_ranks`: the second step of every job, as it was."""
    return {name: _run(rank, world, job) for name, job in jobs.items()}


def _run(rank: int, world: int, job: Job) -> Peaks:
    """Load, two steps, and an evaluation of twice the rows, as training does them."""
    source, plan = open_source(job.model), make_plan(job, world)
    with StorageTracker() as tracker:
        with tracker.phase("load"):
            model = load_model(job, plan, source, build_mesh(plan.mesh, "cpu"))
        tracker.watch(model)
        run = trainer(rank, job, plan, model)
        tracker.watch_optimizer(run.optimizer)
        tracker.add(tensors_of(run.batches), "inputs")
        run.step()
        run.step()
        held_out = whole_rows(plan, rank, rows=2 * plan.micro_batch)[:1]
        tracker.add(tensors_of(held_out), "inputs")
        held_out_loss(model, held_out, stop=StopSignal(), device=torch.device("cpu"))
    seen = [s for s in tracker.segments() if s.key.step == 1 or s.key.phase in ("load", "evaluation")]
    return {instant.phase: instant for instant in peaks(seen)}


def traced(job: Job, world: int) -> Peaks:
    """What the trace says of a job on CPU ranks."""
    workload = Workload(model=find_model(str(job.model.path)), seq_len=LENGTH, lora=job.lora)
    report = trace(workload, make_plan(job, world), find_cluster(f"{world}xcpu"))
    return {instant.phase: instant for instant in report.footprint.peaks}


def differences(run: Peaks, said: Peaks) -> list[str]:
    """List what differs by more than the tolerance: totals and categories at the peak of each phase."""
    return [line for phase in PHASES for line in _differ(phase, run[phase], said[phase])]


def _differ(phase: Phase, run: Instant, said: Instant) -> Iterable[str]:
    pairs = [("allocated", run.allocated, said.allocated)]
    # The highest instant of a load is when some buffer is made, whatever is on the host by then.
    compared = [category for category in CATEGORIES if (phase, category) != ("load", "offloaded")]
    pairs += [(category, run.live.get(category, 0), said.live.get(category, 0)) for category in compared]
    for name, real, traced_ in pairs:
        if abs(real - traced_) > max(TOLERANCE, 0.01 * real):
            yield f"{phase} (run at {run.where}, trace at {said.where}): {name} {real} in the run, {traced_} traced"
