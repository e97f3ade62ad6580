"""Units of a model grouped: first by what the layout makes of the model, then by what their place says of them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from shardwise.predict.adapted import Adapted, adapted_model
from shardwise.predict.planned import OUTSIDE, Planned, Unit, planned_units
from shardwise.predict.unit_split import Split, generic, refuse_sequence_parallel
from shardwise.spec.method import Lora
from shardwise.spec.model_spec import ModelSpec
from shardwise.spec.plan import Plan


@dataclass(frozen=True, slots=True)
class Group:
    """Units of one Unit that agree in the two flags that depend on their place."""

    unit: Unit
    """The unit; of blocks of one variant one stands for all."""
    blocks: tuple[int, ...]
    """Numbers of its blocks; empty outside blocks."""
    checkpointed: bool
    """Its block is recomputed in backward."""
    has_backward: bool
    """Backward needs its weights."""


class Part(NamedTuple):
    """A parameter as far as shards and dtypes have no say in it."""

    name: str
    """Name in its block or in the model."""
    shape: tuple[int, ...]
    """On one rank of a tensor group."""
    row: int
    """Elements of one of its rows."""
    local: int
    """Elements on one rank of a tensor group."""
    whole: int
    """Elements on all of them."""
    trained: bool
    """It has a gradient."""
    fp32: bool
    """Stored in fp32 where it is frozen, whatever the others are in."""


@dataclass(frozen=True, slots=True)
class Structure:
    """The units of a model with its adapters, for one choice of units and one tensor axis."""

    adapted: Adapted
    """The model with its adapters."""
    planned: Planned
    """Its units."""
    parts: dict[int, tuple[Part, ...]]
    """Parameters of each Unit, by its identity."""


@dataclass(frozen=True, slots=True)
class Grouped:
    """Units grouped, for one setting of checkpointing."""

    groups: tuple[Group, ...]
    """The groups, in the order of their first unit."""
    order: tuple[tuple[int, int | None], ...]
    """Of each unit its group and the number of its block."""
    names: tuple[str, ...]
    """Name of each unit."""


def make_structure(model: ModelSpec, lora: Lora | None, plan: Plan) -> Structure:
    """Return the units of a model with its adapters, as `plan.units` and the tensor axis ask.

    Raises:
        BadInput: units, adapters or a tensor axis that the model does not take.
    """
    tensor = plan.mesh.tensor
    adapted = adapted_model(model, lora, tensor=tensor)
    if plan.mesh.sequence_parallel:
        refuse_sequence_parallel(model, tensor)
    planned, split = planned_units(model, adapted, plan.units), Split(model, tensor)
    inside = (unit for units in planned.inside for unit in units)
    every = (*planned.before, *inside, *planned.after, planned.root)
    return Structure(adapted, planned, {id(unit): _parts(model, unit, split, tensor) for unit in every})


def _parts(model: ModelSpec, unit: Unit, split: Split, tensor: int) -> tuple[Part, ...]:
    prefix = "" if unit.variant == OUTSIDE else f"{model.block_list}.*."
    made = []
    for parameter in unit.parameters:
        shape = list(parameter.shape)
        dim = split.dim(generic(prefix + parameter.name)) if tensor > 1 else None
        if dim is not None:
            shape[dim] //= tensor
        row, whole = math.prod(shape[1:]), math.prod(parameter.shape)
        made.append(Part(parameter.name, tuple(shape), row, shape[0] * row, whole, parameter.trained, parameter.fp32))
    return tuple(made)


def unit_name(model: ModelSpec, unit: Unit, block: int | None) -> str:
    """Return the name of a unit in the model."""
    if block is None:
        return unit.name
    name = f"{model.block_list}.{block}"
    return f"{name}.{unit.name}" if unit.name else name


def make_groups(model: ModelSpec, structure: Structure, checkpointing: str) -> Grouped:
    """Return the units grouped by what their place says of them."""
    planned, adapted = structure.planned, structure.adapted
    every = {"none": 0, "full": 1, "selective": 1}.get(checkpointing)
    every = int(checkpointing.removeprefix("every_")) if every is None else every
    trains = [any(p.trained for p in scope.parameters) for scope in adapted.variants]
    inside = [(unit, index) for index, variant in enumerate(adapted.blocks) for unit in planned.inside[variant]]
    in_order: list[tuple[Unit, int | None]] = [(unit, None) for unit in planned.before]
    in_order += [*inside, *((unit, None) for unit in (*planned.after, planned.root))]
    places: dict[tuple[int, bool, bool], int] = {}
    found: list[tuple[Unit, list[int], bool, bool]] = []
    order: list[tuple[int, int | None]] = []
    flows = False
    for unit, block in in_order:
        recomputed = block is not None and every > 0 and block % every == 0
        flows = flows or any(p.trained for p in unit.parameters)
        needed = flows or unit.trains_inside or (recomputed and trains[unit.variant])
        key = (id(unit), recomputed, needed)
        if key not in places:
            places[key] = len(found)
            found.append((unit, [], recomputed, needed))
        if block is not None:
            found[places[key]][1].append(block)
        order.append((places[key], block))
    names = tuple(unit_name(model, found[place][0], block) for place, block in order)
    return Grouped(tuple(Group(unit, tuple(blocks), *flags) for unit, blocks, *flags in found), tuple(order), names)
