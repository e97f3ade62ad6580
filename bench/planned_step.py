"""What the benches share: a small Llama on disk, and shardwise's own step on it under a plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig

from shardwise.data.loader import Batch
from shardwise.engine.load import load_model
from shardwise.engine.mesh import build_mesh
from shardwise.engine.optimizer import build_optimizer
from shardwise.engine.scaler import build_scaler
from shardwise.engine.source import open_source
from shardwise.machine.prepare import preview
from shardwise.spec.plan import Plan
from shardwise.spec.reader import read_job_dict
from shardwise.spec.units import UnitTable
from shardwise.train.step import training_step

CPU = torch.device("cpu")
LEARNING_RATE, MAX_NORM = 1e-4, 1.0


def save_llama(folder: Path, *, blocks: int, vocab: int, length: int) -> None:
    """Save a Llama of 256 hidden elements and 0.8 million parameters a block."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=256,
        intermediate_size=688,
        num_hidden_layers=blocks,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=length,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)


def random_rows(vocab: int, rows: int, length: int, seed: int) -> Batch:
    """Return rows of random tokens, every one of them trained."""
    ids = torch.randint(0, vocab, (rows, length), generator=torch.Generator().manual_seed(seed))
    return Batch(input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids.clone())


@dataclass(frozen=True, kw_only=True)
class PlannedStep:
    """A model that trains as a plan says."""

    plan: Plan
    """The plan."""
    units: UnitTable
    """Its units."""
    model: nn.Module
    """Sharded."""
    step: Callable[[Sequence[Batch]], float]
    """Trains on this rank's micro-batches; returns the loss over the global batch."""


def planned_step(folder: str, values: Mapping[str, object]) -> PlannedStep:
    """Return shardwise's own step on the ranks of an initialised process group, for a job's settings."""
    job = {"model": folder, "data": "rows.jsonl", **values}
    seen = preview(read_job_dict(job), nproc=dist.get_world_size())
    assert seen.units is not None, "the model is here"
    plan = seen.plan
    model = load_model(seen.job, plan, open_source(seen.job.model), build_mesh(plan.mesh, "cpu"))
    optimizer = build_optimizer(model, plan, learning_rate=LEARNING_RATE, weight_decay=0.0)
    scaler = build_scaler(plan, "cpu")

    def step(batches: Sequence[Batch]) -> float:
        result = training_step(
            model, batches, plan=plan, optimizer=optimizer, scaler=scaler, max_grad_norm=MAX_NORM, device=CPU
        )
        assert result is not None, "nobody asks to stop"
        return result.loss

    return PlannedStep(plan=plan, units=seen.units, model=model, step=step)
