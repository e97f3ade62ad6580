"""One rank of `footprint_run`: loads the model and takes two steps under the storage tracker."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path

import torch
import torch.distributed as dist

from shardwise.data.loader import Batch
from shardwise.engine.load import load_model
from shardwise.engine.mesh import build_mesh, data_rank
from shardwise.engine.optimizer import build_optimizer
from shardwise.engine.scaler import build_scaler
from shardwise.engine.source import open_source
from shardwise.measure.storages import StorageTracker, peaks
from shardwise.spec.job import Job
from shardwise.spec.plan import Plan
from shardwise.train.step import training_step
from shardwise.trials.footprint_run import RESULT

STEPS = 2
"""Optimizer states exist from the first update on, so the second step is the one that peaks."""

LEARNING_RATE = 1e-5
"""Memory does not depend on it."""


def watched_steps(job: Job, plan: Plan, rank: int) -> StorageTracker:
    """Load a model and train it for STEPS steps under a tracker; needs the process group, every rank calls it."""
    source = open_source(job.model)
    mesh = build_mesh(plan.mesh, "cpu")
    with StorageTracker() as tracker:
        with tracker.phase("load"):
            model = load_model(job, plan, source, mesh)
        tracker.watch(model)
        optimizer = build_optimizer(
            model, plan, learning_rate=LEARNING_RATE, weight_decay=job.weight_decay, momentum=job.momentum
        )
        tracker.watch_optimizer(optimizer)
        for step in range(STEPS):
            batches = _batches(job, plan, seed=step * plan.mesh.data_ranks + data_rank(plan.mesh, rank))
            for batch in batches:
                tracker.add((batch.input_ids, batch.attention_mask, batch.labels), "inputs")
            training_step(
                model,
                batches,
                plan=plan,
                optimizer=optimizer,
                scaler=build_scaler(plan, "cpu"),
                max_grad_norm=job.max_grad_norm,
                device=torch.device("cpu"),
            )
            del batches, batch
    return tracker


def _batches(job: Job, plan: Plan, *, seed: int) -> list[Batch]:
    """Return a step's micro-batches of this rank: random tokens, every row as long as the job allows."""
    generator = torch.Generator().manual_seed(seed)
    shape = (plan.micro_batch, job.seq_len)
    made = []
    for _ in range(plan.accumulation_steps):
        ids = torch.randint(0, _SMALLEST_VOCABULARY, shape, generator=generator)
        made.append(Batch(input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids.clone()))
    return made


_SMALLEST_VOCABULARY = 2
"""Ids that every model has."""


def main(arguments: list[str]) -> None:
    """Run one rank: FOLDER RANK."""
    folder, rank = Path(arguments[0]), int(arguments[1])
    job = Job.model_validate_json((folder / "job.json").read_text())
    plan = Plan.model_validate_json((folder / "plan.json").read_text())
    store = f"file://{folder / 'store'}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=plan.mesh.world)
    tracker = watched_steps(job, plan, rank)
    if rank == 0:
        largest = tracker.largest()
        assert largest is not None
        found = {"peaks": [asdict(instant) for instant in peaks(tracker.segments())], "largest": asdict(largest)}
        (folder / RESULT).write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
