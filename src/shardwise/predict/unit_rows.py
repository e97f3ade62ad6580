"""The communication units of a model by formula of its ModelSpec: no torch, no model built.

Two forms of the same thing:

- `unit_table(workload, plan)`: one row per unit, equal to `engine.unit_table.unit_table(model, plan)` of the real model
  with its adapters, names included.
- `unit_kinds(workload, plan)`: units that differ in name and number alone are one `UnitKind` with a count, in the order
  of their first unit, the root last. This is the fast form: what depends on the model, its adapters and the layout is
  computed once and remembered as long as the ModelSpec lives. Asked again, it costs a dictionary lookup (a few
  microseconds), for another shard axis or dtype some fifty. For that the same ModelSpec object has to be given.

A UnitKind says besides its row what one rank holds of a unit: its shards by trained and frozen (padded as FSDP2 stores
them), the gradients of its gathered weights, and every tensor with its shape.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from shardwise.catalogue.models import checkpoint_dtype
from shardwise.predict.planned import OUTSIDE
from shardwise.predict.remembered import Remembered
from shardwise.predict.unit_groups import Group, Grouped, Part, Structure, make_groups, make_structure, unit_name
from shardwise.predict.unit_kind import UnitKind, UnitTensor
from shardwise.spec.method import Lora
from shardwise.spec.model_spec import ModelSpec
from shardwise.spec.plan import Plan
from shardwise.spec.problems import BadInput, Problem
from shardwise.spec.strict import DTYPE_BYTES, Dtype
from shardwise.spec.units import UnitRow, UnitTable
from shardwise.spec.workload import Workload

__all__ = ["UnitKind", "UnitTensor", "unit_kinds", "unit_table"]

TORCH_NAME: dict[Dtype, str] = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


class _Layout(NamedTuple):
    """What decides the sizes of units, and nothing else of a Plan."""

    shard: int
    tensor: int
    sequence_parallel: bool
    reshard: bool | int
    units: tuple[tuple[str, ...], str, str]
    checkpointing: str
    frozen: Dtype | str | None
    trained: Dtype
    param: Dtype
    reduce: Dtype


@dataclass(frozen=True, slots=True)
class _Sharded:
    """Sizes of one Unit for one shard axis and its storage dtypes."""

    tensors: tuple[UnitTensor, ...]
    whole: int
    whole_trained: int
    local: int
    """Elements gathered on one rank of a tensor group."""
    local_trained: int
    rank: int
    """Elements of one rank's shards, padded."""
    rank_trained: int
    frozen_bytes: int
    """Bytes of one rank's frozen shards."""
    stored: dict[str, int]
    """Bytes of all shards by dtype."""


@dataclass(frozen=True, slots=True)
class _Sized:
    """Units with their sizes."""

    kinds: tuple[UnitKind, ...]
    """One per group."""
    grouped: Grouped
    """The groups."""


_structures: Remembered[Structure] = Remembered()
_groupings: Remembered[Grouped] = Remembered()
_shards: Remembered[dict[int, _Sharded]] = Remembered()
_sized: Remembered[_Sized] = Remembered()
_tables: Remembered[UnitTable] = Remembered()


def unit_kinds(workload: Workload, plan: Plan) -> tuple[UnitKind, ...]:
    """Return the units of a model by kind, in the order of their first, the root last.

    Raises:
        BadInput: as `unit_table`.
    """
    return _sizes(workload, plan).kinds


def unit_table(workload: Workload, plan: Plan) -> UnitTable:
    """Return the units that `engine.apply` makes of a model with its adapters, in the engine's order.

    Raises:
        BadInput: units, adapters or a tensor axis that the model does not take, or frozen weights of a dtype that is
            not known.
    """

    def made() -> UnitTable:
        sized = _sizes(workload, plan)
        rows = [
            sized.kinds[place].row.model_copy(update={"name": name, "block": block})
            for (place, block), name in zip(sized.grouped.order, sized.grouped.names, strict=True)
        ]
        return UnitTable(rows=tuple(rows))

    return _tables.get(workload.model, (workload.lora, _layout(plan)), made)


def _sizes(workload: Workload, plan: Plan) -> _Sized:
    layout, lora, model = _layout(plan), workload.lora, workload.model
    return _sized.get(model, (lora, layout), lambda: _make_sizes(model, lora, plan))


def _layout(plan: Plan) -> _Layout:
    mesh, dtypes, units = plan.mesh, plan.dtypes, plan.units
    return _Layout(
        mesh.shard,
        mesh.tensor,
        mesh.sequence_parallel,
        plan.reshard_after_forward,
        (units.wrap, units.embedding, units.head),
        plan.activation_checkpointing,
        dtypes.frozen_storage,
        dtypes.trained_storage,
        dtypes.param,
        dtypes.reduce,
    )


def _make_sizes(model: ModelSpec, lora: Lora | None, plan: Plan) -> _Sized:
    layout = _layout(plan)
    key = (lora, layout.units, layout.tensor, layout.sequence_parallel)
    structure = _structures.get(model, key, lambda: make_structure(model, lora, plan))
    grouped = _groupings.get(
        model, (*key, layout.checkpointing), lambda: make_groups(model, structure, layout.checkpointing)
    )
    frozen, trained = _frozen_dtype(model, lora, plan), layout.trained
    shards = _shards.get(
        model,
        (*key, layout.shard, frozen, trained),
        lambda: {unit: _shard(parts, layout.shard, frozen, trained) for unit, parts in structure.parts.items()},
    )
    kinds = tuple(_kind(model, structure, group, plan, shards[id(group.unit)]) for group in grouped.groups)
    return _Sized(kinds, grouped)


def _shard(parts: tuple[Part, ...], shard: int, frozen: Dtype, trained: Dtype) -> _Sharded:
    """Return the sizes of a unit whose parameters have their rows padded to a multiple of `shard` ranks."""
    tensors, stored = [], dict[str, int]()
    whole = local = rank = whole_trained = local_trained = rank_trained = frozen_bytes = 0
    for part in parts:
        dtype: Dtype = trained if part.trained else "fp32" if part.fp32 else frozen
        elements = -(-part.shape[0] // shard) * part.row
        tensors.append(UnitTensor(part.name, part.shape, part.trained, dtype, elements))
        stored[TORCH_NAME[dtype]] = stored.get(TORCH_NAME[dtype], 0) + part.whole * DTYPE_BYTES[dtype]
        whole, local, rank = whole + part.whole, local + part.local, rank + elements
        if part.trained:
            whole_trained, local_trained = whole_trained + part.whole, local_trained + part.local
            rank_trained += elements
        else:
            frozen_bytes += elements * DTYPE_BYTES[dtype]
    return _Sharded(
        tuple(tensors), whole, whole_trained, local, local_trained, rank, rank_trained, frozen_bytes, stored
    )


def _frozen_dtype(model: ModelSpec, lora: Lora | None, plan: Plan) -> Dtype:
    """Return the storage dtype of frozen weights."""
    frozen = plan.dtypes.frozen_storage
    if lora is None or frozen is None:
        return plan.dtypes.trained_storage
    if frozen != "checkpoint":
        return frozen
    stored = checkpoint_dtype(model)
    if stored is None:
        reason = f"is not known: the configuration of {model.name} does not say in which dtype its weights are stored"
        raise BadInput(Problem(field="model.dtype", reason=reason, allowed="fp32, bf16, fp16"))
    return stored


def _kind(model: ModelSpec, structure: Structure, group: Group, plan: Plan, sizes: _Sharded) -> UnitKind:
    """Return a group of units with their sizes."""
    unit, dtypes, shard = group.unit, plan.dtypes, plan.mesh.shard
    param, reduce = DTYPE_BYTES[dtypes.param], DTYPE_BYTES[dtypes.reduce]
    block = group.blocks[0] if group.blocks else None
    row = UnitRow(
        name=unit_name(model, unit, block),
        kind=unit.kind,
        parameters=sizes.whole,
        trainable=sizes.whole_trained,
        gathered_bytes=sizes.local * param,
        stored_bytes=sum(sizes.stored.values()),
        stored_by_dtype=sizes.stored,
        all_gather_bytes=sizes.rank * shard * param,
        reduce_scatter_bytes=sizes.rank_trained * shard * reduce,
        reshard_after_forward=False if unit.stays_gathered else plan.reshard_after_forward,
        checkpointed=group.checkpointed,
        block=block,
        has_backward=group.has_backward,
    )
    return UnitKind(
        row=row,
        count=max(1, len(group.blocks)),
        block_kind=None if unit.variant == OUTSIDE else structure.adapted.kinds[unit.variant],
        blocks=group.blocks,
        tensors=sizes.tensors,
        rank_frozen_bytes=sizes.frozen_bytes,
        rank_trained_bytes=sizes.rank_trained * DTYPE_BYTES[dtypes.trained_storage],
        rank_trained_elements=sizes.rank_trained,
        trained_gathered_bytes=sizes.local_trained * param,
    )
