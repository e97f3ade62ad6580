"""One row: three steps on live ranks by the product's own code, and the same steps in one process by torch's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
import torch._dynamo.utils as dynamo
from torch import nn

from engine.training import backward, batches_of, full, make_rows, one_process_model
from shardwise.data.loader import TrainBatches
from shardwise.engine.load import build_skeleton, load_model
from shardwise.engine.mesh import build_mesh, data_rank
from shardwise.engine.names import base_name
from shardwise.engine.optimizer import build_optimizer
from shardwise.engine.scaler import build_scaler
from shardwise.engine.source import open_source
from shardwise.engine.unit_table import unit_table
from shardwise.spec.job import Job, PrecisionChoice
from shardwise.spec.plan import Plan
from shardwise.train.first_step import watch
from shardwise.train.step import StepResult, training_step
from shardwise.train.tensor_work import tensor_work

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
            tensor = tensor_work(job, plan, source.config, batches.micro_batches(position))
            result, _ = watch(step, model=model, optimizer=optimizer, plan=plan, units=units, mesh=mesh, tensor=tensor)
        else:
            result = step()
        assert result is not None
        assert not result.skipped
        results.append(result)
        position = batches.next_position(position)
    if plan.compile:
        assert dynamo.counters["stats"]["unique_graphs"], "nothing was compiled"
    return Trained(
        losses=[result.loss for result in results],
        norms=[result.grad_norm for result in results],
        gradients={base_name(n): full(p.grad).float() for n, p in model.named_parameters() if p.grad is not None},
        start=start,
        end=_weights(model),
    )


def _uncompiled_steps(optimizer: torch.optim.Optimizer) -> None:
    """Let torchao's update run as it is written: to compile it takes longer than all rows."""

    def stance(name: str) -> Callable[..., None]:
        return lambda *_: torch.compiler.set_stance(name) and None

    optimizer.register_step_pre_hook(stance("force_eager"))
    optimizer.register_step_post_hook(stance("default"))


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
    batches = TrainBatches(
        make_rows(),
        seed=3,
        global_batch=job.global_batch,
        micro_batch=job.global_batch,
        rank=0,
        data_ranks=1,
        pad_id=1,
    )
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


def _torch_optimizer(job: Job, model: nn.Module) -> tuple[torch.optim.Optimizer, Callable[[], None]]:
    """Return the job's optimizer as its library makes it, and what is done after each of its steps."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim > 1], "weight_decay": job.weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    if job.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=job.learning_rate, momentum=job.momentum), lambda: None
    if job.optimizer == "adamw_8bit":
        from torchao.optim import AdamW8bit

        eight = AdamW8bit(groups, lr=job.learning_rate, block_size=256)
        _uncompiled_steps(eight)
        return eight, lambda: None
    optimizer = torch.optim.AdamW(groups, lr=job.learning_rate)

    def rounded() -> None:
        for state in optimizer.state.values():
            for key in ("exp_avg", "exp_avg_sq"):
                state[key].copy_(state[key].bfloat16())

    return optimizer, rounded if job.optimizer_state_dtype == "bf16" else lambda: None
