"""The training loop: one function from a prepared run folder to its last checkpoint."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch.distributed as dist

from shardwise.engine.mesh import data_rank
from shardwise.engine.optimizer import Schedule, set_learning_rate
from shardwise.report.first_step import first_step_lines
from shardwise.report.progress import Progress
from shardwise.state.checkpoint import TrainingProgress, save
from shardwise.state.live import reshard
from shardwise.train.checks import NotFinite, TrainingFailed, check_adapters, check_replicas, compare_ranks
from shardwise.train.evaluate import held_out_loss
from shardwise.train.first_step import watch
from shardwise.train.metrics import MetricsLog, memory_bytes, memory_name
from shardwise.train.signals import StopSignal, any_rank
from shardwise.train.step import StepResult, training_step
from shardwise.train.tensor_work import tensor_work
from shardwise.train.training import Training

SLOW_STEP_S = 5.0
"""Seconds of a step from which on a stop is looked for between its micro-batches too: torchrun waits 30 s at most."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How training ended, equal on all ranks."""

    state: Literal["finished", "stopped"]
    """Whether every step was done and nobody asked to stop before the exports."""
    step: int
    """Optimizer steps done."""
    checkpoint: Path
    """The last checkpoint."""
    first_loss: float | None
    """Held-out loss (without held-out rows: training loss) before training, when known."""
    last_loss: float | None
    """The same after the last step."""


def run(training: Training, *, progress: Progress | None) -> Outcome:
    """Train to the end or until asked to stop; always ends with a checkpoint.

    Args:
        training: From `start`.
        progress: Where rank 0 shows the run; None on other ranks.

    Raises:
        TrainingFailed: the numbers are no longer finite.
        CheckpointError: a checkpoint could not be written.
    """
    job, info = training.job, training.info
    schedule = Schedule(
        kind=job.schedule, peak=job.learning_rate or 0.0, warmup_steps=job.warmup_steps, total_steps=info.total_steps
    )
    log = _open_log(training)
    saved: Path | None = None
    slow = False
    if training.step == 0:
        _evaluate(training, log, progress)
    while training.step < info.total_steps and not training.stop.agreed(training.device):
        started = time.perf_counter()
        set_learning_rate(training.optimizer, schedule.at(training.step))
        result = _step(training, stop=training.stop if slow else None, progress=progress)
        if result is None:
            break
        seconds = time.perf_counter() - started
        slow = _agree(training, result, slow=seconds > SLOW_STEP_S)
        training.samples_seen = training.batches.next_position(training.samples_seen)
        training.step += 1
        training.last = result
        _record(training, log, progress, result, schedule.at(training.step - 1), seconds)
        if _due(job.log.evaluate_every, training.step, info.total_steps):
            _evaluate(training, log, progress)
        if job.checkpoint.every and training.step % job.checkpoint.every == 0:
            saved = save_checkpoint(training)
    if training.step == info.total_steps and training.step not in training.held_out_losses:
        _evaluate(training, log, progress)
    if saved is None or training.step % max(1, job.checkpoint.every) != 0:
        saved = save_checkpoint(training)
    if log is not None:
        log.close()
    return _outcome(training, saved)


def _step(training: Training, *, stop: StopSignal | None, progress: Progress | None) -> StepResult | None:
    """Train on the next global batch, the first time under observation."""
    if training.watched:
        return _trained(training, stop)
    result, watched = watch(
        lambda: _trained(training, None),
        model=training.model,
        optimizer=training.optimizer,
        plan=training.plan,
        units=training.units,
        mesh=training.mesh,
        tensor=tensor_work(
            training.job,
            training.plan,
            training.source.config,
            training.batches.micro_batches(training.samples_seen),
        ),
    )
    if watched is not None:
        training.watched = True
        if dist.get_rank() == 0:
            training.folder.write_first_step(watched.collectives, watched.dtypes)
        if progress is not None:
            lines = first_step_lines(watched.collectives, watched.dtypes, compared=watched.compared)
            progress.message("\n".join(lines))
    return result


def _trained(training: Training, stop: StopSignal | None) -> StepResult | None:
    """Run one step; the numbers that stop a run come with the rows that they come from."""
    try:
        return training_step(
            training.model,
            training.batches.micro_batches(training.samples_seen),
            plan=training.plan,
            optimizer=training.optimizer,
            scaler=training.scaler,
            max_grad_norm=training.job.max_grad_norm,
            device=training.device,
            stop=stop,
        )
    except NotFinite as error:
        raise TrainingFailed(f"step {training.step + 1}: {error}; {_whereabouts(training, error)}") from error


def _whereabouts(training: Training, error: NotFinite) -> str:
    if not error.micro_batches:
        return "every forward's own loss was finite, so it is the gradients: lower learning_rate or max_grad_norm"
    rank, micro_batch = error.micro_batches[0]
    rows = training.batches.row_numbers(training.samples_seen, micro_batch, data_rank(training.plan.mesh, rank))
    listed = ", ".join(str(row + 1) for row in rows) or "none"
    return (
        f"first on rank {rank} in micro-batch {micro_batch + 1} of {training.plan.accumulation_steps}, "
        f"which holds training rows {listed} (counted from 1, held-out rows left out)"
    )


def _agree(training: Training, result: StepResult, *, slow: bool) -> bool:
    """Return whether the step was slow on any rank; with self-checks on, compare ranks and, once, look at adapters."""
    if not training.job.self_checks:
        return any_rank(slow, training.device)
    values = {"the step": training.step, "the loss": result.loss, "the gradient norm": result.grad_norm}
    slow = compare_ranks(values, slow, training.device)
    if training.job.use_lora and not training.adapters_checked and not result.skipped:
        check_adapters(training.model, training.device)
        training.adapters_checked = True
    return slow


def _due(every: int, step: int, total: int) -> bool:
    return every > 0 and step % every == 0 and step < total


def _open_log(training: Training) -> MetricsLog | None:
    if dist.get_rank() != 0:
        return None
    training.folder.set_status("running", training.step)
    return MetricsLog(
        training.folder.metrics,
        tensorboard=training.folder.tensorboard if training.job.log.tensorboard else None,
        start_step=training.step,
    )


def _evaluate(training: Training, log: MetricsLog | None, progress: Progress | None) -> None:
    if training.held_out is None:
        return
    loss = held_out_loss(training.model, training.held_out, stop=training.stop, device=training.device)
    if loss is None:
        return
    training.held_out_losses[training.step] = loss
    if log is not None:
        log.write(training.step, held_out_loss=loss)
    if progress is not None:
        progress.message(f"step {training.step}: held-out loss {loss:.4f}")


def _record(
    training: Training,
    log: MetricsLog | None,
    progress: Progress | None,
    result: StepResult,
    learning_rate: float,
    seconds: float,
) -> None:
    memory = memory_bytes(training.device)
    rate = result.input_tokens / seconds
    if log is not None and (training.step % training.job.log.every == 0 or training.step == training.info.total_steps):
        log.write(
            training.step,
            loss=result.loss,
            grad_norm=result.grad_norm,
            learning_rate=learning_rate,
            trained_tokens=result.trained_tokens,
            tokens=result.input_tokens,
            tokens_per_s=round(rate, 1),
            seconds=round(seconds, 4),
            memory_bytes=memory,
            memory=memory_name(training.device),
            skipped=result.skipped,
            loss_scale=result.scale,
        )
    if progress is not None:
        step, held_out = next(reversed(training.held_out_losses.items()), (None, None))
        progress.update(
            training.step,
            loss=result.loss,
            tokens_per_s=rate,
            memory_bytes=memory,
            held_out_loss=held_out,
            held_out_step=step,
        )
        if result.skipped:
            progress.message(
                f"step {training.step}: a gradient overflowed in fp16, no update on any rank; "
                f"loss scale is now {result.scale:g}"
            )


def save_checkpoint(training: Training) -> Path:
    """Write a checkpoint of the run as it stands. Every rank calls it.

    Raises:
        TrainingFailed: copies of the same weights differ; nothing is written.
        CheckpointError: on every rank, when any rank could not write.
    """
    if training.job.self_checks:
        reshard(training.model)
        check_replicas(training.model, training.plan.mesh)
    return save(
        training.folder.checkpoints,
        model=training.model,
        optimizer=training.optimizer,
        progress=TrainingProgress(step=training.step, samples_seen=training.samples_seen),
        extra={
            "scaler": training.scaler.state_dict(),
            "held_out_losses": training.held_out_losses,
        },
        fingerprint=training.plan.fingerprint(),
        keep=training.job.checkpoint.keep,
    )


def _outcome(training: Training, checkpoint: Path) -> Outcome:
    losses = training.held_out_losses
    done = training.step >= training.info.total_steps and not training.stop.agreed(training.device)
    return Outcome(
        state="finished" if done else "stopped",
        step=training.step,
        checkpoint=checkpoint,
        first_loss=losses.get(0),
        last_loss=losses.get(training.step, training.last.loss if training.last and not losses else None),
    )
