"""The communication units of a model, listed before anything is sharded."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from shardwise.engine.blocks import find_blocks
from shardwise.engine.checkpointing import is_checkpointed
from shardwise.engine.dtypes import TORCH_DTYPE
from shardwise.spec.plan import Plan
from shardwise.spec.units import UnitRow, UnitTable


def unit_table(model: nn.Module, plan: Plan) -> UnitTable:
    """Return the units that `apply` will make of a model on the meta device, adapters included: blocks, then root."""
    blocks = find_blocks(model)
    in_blocks = {id(p) for p in blocks.modules.parameters()}
    rows = [
        _row(
            f"{_shown(blocks.name)}.{index}",
            type(block).__name__,
            block.parameters(),
            plan,
            reshards=plan.reshard_after_forward,
            checkpointed=is_checkpointed(plan.activation_checkpointing, index),
        )
        for index, block in enumerate(blocks.modules)
    ]
    rest = [p for p in model.parameters() if id(p) not in in_blocks]
    rows.append(_row("root", "embedding, norm, head", rest, plan, reshards=False, checkpointed=False))
    return UnitTable(rows=tuple(rows))


def _shown(name: str) -> str:
    return name.removeprefix("base_model.model.")


def _row(
    name: str, kind: str, parameters: Iterable[nn.Parameter], plan: Plan, *, reshards: bool, checkpointed: bool
) -> UnitRow:
    listed = list(parameters)
    elements = sum(p.numel() for p in listed)
    return UnitRow(
        name=name,
        kind=kind,
        parameters=elements,
        trainable=sum(p.numel() for p in listed if p.requires_grad),
        gathered_bytes=elements * TORCH_DTYPE[plan.dtypes.param].itemsize,
        stored_bytes=sum(p.numel() * p.element_size() for p in listed),
        reshard_after_forward=reshards,
        checkpointed=checkpointed,
    )
