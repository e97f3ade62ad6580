"""What a plan needs, by closed formula: the same Footprint that a trace gives, without torch and within microseconds.

    report = estimate(workload, plan, cluster)
    peak = estimate_peak(workload, plan, cluster)      # the highest figure alone, for a search

A step is looked at at a few dozen instants (`terms.candidates`). At each, what sharding keeps alive (`terms`) is added
to what the computation holds (`blocks`); the highest of a phase is its peak.
"""

from __future__ import annotations

from shardwise.predict.blocks import computation
from shardwise.predict.terms.assembly import Assembly, highest, live_at, peak, where
from shardwise.predict.terms.largest import largest_buffer
from shardwise.predict.terms.live import Live
from shardwise.spec.cluster import Cluster
from shardwise.spec.footprint import PHASES, Footprint, Instant, Phase
from shardwise.spec.plan import Plan
from shardwise.spec.report import Report
from shardwise.spec.runtime import Runtime
from shardwise.spec.workload import Workload

SHARDWISE = Runtime()
"""shardwise itself."""


def estimate(workload: Workload, plan: Plan, cluster: Cluster, runtime: Runtime = SHARDWISE) -> Report:
    """Return the memory of a plan on rank 0 by formula.

    Raises:
        BadInput: a model or a layout that no formula describes; `trace` takes those too.
    """
    step = _assembly(workload, cluster, runtime).step(plan)
    loaded: Live = {name: size for name, size in step.sharding.resting.items() if name != "optimizer_states"}
    loaded["temporaries"] = step.workspace
    peaks: dict[Phase, Instant] = {"load": Instant(phase="load", where="root", live=loaded)}
    for phase, candidate in highest(step).items():
        peaks[phase] = Instant(phase=phase, where=where(step, candidate.at), live=live_at(step, candidate))
    footprint = Footprint(
        peaks=tuple(peaks[phase] for phase in PHASES if phase in peaks), largest_buffer=largest_buffer(step, workload)
    )
    return Report(instrument="estimate", plan=plan, footprint=footprint)


def estimate_peak(workload: Workload, plan: Plan, cluster: Cluster, runtime: Runtime = SHARDWISE) -> int:
    """Return the highest bytes that tensors occupy on rank 0 at any instant, as `estimate` does.

    Give the same Workload and Cluster objects for all plans of a search: what plans have in common is remembered.

    Raises:
        BadInput: as `estimate`.
    """
    return peak(_assembly(workload, cluster, runtime).step(plan))


_REMEMBERED = 64
"""Workloads that are remembered; the oldest goes first."""

_assemblies: dict[tuple[int, int, int], tuple[Assembly, Cluster]] = {}


def _assembly(workload: Workload, cluster: Cluster, runtime: Runtime) -> Assembly:
    key = (id(workload), id(cluster), id(runtime))  # an entry keeps all three alive, so their ids stay theirs
    found = _assemblies.get(key)
    if found is None:
        computed = computation(workload, runtime, device_type=cluster.device_type)
        found = _assemblies[key] = (Assembly(computed, cluster.gpu), cluster)
        if len(_assemblies) > _REMEMBERED:
            _assemblies.pop(next(iter(_assemblies)))
    return found[0]
