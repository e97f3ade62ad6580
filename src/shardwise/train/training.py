"""A run in progress: everything that its steps need, made from a prepared run folder."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardwise.data.loader import HeldOutBatches, TrainBatches, pad_token_id
from shardwise.data.prepared import Rows
from shardwise.engine.load import load_model
from shardwise.engine.mesh import build_mesh, data_rank
from shardwise.engine.optimizer import build_optimizer
from shardwise.engine.scaler import build_scaler
from shardwise.engine.source import Source, open_source
from shardwise.report.run_folder import RunFolder, RunInfo
from shardwise.spec.job import Job
from shardwise.spec.plan import Plan
from shardwise.spec.units import UnitTable
from shardwise.spec.workload import HELD_OUT_PER_TRAINED
from shardwise.state.checkpoint import load
from shardwise.train.signals import StopSignal
from shardwise.train.step import StepResult


@dataclass(kw_only=True)
class Training:
    """A run in progress on one rank: everything that a step needs."""

    folder: RunFolder
    """Where the run is kept."""
    job: Job
    """What was asked."""
    plan: Plan
    """What was decided."""
    info: RunInfo
    """Ranks and number of steps."""
    source: Source
    """Where the model came from."""
    units: UnitTable
    """Communication units, listed before ranks started."""
    mesh: DeviceMesh
    """All ranks."""
    device: torch.device
    """This rank's device."""
    model: nn.Module
    """The live, sharded model."""
    optimizer: torch.optim.Optimizer
    """Over what trains."""
    scaler: torch.amp.GradScaler
    """Disabled unless the computation is in fp16."""
    batches: TrainBatches
    """This rank's training micro-batches."""
    held_out: HeldOutBatches | None
    """This rank's held-out batches."""
    stop: StopSignal
    """Asked to end early."""
    step: int = 0
    """Optimizer steps done."""
    samples_seen: int = 0
    """Position in the data, in rows of all ranks."""
    last: StepResult | None = None
    """The newest step."""
    watched: bool = False
    """The first step of this start was compared with the plan."""
    adapters_checked: bool = False
    """Every adapter was seen to get a gradient."""
    held_out_losses: dict[int, float] = field(default_factory=dict)
    """Step -> held-out loss."""


def start(folder: RunFolder, *, device: torch.device, stop: StopSignal, say: Callable[[str], None]) -> Training:
    """Load model, data and, when resuming, state of a prepared run. Needs the process group; every rank calls it.

    Raises:
        BadInput: weights or checkpoint do not fit.
        PlanNotHonoured: the live model is not what the plan says.
    """
    job, plan, info = folder.read_job(), folder.read_plan(), folder.read_info()
    rank = dist.get_rank()
    place = data_rank(plan.mesh, rank)
    torch.manual_seed(job.seed * 100_003 + place)
    source = open_source(job.model)
    mesh = build_mesh(plan.mesh, device.type)
    model = load_model(job, plan, source, mesh)
    optimizer = build_optimizer(
        model, plan, learning_rate=job.learning_rate or 0.0, weight_decay=job.weight_decay, momentum=job.momentum
    )
    pad_id = pad_token_id(source.tokenizer())
    share = {"rank": place, "data_ranks": plan.mesh.data_ranks, "pad_id": pad_id}
    held_out_rows = HELD_OUT_PER_TRAINED * plan.micro_batch
    held_out_file = folder.data / "held_out.arrow"
    training = Training(
        folder=folder,
        job=job,
        plan=plan,
        info=info,
        source=source,
        units=folder.read_units(),
        mesh=mesh,
        device=device,
        model=model,
        optimizer=optimizer,
        scaler=build_scaler(plan, device.type),
        batches=TrainBatches(
            Rows.open(folder.data / "train.arrow"),
            seed=job.seed,
            global_batch=plan.global_batch,
            micro_batch=plan.micro_batch,
            **share,
        ),
        held_out=HeldOutBatches(Rows.open(held_out_file), micro_batch=held_out_rows, **share)
        if held_out_file.is_file()
        else None,
        stop=stop,
    )
    if info.resume_from is not None:
        _resume(training, Path(info.resume_from), say)
    return training


def _resume(training: Training, path: Path, say: Callable[[str], None]) -> None:
    loaded = load(path, model=training.model, optimizer=training.optimizer)
    training.step, training.samples_seen = loaded.progress.step, loaded.progress.samples_seen
    training.scaler.load_state_dict(loaded.extra["scaler"])
    training.held_out_losses = {int(step): loss for step, loss in loaded.extra["held_out_losses"].items()}
    say(f"resumed from {path.name}: step {training.step}, {training.samples_seen} rows seen")
    for note in loaded.notes:
        say(f"  {note}")
