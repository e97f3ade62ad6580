"""What a plan needs, by closed formula: the Footprint that a trace gives, and the step's Timeline, without torch.

    report = estimate(workload, plan, cluster)
    peak = estimate_peak(workload, plan, cluster)      # the highest figure alone, for a search

A step is looked at at a few dozen instants (`terms.candidates`). At each, what sharding keeps alive (`terms`) is added
to what the computation holds (`blocks`); the highest of a phase is its peak.
"""

from __future__ import annotations

from collections.abc import Iterator

from shardwise.predict.assemblies import assembly_of
from shardwise.predict.step_time import timeline_of_step
from shardwise.predict.terms.assembly import highest, live_at, loaded, peak, where
from shardwise.predict.terms.largest import largest_buffer
from shardwise.spec.cluster import Cluster
from shardwise.spec.footprint import PHASES, Footprint, Instant, Phase
from shardwise.spec.plan import Plan
from shardwise.spec.plan_rules import broken_rules
from shardwise.spec.problems import BadInput
from shardwise.spec.report import Report
from shardwise.spec.runtime import SHARDWISE, Runtime
from shardwise.spec.workload import Workload


def estimate(workload: Workload, plan: Plan, cluster: Cluster, runtime: Runtime = SHARDWISE) -> Report:
    """Return what tensors of rank 0 occupy under a plan, and how its step goes; `machine_memory` adds what card and
    host hold beside. Where speeds of the cluster are not known there is no Timeline, and a note says why.

    Raises:
        BadInput: a model or a layout that no formula describes; `trace` takes those too.
    """
    _check(plan, cluster, runtime)
    step = assembly_of(workload, cluster, runtime).step(plan)
    peaks: dict[Phase, Instant] = {"load": Instant(phase="load", where="root", live=loaded(step))}
    for phase, candidate in highest(step).items():
        peaks[phase] = Instant(phase=phase, where=where(step, candidate.at), live=live_at(step, candidate))
    footprint = Footprint(
        peaks=tuple(peaks[phase] for phase in PHASES if phase in peaks),
        largest_buffer=largest_buffer(step, workload, runtime),
    )
    notes = tuple(_notes(workload, plan, cluster, runtime))
    try:
        timeline = timeline_of_step(step, workload, cluster, runtime)
    except BadInput as error:
        timeline, notes = None, (*notes, f"no step time: {error.problems[0]}")
    return Report(instrument="estimate", plan=plan, footprint=footprint, timeline=timeline, notes=notes)


def estimate_peak(workload: Workload, plan: Plan, cluster: Cluster, runtime: Runtime = SHARDWISE) -> int:
    """Return the highest bytes that tensors occupy on rank 0 at any instant, as `estimate` does.

    Give the same Workload and Cluster objects for all plans of a search: what plans have in common is remembered.

    Raises:
        BadInput: as `estimate`.
    """
    _check(plan, cluster, runtime)
    return peak(assembly_of(workload, cluster, runtime).step(plan))


def _check(plan: Plan, cluster: Cluster, runtime: Runtime) -> None:
    """Refuse what no plan of shardwise can be; other programs have limits of their own.

    Raises:
        BadInput: naming it.
    """
    if runtime is not SHARDWISE and runtime != SHARDWISE:
        return
    problems = list(broken_rules(plan, cluster.device_type))
    if problems:
        raise BadInput(problems)


def _notes(workload: Workload, plan: Plan, cluster: Cluster, runtime: Runtime) -> Iterator[str]:
    if cluster.gpu is not None:
        yield f"by formula, with the kernels of {cluster.gpu.name}"
    if plan.optimizer == "sgd":
        yield "sgd is taken to have momentum, which is one state"
    if plan.optimizer == "adamw_8bit":
        yield "torchao's compiled update of 8-bit states is taken to hold two fp32 copies of one shard, as on a CPU"
    if plan.compile or runtime.compiled:
        yield "compiled blocks are taken to save what their matrix products and attention need"
    if any(kind.mlp.experts for kind in workload.model.kinds):
        yield "experts by grouped matrix products, whose memory does not depend on which tokens go where"
