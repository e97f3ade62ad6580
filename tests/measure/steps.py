"""Real training steps under the counter, for every rank of a forked group."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.debug import CommDebugMode

from engine.training import batches_of, make_plan
from shardwise.engine.load import build_skeleton, load_model
from shardwise.engine.mesh import build_mesh, data_rank
from shardwise.engine.optimizer import build_optimizer
from shardwise.engine.scaler import build_scaler
from shardwise.engine.source import open_source
from shardwise.engine.unit_table import unit_table
from shardwise.measure.collectives import CollectiveCounter
from shardwise.spec.collectives import Collectives
from shardwise.spec.job import Job
from shardwise.spec.plan import Plan
from shardwise.spec.units import UnitTable
from shardwise.train.signals import StopSignal
from shardwise.train.step import training_step


@dataclass
class Counted:
    """What a rank saw of two steps."""

    first: Collectives
    second: Collectives
    plan: Plan
    units: UnitTable
    tokens: tuple[tuple[int, int], ...]
    """Rows and padded length of each micro-batch."""
    torch_counts: dict[str, int]
    """Counts of torch's own CommDebugMode over a third step; empty when not asked for."""


def prepared(rank: int, world: int, job: Job, *, stop: bool = False) -> tuple[Callable[[], None], DeviceMesh]:
    """Return the product's training step on this rank, ready to run any number of times, and its mesh."""
    source, plan = open_source(job.model), make_plan(job, world)
    mesh = build_mesh(plan.mesh, "cpu")
    model = load_model(job, plan, source, mesh)
    optimizer = build_optimizer(model, plan, learning_rate=job.learning_rate, weight_decay=job.weight_decay)
    batches, scaler = batches_of(job, plan, data_rank(plan.mesh, rank), plan.mesh.data_ranks), build_scaler(plan, "cpu")

    def step() -> None:
        training_step(
            model,
            batches.micro_batches(0),
            plan=plan,
            optimizer=optimizer,
            scaler=scaler,
            max_grad_norm=job.max_grad_norm,
            device=torch.device("cpu"),
            stop=StopSignal() if stop else None,
        )

    return step, mesh


def count_steps(rank: int, world: int, job: Job, *, by_torch: bool = False, stop: bool = False) -> Counted:
    """Body for `run_ranks`."""
    source, plan = open_source(job.model), make_plan(job, world)
    units = unit_table(build_skeleton(job, source.config, source.dtype, source).model, plan)
    step, mesh = prepared(rank, world, job, stop=stop)
    counted = []
    for _ in range(2):
        with CollectiveCounter(mesh) as counter:
            step()
        counted.append(counter.collectives)
    torch_counts: dict[str, int] = {}
    if by_torch:
        with CommDebugMode() as debug:
            step()
        torch_counts = {str(operator): count for operator, count in debug.get_comm_counts().items()}
    batches = batches_of(job, plan, data_rank(plan.mesh, rank), plan.mesh.data_ranks).micro_batches(0)
    tokens = tuple((int(batch.input_ids.shape[0]), int(batch.input_ids.shape[1])) for batch in batches)
    return Counted(*counted, plan, units, tokens, torch_counts)
