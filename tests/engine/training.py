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
from shardwise.engine.buffers import fill_buffers
from shardwise.engine.expected import Expected, expect
from shardwise.engine.load import build_skeleton, load_model
from shardwise.engine.loss import token_loss_sum
from shardwise.engine.mesh import build_mesh, data_rank
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


def make_expected(job: Job, plan: Plan) -> Expected:
    """What a plan makes of the job's model."""
    source = open_source(job.model)
    return expect(build_skeleton(job, source.config, source.dtype, source).model, plan)


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
    model = load_model(job, plan, source, build_mesh(plan.mesh, "cpu"))
    optimizer = build_optimizer(
        model, plan, learning_rate=job.learning_rate, weight_decay=job.weight_decay, momentum=job.momentum
    )
    batches, scaler = batches_of(job, plan, data_rank(plan.mesh, rank), plan.mesh.data_ranks), build_scaler(plan, "cpu")
    results: list[StepResult] = []
    position = 0
    for _ in range(steps):
        results.append(
            training_step(
                model,
                batches.micro_batches(position),
                plan=plan,
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
    fill_buffers(model, skeleton.plain_model)
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


@dataclass(frozen=True)
class Order:
    """In which order a live run adds up gradients."""

    shard: int | None = None
    """Ranks of the shard axis; None: all."""
    mode: str = "reduce_each"
    """Accumulation mode."""


def _sum(parts: list[list[torch.Tensor]]) -> list[torch.Tensor]:
    """Add up gradients in the order given."""
    total = parts[0]
    for part in parts[1:]:
        total = [a + b for a, b in zip(total, part, strict=True)]
    return total


def _combined(grads: list[list[list[torch.Tensor]]], order: Order) -> list[torch.Tensor]:
    """Sum [rank][micro-batch] gradients as the mesh does: shard ranks first, then replicas."""
    shard = order.shard or len(grads)
    if order.mode == "defer_all":
        grads = [[_sum(micro)] for micro in grads]
    replicas = [grads[start : start + shard] for start in range(0, len(grads), shard)]
    reduced = [[_sum([rank[m] for rank in ranks]) for m in range(len(ranks[0]))] for ranks in replicas]
    if order.mode == "defer_replicate":
        return _sum([_sum(micro) for micro in reduced])
    return _sum([_sum([replica[m] for replica in reduced]) for m in range(len(reduced[0]))])


def train_alone(
    job: Job, ranks: int, accumulation: int, norms: list[float] | None, steps: int = STEPS, order: Order | None = None
) -> Trace:
    """The same steps in one process.

    With `norms` (of a live run): rank by rank, adding gradients in the order in which the ranks' reductions do, and
    clipping with those norms, the only quantity whose order of sums differs. Without: one forward over the whole
    global batch. `ranks` are data ranks.
    """
    model = one_process_model(job)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = build_optimizer(
        model, _alone(job), learning_rate=job.learning_rate, weight_decay=job.weight_decay, momentum=job.momentum
    )
    layout = ranks if norms is not None else 1
    sources = [_layout(job, rank, layout, accumulation if norms is not None else 1) for rank in range(layout)]
    trace = Trace(losses=[], norms=[], gradients={}, weights={})
    position = 0
    for step in range(steps):
        micro = [source.micro_batches(position) for source in sources]
        count = sum(b.trained_tokens for batches in micro for b in batches)
        grads: list[list[list[torch.Tensor]]] = []
        loss = 0.0
        for rank in range(layout):
            grads.append([])
            for batch in micro[rank]:
                for p in trained:
                    p.grad = None
                loss += backward(model, batch, count)
                grads[-1].append([p.grad if p.grad is not None else torch.zeros_like(p) for p in trained])
        for p, gradient in zip(trained, _combined(grads, order or Order()), strict=True):
            p.grad = gradient
        norm = torch.nn.utils.get_total_norm([p.grad for p in trained])
        trace.losses.append(loss)
        trace.norms.append(float(norm))
        used = norm if norms is None else torch.tensor(norms[step])
        if job.max_grad_norm is not None:
            torch.nn.utils.clip_grads_with_norm_(trained, job.max_grad_norm, used)
        optimizer.step()
        position = sources[0].next_position(position)
    trace.gradients = {base_name(n): p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    trace.weights = {base_name(n): p.detach().clone() for n, p in model.named_parameters()}
    return trace


def _alone(job: Job) -> Plan:
    """The job's plan in one process: only its optimizer matters."""
    plain = {
        name: Job.model_fields[name].default for name in ("fsdp", "mesh", "units", "reduce_scatter", "accumulation")
    }
    return make_plan(job.model_copy(update=plain), 1)


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
