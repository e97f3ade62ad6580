"""The optimizer over what trains, and the learning rate of each step."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from shardwise.engine import eight_bit
from shardwise.engine.dtypes import TORCH_DTYPE
from shardwise.engine.resting_state import RestingOptimizer
from shardwise.spec.plan import Plan
from shardwise.spec.plan_rules import of_optimizer
from shardwise.spec.problems import BadInput, Problem

_UNDECAYED = ("A_log",)
"""Parameters with two dimensions that are no weights: logarithms of the decay rates of a Mamba state."""


def check_optimizer(plan: Plan) -> None:
    """Refuse a plan whose optimizer cannot be built here; for the time before ranks start.

    Raises:
        BadInput: a package is missing, or the 8-bit optimizer is asked for what only the others can.
    """
    if plan.optimizer != "adamw_8bit":
        return
    problems = list(of_optimizer(plan))
    if not eight_bit.installed():
        missing = Problem(
            field="optimizer",
            value="adamw_8bit",
            reason="needs torchao, which is not installed",
            allowed="adamw, sgd",
            fix="pip install 'shardwise[int8]', or set optimizer: adamw",
        )
        problems.insert(0, missing)
    if problems:
        raise BadInput(problems)


def build_optimizer(
    model: nn.Module, plan: Plan, *, learning_rate: float, weight_decay: float, momentum: float = 0.0
) -> torch.optim.Optimizer:
    """Return the plan's optimizer over what trains of a sharded model; built last, from the sharded parameters.

    Weights decay; norms, biases and other vectors do not (`decays`). `momentum` is for sgd.

    Raises:
        BadInput: as `check_optimizer`.
    """
    check_optimizer(plan)
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    decayed = {name for name, _ in trained if decays(model, name)}
    halves = [
        {"params": [p for name, p in trained if name in decayed], "weight_decay": weight_decay},
        {"params": [p for name, p in trained if name not in decayed], "weight_decay": 0.0},
    ]
    groups: list[dict[str, Any]] = [group for group in halves if group["params"]]
    if plan.optimizer == "adamw_8bit":
        return eight_bit.build(groups, learning_rate)
    implementation: dict[str, Any] = {
        "fused": plan.optimizer_implementation == "fused",
        "foreach": plan.optimizer_implementation == "foreach",
    }
    optimizer: torch.optim.Optimizer
    if plan.optimizer == "sgd":
        optimizer = torch.optim.SGD(groups, lr=learning_rate, momentum=momentum, **implementation)
    else:
        optimizer = torch.optim.AdamW(groups, lr=learning_rate, **implementation)
    on_host = plan.offload.optimizer and not plan.offload.parameters
    # PyTorch has no rule for fused SGD on sharded tensors; a resting optimizer's worker sees plain ones.
    fused_sgd = plan.optimizer == "sgd" and plan.optimizer_implementation == "fused"
    if on_host or fused_sgd or plan.dtypes.optimizer_state != plan.dtypes.trained_storage:
        return RestingOptimizer(optimizer, dtype=TORCH_DTYPE[plan.dtypes.optimizer_state], on_host=on_host)
    return optimizer


def decays(model: nn.Module, name: str) -> bool:
    """Whether weight decay is for this parameter of `model`: a weight of a linear, convolution, embedding or expert
    layer, or a matrix of LoRA.

    Not for vectors, whatever they do (biases, scales, gates, sinks) and however many axes of length 1 they have, nor
    for norms and biases that happen to be matrices (a norm over heads, the biases of all experts).
    """
    owner, _, own_name = name.rpartition(".")
    module, shape = model.get_submodule(owner), model.get_parameter(name).shape
    vector = len(shape) < 2 or (len(shape) > 2 and sum(size > 1 for size in shape) < 2)
    norm = "norm" in type(module).__name__.lower()
    return not (vector or norm or "bias" in own_name or own_name in _UNDECAYED)


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
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(learning_rate)
        else:
            group["lr"] = learning_rate
