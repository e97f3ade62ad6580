"""Real training steps under the tracker, the allocator's events beside them, for every rank of a forked group."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from engine.training import make_job, make_plan
from shardwise.data.loader import Batch
from shardwise.engine.load import build_skeleton, load_model
from shardwise.engine.mesh import build_mesh, data_rank
from shardwise.engine.optimizer import build_optimizer
from shardwise.engine.scaler import build_scaler
from shardwise.engine.source import open_source
from shardwise.engine.unit_table import unit_table
from shardwise.measure.allocator_events import AllocatorEvents, allocator_events
from shardwise.measure.storage_log import StorageLog
from shardwise.measure.storages import Segment, StorageTracker
from shardwise.spec.job import Job
from shardwise.spec.plan import Plan
from shardwise.spec.units import UnitTable
from shardwise.train.step import training_step

VOCAB, LENGTH = 1009, 37
"""Odd sizes, big enough that logits and weights are not all alike."""


def wide_job(
    tiny: Callable[..., Path], family: str = "llama", *, layers: int = 3, tied: bool = False, **fields: object
) -> Job:
    """A job on a model whose parts weigh more than rounding."""
    folder = tiny(family, vocab=VOCAB, layers=layers, tied=tied, head_dim=32, heads=4, kv=2)
    return make_job(folder, **{"global_batch": 4, "micro_batch": 2, "lora_rank": 4, **fields})


def make_units(job: Job, world: int) -> UnitTable:
    """What the job's plan gathers and stores together."""
    source = open_source(job.model)
    return unit_table(build_skeleton(job, source.config, source.dtype, source).model, make_plan(job, world))


def whole_rows(plan: Plan, rank: int, rows: int | None = None) -> list[Batch]:
    """One step's micro-batches of a rank; `rows` of each, else the plan's."""
    return rows_of(rows or plan.micro_batch, plan.accumulation_steps, seed=data_rank(plan.mesh, rank))


def rows_of(rows: int, batches: int, *, seed: int) -> list[Batch]:
    """Micro-batches of full-length rows."""
    generator = torch.Generator().manual_seed(seed)
    given = [torch.randint(0, VOCAB, (rows, LENGTH), generator=generator) for _ in range(batches)]
    return [Batch(input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids.clone()) for ids in given]


def tensors_of(batches: list[Batch]) -> list[torch.Tensor]:
    """All tensors of some batches."""
    return [t for batch in batches for t in (batch.input_ids, batch.attention_mask, batch.labels)]


@dataclass(frozen=True)
class Prepared:
    """What a rank trains."""

    plan: Plan
    model: nn.Module
    optimizer: torch.optim.Optimizer
    batches: list[Batch]
    step: Callable[[], None]


def prepare(rank: int, world: int, job: Job) -> Prepared:
    """The product's own loading and steps."""
    source, plan = open_source(job.model), make_plan(job, world)
    return trainer(rank, job, plan, load_model(job, plan, source, build_mesh(plan.mesh, "cpu")))


def trainer(rank: int, job: Job, plan: Plan, model: nn.Module) -> Prepared:
    """The product's own steps on a model that is loaded."""
    optimizer = build_optimizer(
        model, plan, learning_rate=job.learning_rate, weight_decay=job.weight_decay, momentum=job.momentum
    )
    scaler = build_scaler(plan, "cpu")
    batches = whole_rows(plan, rank)

    def step() -> None:
        training_step(
            model,
            batches,
            plan=plan,
            optimizer=optimizer,
            scaler=scaler,
            max_grad_norm=job.max_grad_norm,
            device=torch.device("cpu"),
        )

    return Prepared(plan, model, optimizer, batches, step)


@contextlib.contextmanager
def tracked(run: Prepared):
    """The tracker around steps of a prepared run."""
    with StorageTracker(run.model, run.optimizer) as tracker:
        tracker.add(tensors_of(run.batches), "inputs")
        yield tracker


def segments_of(rank: int, world: int, jobs: Mapping[str, Job]) -> dict[str, list[Segment]]:
    """Body for `run_ranks`: what was at work in two steps of each job, and what lived meanwhile."""
    return {name: _segments(prepare(rank, world, job)) for name, job in jobs.items()}


def _segments(run: Prepared) -> list[Segment]:
    with tracked(run) as tracker:
        run.step()
        run.step()
    return tracker.segments()


@dataclass
class Seen:
    """One step as the tracker saw it, and as the allocator did."""

    tracker_peak: int
    """Most bytes alive of storages that were born in the step."""
    allocator_peak: int
    """The same by the allocator."""
    unseen: dict[str, int] = field(default_factory=dict)
    """Operator -> bytes at the allocator's peak that the tracker's peak does not have."""
    watched: Counter[int] = field(default_factory=Counter)
    """Sizes that the allocator gave out while the tracker watched -> how often."""
    unwatched: Counter[int] = field(default_factory=Counter)
    """The same while it did not."""


def compare(rank: int, world: int, jobs: Mapping[str, Job]) -> dict[str, Seen]:
    """Body for `run_ranks`: of each job, the second step watched, the third not."""
    return {name: _compare(prepare(rank, world, job)) for name, job in jobs.items()}


def _compare(run: Prepared) -> Seen:
    run.step()
    with tracked(run) as tracker:
        entered = sum(1 for _ in tracker.log.sizes())
        watched = _profiled(run.step)
    unwatched = _profiled(run.step)
    peak, by_operator = born_peak(tracker.log, entered)
    allocator = watched.peak()
    unseen = Counter(allocator.by_operator)
    unseen.subtract(by_operator)
    return Seen(peak, allocator.bytes, dict(unseen), _sizes(watched), _sizes(unwatched))


def _profiled(step: Callable[[], None]) -> AllocatorEvents:
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    return allocator_events(profiler)


def _sizes(events: AllocatorEvents) -> Counter[int]:
    """Sizes given out; scalars are left out, as Python makes some of its own."""
    return Counter(event.bytes for event in events.events if event.bytes > 64)


def born_peak(log: StorageLog, entered: int) -> tuple[int, Counter[str]]:
    """Return the most bytes alive of storages born after the first `entered` entries, and by operator."""
    events = list(log.sizes())
    before = {piece for piece, _ in events[:entered]}
    after = [(piece, change) for piece, change in events[entered:] if piece not in before]
    alive = highest = place = 0
    for index, (_, change) in enumerate(after):
        alive += change
        if alive > highest:
            highest, place = alive, index
    operators: Counter[str] = Counter()
    for piece, change in after[: place + 1]:
        operators[str(piece.operator)] += change
    return highest, operators
