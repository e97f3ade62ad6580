"""The live units of a model, compared with the unit table and the plan."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from shardwise.engine.apply import units
from shardwise.engine.compat import UnitFacts, unit_facts
from shardwise.engine.dtypes import TORCH_DTYPE
from shardwise.engine.gathers import ExchangedGather
from shardwise.engine.names import unwrapped_name
from shardwise.engine.reductions import ExchangedReduce
from shardwise.engine.units import ROOT
from shardwise.spec.plan import Plan
from shardwise.spec.prefetch import ahead_of, behind_of
from shardwise.spec.units import UnitRow, UnitTable


def check_units(model: nn.Module, plan: Plan, table: UnitTable, device_type: str) -> Iterator[str]:
    """Yield every difference between the live units and what was planned."""
    names = {id(module): _shown(name) for name, module in model.named_modules()}
    live = {names[id(unit)]: unit_facts(unit) for unit in units(model)}
    planned = {_first(row.name): row for row in table.rows}
    for name in planned.keys() - live.keys():
        yield f"unit {name}: planned, not live"
    for name in live.keys() - planned.keys():
        yield f"unit {name}: live, not planned"
    for name in planned.keys() & live.keys():
        facts = live[name]
        if facts is None:
            if planned[name].parameters:
                yield f"unit {name}: holds no parameter, planned {planned[name].parameters:,}"
            continue
        wanted = [
            *_policies(facts, planned[name], plan),
            *_gathers(facts, name, table, names, plan, device_type),
            *_reductions(facts, plan, device_type),
        ]
        yield from (f"unit {name}: {what} is {got}, planned {want}" for what, got, want in wanted if got != want)


def _shown(name: str) -> str:
    return unwrapped_name(name + ".").rstrip(".").removeprefix("base_model.model.") or ROOT


def _first(name: str) -> str:
    return name.partition(" + ")[0]


def _policies(facts: UnitFacts, row: UnitRow, plan: Plan) -> Iterator[tuple[str, Any, Any]]:
    """Yield (what, live, planned)."""
    yield "parameters", sum(p.numel() for p in facts.parameters), row.parameters
    yield "gradients summed", facts.sums_gradients, True
    yield "param dtype", facts.param_dtype, TORCH_DTYPE[plan.dtypes.param]
    yield "reduce dtype", facts.reduce_dtype, TORCH_DTYPE[plan.dtypes.reduce]
    yield "output dtype", facts.output_dtype, TORCH_DTYPE[plan.dtypes.output] if row.name == ROOT else None
    yield "offloaded parameters", facts.offloaded, plan.offload.parameters
    if row.name != ROOT:
        yield "reshard_after_forward", facts.reshard_after_forward, row.reshard_after_forward


def _gathers(
    facts: UnitFacts, name: str, table: UnitTable, names: dict[int, str], plan: Plan, device_type: str
) -> Iterator[tuple[str, Any, Any]]:
    units = [row for row in table.rows if row.name != ROOT]
    order = [_first(row.name) for row in units]
    place = order.index(name) if name != ROOT else None
    ahead = [order[other] for other in ahead_of(units, -1 if place is None else place, plan.prefetch)]
    behind = [order[other] for other in behind_of(units, len(units) if place is None else place, plan.prefetch)]
    yield "forward prefetch", [names[id(module)] for module in facts.forward_prefetch], ahead
    yield "backward prefetch", [names[id(module)] for module in facts.backward_prefetch], behind or [name]
    if device_type == "cpu":
        yield "background gathers", facts.gathers_in_background, plan.prefetch.async_all_gather
        yield "all-gather", type(facts.all_gather).__name__, ExchangedGather.__name__


def _reductions(facts: UnitFacts, plan: Plan, device_type: str) -> Iterator[tuple[str, Any, Any]]:
    wanted = plan.reduce_scatter
    yield "separate reduce-scatter group", facts.separate_group, wanted.separate_group
    yield "reduces gradients", (facts.reduces, facts.all_reduces), (True, True)
    if device_type != "cpu":
        yield "reduce-scatter buffers", facts.reduce_buffers, wanted.buffers
    elif plan.mesh.shard > 1:
        ours = facts.reduce_scatter if isinstance(facts.reduce_scatter, ExchangedReduce) else None
        yield "reduce-scatter", type(facts.reduce_scatter).__name__, ExchangedReduce.__name__
        yield "background reductions", bool(ours and ours.queue), wanted.asynchronous
        yield "reductions in flight", ours.queue.buffers if ours and ours.queue else 1, wanted.buffers
