"""The article's changes of a plan over a grid of models, machines and batches: how much faster a step gets.

gains(("prefetch.backward=0",), ("prefetch.backward=1",))[Cell("8xA10", "qwen-7b", "LoRA", 1)].percent
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import NamedTuple

from shardwise.catalogue.clusters import find_cluster
from shardwise.catalogue.models import find_model
from shardwise.planner.advice import by_estimate
from shardwise.planner.by_shape import Planned, plan_by_shape
from shardwise.predict.step_time import timeline_of
from shardwise.spec.cluster import Cluster
from shardwise.spec.model_spec import ModelSpec
from shardwise.spec.reader import read_job
from shardwise.spec.timeline import Timeline
from shardwise.spec.workload import Workload

MODELS = ("qwen-7b", "llama-3-8b", "llama-2-13b", "qwen2.5-14b", "llama-3-70b")
CLUSTERS = (
    "8xA10",
    "8xRTX-4090",
    "8xA100-SXM-80GB",
    "8xH100-SXM-80GB",
    "2x8xA100-SXM-80GB eth-25",
    "2x8xA100-SXM-80GB eth-100",
    "2x8xA100-SXM-80GB ib-8x200",
    "2x8xH100-SXM-80GB ib-8x400",
)
WHOLE, LORA = "all weights", "LoRA"
METHODS: Mapping[str, tuple[str, ...]] = {WHOLE: (), LORA: ("use_lora=true", "lora_rank=64")}
"""What trains -> settings."""
ROWS = (1, 4)
"""Rows per card and forward."""
COMMON = ("fsdp=FULL_SHARD", "mixed_precision=bf16", "activation_checkpointing=true", "seq_len=2048")
"""Settings of every plan; those of a change come behind and win."""

_workloads: dict[tuple[str, str], Workload] = {}


class Cell(NamedTuple):
    """A cell of the grid."""

    cluster: str
    """Of CLUSTERS."""
    model: str
    """Of MODELS."""
    method: str
    """Of METHODS."""
    rows: int
    """Of ROWS."""


class Gain(NamedTuple):
    """What a change brings."""

    percent: float
    """Tokens per second more."""
    fits: bool
    """The plan with the change fits on the cards."""


@cache
def machines(name: str) -> Cluster:
    """Return a cluster."""
    return find_cluster(name)


@cache
def shape(name: str) -> ModelSpec:
    """Return a model."""
    return find_model(name)


@cache
def planned(cell: Cell, *settings: str) -> Planned:
    """Return the plan of a cell. Cells with equal workloads share one, whose parts are then remembered."""
    cluster = machines(cell.cluster)
    batch = (f"micro_batch={cell.rows}", f"global_batch={cell.rows * cluster.world}")
    given = [f"model={cell.model}", *COMMON, *batch, *METHODS[cell.method], *settings]
    found = plan_by_shape(read_job(None, given, needs_data=False), shape(cell.model), cluster)
    return replace(found, workload=_workloads.setdefault((cell.model, cell.method), found.workload))


@cache
def step(cell: Cell, *settings: str) -> Timeline:
    """Return the step of a cell, without spans and waits."""
    plan = planned(cell, *settings)
    return timeline_of(plan.workload, plan.plan, plan.cluster, brief=True)


@cache
def fits(cell: Cell, *settings: str) -> bool:
    """Whether the plan of a cell fits on its cards."""
    device = by_estimate(planned(cell, *settings)).footprint.device
    return device is not None and device.fits is True


def gains(before: Sequence[str], after: Sequence[str]) -> dict[Cell, Gain]:
    """Return what a change of settings brings, over the whole grid."""
    return {
        cell: Gain(100 * (step(cell, *before).step_s / step(cell, *after).step_s - 1), fits(cell, *after))
        for cell in _cells()
    }


def _cells() -> list[Cell]:
    return [
        Cell(cluster, model, method, rows)
        for rows in ROWS
        for cluster in CLUSTERS
        for model in MODELS
        for method in METHODS
    ]


def fitting(found: Mapping[Cell, Gain], chosen: Callable[[Cell], bool] = lambda cell: True) -> list[float]:
    """Return the gains, in percent, of those chosen cells that fit."""
    return [one.percent for cell, one in found.items() if one.fits and chosen(cell)]
