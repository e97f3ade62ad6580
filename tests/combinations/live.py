"""One row: three steps on live ranks by the product's own code, and the same steps in one process by torch's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache

import torch
from torch import nn

from engine.training import backward, batches_of, full, one_process_model
from shardwise.engine.load import build_skeleton, load_model
from shardwise.engine.mesh import build_mesh, data_rank
from shardwise.engine.names import base_name
from shardwise.engine.optimizer import build_optimizer, decays
from shardwise.engine.scaler import build_scaler
from shardwise.engine.source import open_source
from shardwise.engine.unit_table import unit_table
from shardwise.spec.job import Job, PrecisionChoice
from shardwise.spec.plan import Plan
from shardwise.train.first_step import watch
from shardwise.train.step import StepResult, training_step

STEPS = 3
CPU = torch.device("cpu")

Tensors = dict[str, torch.Tensor]


@dataclass(kw_only=True)
class Trained:
    """What three steps did; whole tensors in fp32 by plain name."""

    losses: list[float]
    """Per step."""
    norms: list[float]
    """Gradient norms before clipping, per step."""
    gradients: Tensors
    """Of the last step, clipped."""
    start: Tensors
    """Weights before the first step."""
    end: Tensors
    """Weights after the last step."""

    @property
    def moved(self) -> Tensors:
        """Change of each weight that is trained."""
        return {name: self.end[name] - self.start[name] for name in self.gradients}


def train_live(rank: int, world: int, job: Job, plan: Plan) -> Trained:
    """Body for `run_ranks`: loading with its read-back, the watched first step, and two more."""
    source, mesh = open_source(job.model), build_mesh(plan.mesh, "cpu")
    skeleton = build_skeleton(job, source.config, source.dtype, source)
    units = unit_table(skeleton.model, plan)
    model = load_model(job, plan, source, mesh)
    start = _weights(model)
    optimizer = build_optimizer(
        model, plan, learning_rate=job.learning_rate, weight_decay=job.weight_decay, momentum=job.momentum
    )
    if plan.optimizer == "adamw_8bit":
        _uncompiled_steps(optimizer)
    scaler = build_scaler(plan, "cpu")
    batches = batches_of(job, plan, data_rank(plan.mesh, rank), plan.mesh.data_ranks)
    position, results = 0, []

    def step() -> StepResult | None:
        return training_step(
            model,
            batches.micro_batches(position),
            plan=plan,
            optimizer=optimizer,
            scaler=scaler,
            max_grad_norm=job.max_grad_norm,
            device=CPU,
        )

    for number in range(STEPS):
        if number == 0:
            result, _ = watch(step, model=model, optimizer=optimizer, plan=plan, units=units, mesh=mesh)
        else:
            result = step()
        assert result is not None
        assert not result.skipped
        results.append(result)
        position = batches.next_position(position)
    return Trained(
        losses=[result.loss for result in results],
        norms=[result.grad_norm for result in results],
        gradients={base_name(n): full(p.grad).float() for n, p in model.named_parameters() if p.grad is not None},
        start=start,
        end=_weights(model),
    )


def _uncompiled_steps(optimizer: torch.optim.Optimizer) -> None:
    """Let torchao's update run as it is written: compiling it takes longer than all rows."""
    optimizer.register_step_pre_hook(lambda *_: torch.compiler.set_stance("force_eager") and None)
    optimizer.register_step_post_hook(lambda *_: torch.compiler.set_stance("default") and None)


def _weights(model: nn.Module) -> Tensors:
    return {base_name(name): full(parameter).float() for name, parameter in model.named_parameters()}


def train_alone(job: Job) -> Trained:
    """The job in one process: the whole global batch in one forward, fp32, eager attention, torch's optimizer."""
    plain = {"model": job.model.model_copy(update={"attention": "eager", "dtype": "fp32" if job.use_lora else None})}
    return _alone(job.model_copy(update={**_unlaid(), **plain}).model_dump_json())


def _unlaid() -> dict[str, object]:
    """Fields of a job that change no result, as they are by default."""
    names = (
        *("fsdp", "mesh", "units", "prefetch", "reduce_scatter", "offload", "accumulation", "micro_batch"),
        *("activation_checkpointing", "mixed_precision", "loss_head", "loss_chunk", "compile"),
        "optimizer_implementation",
    )
    return {name: Job.model_fields[name].default for name in names}


@cache
def _alone(job_json: str) -> Trained:
    job = Job.model_validate_json(job_json)
    assert job.mixed_precision == PrecisionChoice()
    model = one_process_model(job)
    start = _weights(model)
    optimizer, after = _torch_optimizer(job, model)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    batches = _whole_batches(job)
    position, losses, norms = 0, [], []
    for _ in range(STEPS):
        (batch,) = batches.micro_batches(position)
        optimizer.zero_grad()
        losses.append(backward(model, batch, batch.trained_tokens))
        norms.append(float(nn.utils.clip_grad_norm_(trained, job.max_grad_norm)))
        optimizer.step()
        after()
        position = batches.next_position(position)
    return Trained(
        losses=losses,
        norms=norms,
        gradients={base_name(n): p.grad.clone() for n, p in model.named_parameters() if p.grad is not None},
        start=start,
        end=_weights(model),
    )
