"""How long a plan's step takes, by formula: its Timeline, without torch."""

from __future__ import annotations

from collections.abc import Mapping

from shardwise.predict.assemblies import assembly_of
from shardwise.predict.links import links_of
from shardwise.predict.pace import pace_of
from shardwise.predict.remembered import remember
from shardwise.predict.schedule import simulate
from shardwise.predict.step_costs import Costing
from shardwise.predict.terms.step import Step
from shardwise.predict.unit_costs import Speeds
from shardwise.spec.cluster import Cluster
from shardwise.spec.plan import Plan
from shardwise.spec.runtime import SHARDWISE, Runtime
from shardwise.spec.timeline import Timeline
from shardwise.spec.workload import Workload

_REMEMBERED = 64
"""Workloads that are remembered; the oldest goes first."""

_costings: dict[tuple[object, ...], tuple[Costing, object]] = {}


def timeline_of(
    workload: Workload,
    plan: Plan,
    cluster: Cluster,
    runtime: Runtime = SHARDWISE,
    values: Mapping[str, float] | None = None,
    *,
    brief: bool = False,
) -> Timeline:
    """Return what happens when in one optimizer step of rank 0.

    Give the same Workload and Cluster objects for all plans of a search: what plans have in common is remembered.

    Args:
        workload: What is computed.
        plan: How it is laid out.
        cluster: On what.
        runtime: By which program.
        values: Constants by name that take the place of the usual.
        brief: Without spans and waits, in two thirds of the time: for a search, which asks for totals only.

    Raises:
        BadInput: a model or a layout that no formula describes; speeds of the cluster that are not known.
    """
    step = assembly_of(workload, cluster, runtime).step(plan)
    return timeline_of_step(step, workload, cluster, runtime, values, brief=brief)


def timeline_of_step(
    step: Step,
    workload: Workload,
    cluster: Cluster,
    runtime: Runtime,
    values: Mapping[str, float] | None = None,
    *,
    brief: bool = False,
) -> Timeline:
    """Return the same of a step whose terms are there already."""
    if values is not None:
        return simulate(_costing(step, workload, cluster, runtime, values).step(step), brief=brief)
    compiled, dtype = runtime.compiled or step.plan.compile, step.plan.dtypes.param
    # An entry keeps all three alive, so their ids stay theirs.
    key = (id(workload), id(cluster), id(runtime), compiled, dtype)
    found = _costings.get(key)
    if found is None:
        made = _costing(step, workload, cluster, runtime, None)
        found = remember(_costings, key, (made, (workload, cluster, runtime)), most=_REMEMBERED)
    return simulate(found[0].step(step), brief=brief)


def _costing(
    step: Step, workload: Workload, cluster: Cluster, runtime: Runtime, values: Mapping[str, float] | None
) -> Costing:
    compiled = runtime.compiled or step.plan.compile
    speeds = Speeds(
        cluster=cluster,
        pace=pace_of(cluster, runtime, compiled=compiled, dtype=step.plan.dtypes.param, values=values),
        links=links_of(cluster, values=values),
    )
    return Costing(assembly_of(workload, cluster, runtime).computed, speeds)
