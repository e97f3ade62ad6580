"""AdamW over what trains, and the learning rate of each step."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from shardwise.spec.plan import Plan


def build_optimizer(model: nn.Module, plan: Plan, *, learning_rate: float, weight_decay: float) -> torch.optim.AdamW:
    """Return AdamW over the trainable parameters of a sharded model; built last, from the sharded parameters.

    Weights of two or more dimensions decay; norms and biases do not.
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=learning_rate,
        fused=plan.optimizer_implementation == "fused",
        foreach=plan.optimizer_implementation == "foreach",
    )


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Learning rate as a function of the optimizer step alone, whatever the ranks and the accumulation."""

    kind: Literal["constant", "linear", "cosine"]
    """Shape after warm-up: flat, a line to zero, or half a cosine to zero."""
    peak: float
    """Highest learning rate."""
    warmup_steps: int
    """Steps of linear rise."""
    total_steps: int
    """Steps of the whole run."""

    def at(self, step: int) -> float:
        """Learning rate of the optimizer step `step`, counted from 0."""
        if step < self.warmup_steps:
            return self.peak * (step + 1) / (self.warmup_steps + 1)
        if self.kind == "constant":
            return self.peak
        done = (step - self.warmup_steps) / max(1, self.total_steps - self.warmup_steps)
        done = min(1.0, done)
        if self.kind == "linear":
            return self.peak * (1.0 - done)
        return self.peak * 0.5 * (1.0 + math.cos(math.pi * done))


def set_learning_rate(optimizer: torch.optim.Optimizer, learning_rate: float) -> None:
    """Give every parameter group this learning rate."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
