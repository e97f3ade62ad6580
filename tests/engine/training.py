"""Small training runs on live ranks, and the same steps computed in one process."""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardwise.data.loader import Batch, TrainBatches
from shardwise.data.rows import Row
from shardwise.engine.adapters import init_adapters
from shardwise.engine.load import build_skeleton, load_model
from shardwise.engine.loss import token_loss_sum
from shardwise.engine.mesh import build_mesh
from shardwise.engine.names import base_name
from shardwise.engine.optimizer import build_optimizer
from shardwise.engine.scaler import build_scaler
from shardwise.engine.source import open_source
from shardwise.engine.weights import load_weights
from shardwise.planner.decide import Facts, decide
from shardwise.spec.job import Job
from shardwise.spec.plan import Plan
from shardwise.train.step import StepResult, training_step

ROWS = 7
GLOBAL_BATCH = 6
STEPS = 3
MAX_NORM = 0.5


def make_rows(vocab: int = 101, rows: int = ROWS) -> list[Row]:
    """Rows of 5 to 23 tokens of which 1 to all but one are trained."""
    rng = random.Random(7)
    made = []
    for _ in range(rows):
        length = rng.randint(5, 23)
        ids = [rng.randrange(vocab) for _ in range(length)]
        masked = rng.randint(1, length - 1)
        made.append(Row(input_ids=ids, labels=[-100] * masked + ids[masked:]))
    return made


def make_job(folder: Path, **fields: object) -> Job:
    """A job on a tiny checkpoint."""
    given: dict[str, object] = {
        "model": {"path": str(folder)},
        "data": {"path": "unused.jsonl"},
        "global_batch": GLOBAL_BATCH,
        "learning_rate": 1e-4,
        "weight_decay": 0.01,
        "max_grad_norm": MAX_NORM,
        "lora_rank": 3,
        **fields,
    }
    return Job.model_validate(given)


def make_plan(job: Job, world: int) -> Plan:
    """The job's plan on CPU ranks."""
    source = open_source(job.model)
    frozen = (job.model.dtype or source.dtype) if job.use_lora else None
    skeleton = build_skeleton(job, source.config, source.dtype, source)
    attention = skeleton.plain_model.config._attn_implementation
    return decide(job, Facts(world=world, device_type="cpu", parameters=1, frozen_storage=frozen, attention=attention))


def batches_of(job: Job, plan: Plan, rank: int, ranks: int) -> TrainBatches:
    """One rank's batches of the rows above."""
    return TrainBatches(
        make_rows(),
        seed=3,
        global_batch=plan.global_batch,
        micro_batch=plan.global_batch // ranks // plan.accumulation_steps,
        rank=rank,
        data_ranks=ranks,
        pad_id=1,
    )


@dataclass
class Trace:
    """What a training run did, as whole tensors by plain name."""

    losses: list[float]
    norms: list[float]
    gradients: dict[str, torch.Tensor]
    weights: dict[str, torch.Tensor]


def full(tensor: torch.Tensor) -> torch.Tensor:
    """The whole tensor, on every rank."""
    whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return whole.detach().clone()


def train_on_rank(rank: int, world: int, job: Job, steps: int = STEPS) -> Trace:
    """Body for `run_ranks`: the product's own loading, sharding and steps."""
    source, plan = open_source(job.model), make_plan(job, world)
    model = load_model(job, plan, source, build_mesh(plan, "cpu"))
    optimizer = build_optimizer(model, plan, learning_rate=job.learning_rate, weight_decay=job.weight_decay)
    batches, scaler = batches_of(job, plan, rank, world), build_scaler(plan, "cpu")
    results: list[StepResult] = []
    position = 0
    for _ in range(steps):
        results.append(
            training_step(
                model,
                batches.micro_batches(position),
                optimizer=optimizer,
                scaler=scaler,
                max_grad_norm=job.max_grad_norm,
                device=torch.device("cpu"),
            )
        )
        position = batches.next_position(position)
    return Trace(
        losses=[r.loss for r in results],
        norms=[r.grad_norm for r in results],
        gradients={base_name(n): full(p.grad) for n, p in model.named_parameters() if p.grad is not None},
        weights={base_name(n): full(p) for n, p in model.named_parameters()},
    )


def one_process_model(job: Job) -> nn.Module:
    """The job's model, whole, in this process."""
    source = open_source(job.model)
    skeleton = build_skeleton(job, source.config, source.dtype, source)
    model = skeleton.model.to_empty(device="cpu")
    skeleton.plain_model.tie_weights()  # to_empty gives every plain parameter memory of its own
    for module in model.modules():
        if "Rotary" in type(module).__name__:
            skeleton.plain_model._init_weights(module)
    load_weights(model, skeleton.reads, source)
    if job.use_lora:
        init_adapters(model, job.seed)
    return model


def backward(model: nn.Module, batch: Batch, count: float) -> float:
    """Add a batch's gradients of (sum of losses / count) to `.grad`; returns that loss."""
    logits = model(input_ids=batch.input_ids, attention_mask=batch.attention_mask, use_cache=False).logits
    loss = token_loss_sum(logits, batch.labels) / count
    loss.backward()
    return loss.item()


def train_alone(job: Job, ranks: int, accumulation: int, norms: list[float] | None, steps: int = STEPS) -> Trace:
    """The same steps in one process.

    With `norms` (of a live run): rank by rank, adding gradients in the order in which the ranks' reductions do, and
    clipping with those norms, the only quantity whose order of sums differs. Without: one forward over the whole
    global batch.
    """
    model = one_process_model(job)
    trained = [p for p in model.parameters() if p.requires_grad]
    plan = make_plan(job, 1)
    optimizer = build_optimizer(model, plan, learning_rate=job.learning_rate, weight_decay=job.weight_decay)
    layout = ranks if norms is not None else 1
    sources = [_layout(job, rank, layout, accumulation if norms is not None else 1) for rank in range(layout)]
    trace = Trace(losses=[], norms=[], gradients={}, weights={})
    position = 0
    for step in range(steps):
        micro = [source.micro_batches(position) for source in sources]
        count = sum(b.trained_tokens for batches in micro for b in batches)
        total: list[torch.Tensor | None] = [None] * len(trained)
        loss = 0.0
        for m in range(len(micro[0])):
            reduced: list[torch.Tensor] | None = None
            for rank in range(layout):
                for p in trained:
                    p.grad = None
                loss += backward(model, micro[rank][m], count)
                mine = [p.grad if p.grad is not None else torch.zeros_like(p) for p in trained]
                reduced = mine if reduced is None else [a + b for a, b in zip(reduced, mine, strict=True)]
            total = [r if t is None else t + r for t, r in zip(total, reduced, strict=True)]
        for p, gradient in zip(trained, total, strict=True):
            p.grad = gradient
        norm = torch.nn.utils.get_total_norm([p.grad for p in trained])
        trace.losses.append(loss)
        trace.norms.append(float(norm))
        used = norm if norms is None else torch.tensor(norms[step])
        torch.nn.utils.clip_grads_with_norm_(trained, job.max_grad_norm, used)
        optimizer.step()
        position = sources[0].next_position(position)
    trace.gradients = {base_name(n): p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    trace.weights = {base_name(n): p.detach().clone() for n, p in model.named_parameters()}
    return trace


def _layout(job: Job, rank: int, ranks: int, accumulation: int) -> TrainBatches:
    batch = job.global_batch
    return TrainBatches(
        make_rows(),
        seed=3,
        global_batch=batch,
        micro_batch=batch // ranks // accumulation,
        rank=rank,
        data_ranks=ranks,
        pad_id=1,
    )


@cache
def whole_batch(job_json: str) -> Trace:
    """Reference (b), once per job."""
    return train_alone(Job.model_validate_json(job_json), 1, 1, None)
