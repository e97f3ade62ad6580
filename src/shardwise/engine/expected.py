"""What a plan makes of a model, worked out before anything is done to it, for the live model to be compared with."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn
from torch.distributed.tensor.placement_types import Placement

from shardwise.engine.tensor_parallel import planned_placements
from shardwise.engine.unit_table import unit_table
from shardwise.spec.plan import Plan
from shardwise.spec.units import UnitTable


@dataclass(frozen=True, kw_only=True)
class Expected:
    """The layout of one model under one plan."""

    units: UnitTable
    """Its communication units."""
    placements: dict[str, tuple[Placement, ...]]
    """Parameter, by its name without wrappers -> where it lies, per axis of its mesh."""


def expect(model: nn.Module, plan: Plan) -> Expected:
    """Return what `apply` has to make of a model that is not sharded yet, adapters included.

    Raises:
        BadInput: units or a split that cannot be made.
    """
    return Expected(units=unit_table(model, plan), placements=planned_placements(model, plan.mesh))
