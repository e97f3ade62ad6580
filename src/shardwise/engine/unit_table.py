"""The communication units of a model, listed before anything is sharded."""

from __future__ import annotations

import math
from collections.abc import Mapping

from torch import nn
from torch.distributed.tensor.placement_types import Shard

from shardwise.engine.apply import reshards
from shardwise.engine.dtypes import TORCH_DTYPE
from shardwise.engine.tensor_parallel import planned_placements
from shardwise.engine.units import PlannedUnit, plan_units
from shardwise.spec.plan import Plan
from shardwise.spec.units import UnitRow, UnitTable


def unit_table(model: nn.Module, plan: Plan) -> UnitTable:
    """Return the units that `apply` will make of a model on the meta device, adapters included, in its order.

    Raises:
        BadInput: units that cannot be made.
    """
    planned = plan_units(model, plan)
    split = _split_dims(model, plan)
    return UnitTable(rows=tuple(_row(unit, plan, split) for unit in planned))


def _row(unit: PlannedUnit, plan: Plan, split: Mapping[str, int]) -> UnitRow:
    gathered = padded = reduced = 0
    by_dtype: dict[str, int] = {}
    for name, parameter in unit.parameters:
        shape = list(parameter.shape)
        if name in split:
            shape[split[name]] //= plan.mesh.tensor
        whole = _padded_elements(shape, plan.mesh.shard)
        gathered += math.prod(shape)
        padded += whole
        reduced += whole if parameter.requires_grad else 0
        dtype = str(parameter.dtype).removeprefix("torch.")
        by_dtype[dtype] = by_dtype.get(dtype, 0) + parameter.numel() * parameter.element_size()
    listed = [p for _, p in unit.parameters]
    param, reduce = TORCH_DTYPE[plan.dtypes.param], TORCH_DTYPE[plan.dtypes.reduce]
    return UnitRow(
        name=unit.name.replace("base_model.model.", ""),
        kind=unit.kind,
        parameters=sum(p.numel() for p in listed),
        trainable=sum(p.numel() for p in listed if p.requires_grad),
        gathered_bytes=gathered * param.itemsize,
        stored_bytes=sum(by_dtype.values()),
        stored_by_dtype=by_dtype,
        all_gather_bytes=padded * param.itemsize,
        reduce_scatter_bytes=reduced * reduce.itemsize,
        reshard_after_forward=reshards(unit, plan),
        block=unit.block,
        checkpointed=unit.checkpointed,
        has_backward=unit.has_backward,
    )


def _split_dims(model: nn.Module, plan: Plan) -> dict[str, int]:
    """Parameter -> dim that tensor parallelism splits."""
    if plan.mesh.tensor == 1:
        return {}
    placed = planned_placements(model, plan.mesh)
    axes = 2 if plan.mesh.replicate == 1 else 3
    return {
        name: last.dim for name, (*_, last) in placed.items() if len(placed[name]) == axes and isinstance(last, Shard)
    }


def _padded_elements(shape: list[int], ranks: int) -> int:
    """Elements of a tensor whose rows are padded to a multiple of `ranks`, as FSDP2 shards it; a scalar is one row."""
    rows, rest = (shape[0], math.prod(shape[1:])) if shape else (1, 1)
    return math.ceil(rows / ranks) * ranks * rest
