"""Read the dtype of every role back from a live model, its gradients and its optimizer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from shardwise.engine.apply import units
from shardwise.engine.compat import unit_facts
from shardwise.engine.dtypes import DTYPE_NAME
from shardwise.engine.precision import is_rotary
from shardwise.engine.resting_state import resting_places
from shardwise.engine.shards import local
from shardwise.spec.ledger import DtypeLedger, LedgerRow
from shardwise.spec.plan import Plan


class Computing:
    """Dtypes seen while a model computes."""

    def __init__(self) -> None:
        self.weights: set[torch.dtype] = set()
        """Of weights, when their module ran: gathered and cast."""
        self.outputs: set[torch.dtype] = set()
        """Of the model's output: logits, or the loss."""


@contextmanager
def computing_dtypes(model: nn.Module) -> Iterator[Computing]:
    """Watch the forwards inside; no hook stays installed."""
    seen = Computing()
    handles: list[RemovableHandle] = []

    def weights(module: nn.Module, _: Any) -> None:
        seen.weights.update(p.dtype for p in module.parameters(recurse=False) if p.is_floating_point())

    def outputs(_: nn.Module, __: Any, output: Any) -> None:
        seen.outputs.add(output.logits.dtype)

    try:
        for module in model.modules():
            if next(module.parameters(recurse=False), None) is not None:
                handles.append(module.register_forward_pre_hook(weights))
        handles.append(model.register_forward_hook(outputs))
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def dtype_ledger(model: nn.Module, optimizer: torch.optim.Optimizer, plan: Plan, seen: Computing) -> DtypeLedger:
    """Return the ledger of this rank after a step, before its gradients are cleared.

    Args:
        model: Sharded, with its weights resharded.
        optimizer: Its optimizer, after a step.
        plan: What was planned.
        seen: From that step's forwards.
    """
    dtypes = plan.dtypes
    frozen = [local(p) for p in model.parameters() if not p.requires_grad]
    trained = [local(p) for p in model.parameters() if p.requires_grad]
    gradients = [local(p.grad) for p in model.parameters() if p.grad is not None]
    rotary, other = _buffers(model)
    facts = [found for unit in units(model) if (found := unit_facts(unit)) is not None]
    rows = [
        _stored("frozen weights, stored", dtypes.frozen_storage or "as loaded", frozen),
        _stored("trained weights, stored", dtypes.trained_storage, trained),
        _passing("weights, gathered and computed with", dtypes.param, seen.weights),
        _passing("logits or loss, returned", dtypes.output, seen.outputs),
        _passing("gradients, reduced", dtypes.reduce, {found.reduce_dtype for found in facts if found.reduce_dtype}),
        _stored("gradients, stored", dtypes.trained_storage, gradients),
        *_states(optimizer, plan),
        _stored("rotary tables", "fp32", rotary),
        _stored("other floating buffers", dtypes.buffer or "as loaded", other),
        _stored("checkpoint, weights", dtypes.trained_storage, trained),
    ]
    return DtypeLedger(rows=tuple(row for row in rows if row.live))


def _states(optimizer: torch.optim.Optimizer, plan: Plan) -> Iterator[LedgerRow]:
    """Yield one row per state; counters, which are numbers, are left out."""
    for key, places in sorted(resting_places(optimizer).items()):
        if key == "step":
            continue
        planned = "as loaded" if plan.optimizer == "adamw_8bit" else plan.dtypes.optimizer_state
        live = tuple(sorted({_name(dtype) for dtype, _ in places}))
        on_host = plan.offload.optimizer and all(device.type == "cpu" for _, device in places)
        role = f"optimizer state {key}" + (", on the host" if on_host else "")
        yield LedgerRow(role=role, planned=planned, live=live, bytes=sum(places.values()))


def _buffers(model: nn.Module) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return (rotary tables, other floating buffers)."""
    rotary: list[torch.Tensor] = []
    other: list[torch.Tensor] = []
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.is_floating_point():
                (rotary if is_rotary(module, name) else other).append(buffer)
    return rotary, other


def _stored(role: str, planned: str, tensors: Iterable[torch.Tensor]) -> LedgerRow:
    listed = list(tensors)
    return LedgerRow(
        role=role,
        planned="as loaded" if planned == "checkpoint" else planned,
        live=tuple(sorted({_name(tensor.dtype) for tensor in listed})),
        bytes=sum(tensor.numel() * tensor.element_size() for tensor in listed),
    )


def _passing(role: str, planned: str, dtypes: Iterable[torch.dtype]) -> LedgerRow:
    return LedgerRow(role=role, planned=planned, live=tuple(sorted({_name(dtype) for dtype in dtypes})))


def _name(dtype: torch.dtype) -> str:
    return DTYPE_NAME.get(dtype) or str(dtype).removeprefix("torch.")
