"""Gradients of several micro-batches: what is reduced when, and where sums wait."""

from __future__ import annotations

from typing import cast

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from shardwise.engine.reductions import reduces_in_background
from shardwise.engine.shards import local
from shardwise.spec.plan import Plan


class Accumulation:
    """One optimizer step's micro-batches on a sharded model; all modes give the same sums.

    `reduce_each` reduces every micro-batch and adds up shards. `defer_all` keeps whole gradients on every rank and
    reduces them once: less communication, the memory of an unsharded gradient. `defer_replicate` reduces to shards
    every time and over the replicas once.
    """

    def __init__(self, model: nn.Module, plan: Plan, count: int) -> None:
        self._root = cast(FSDPModule, model)
        self._mode = plan.accumulation_mode
        self._count = count
        # A reduction in the background may not add to a gradient that exists, so sums wait elsewhere meanwhile.
        self._apart = self._mode == "reduce_each" and count > 1 and reduces_in_background(model)
        self._trained = [p for p in model.parameters() if p.requires_grad]
        self._sums: dict[nn.Parameter, torch.Tensor] = {}

    def before(self, number: int) -> None:
        """Prepare the forward and backward of micro-batch `number`, counted from 0."""
        last = number == self._count - 1
        if self._mode == "defer_all":
            self._root.set_requires_gradient_sync(last)
        elif self._mode == "defer_replicate":
            self._root.set_requires_all_reduce(last)

    def after(self, number: int) -> None:
        """Take in the gradients of micro-batch `number`; after the last one, `.grad` holds the sums."""
        if not self._apart:
            return
        if number > 0:
            self._add()
        if number < self._count - 1:
            self._sums = {p: p.grad for p in self._trained if p.grad is not None}
            for parameter in self._trained:
                parameter.grad = None

    def abandon(self) -> None:
        """Give the step up: no gradient stays, and the next backward reduces as usual."""
        self._sums = {}
        self._root.set_requires_gradient_sync(True)
        self._root.set_requires_all_reduce(True)

    @torch.no_grad()
    def _add(self) -> None:
        """Make `.grad` the sum of what waited and what came, in this order."""
        for parameter, waited in self._sums.items():
            if parameter.grad is not None:
                local(waited).add_(local(parameter.grad))
            parameter.grad = waited
        self._sums = {}
