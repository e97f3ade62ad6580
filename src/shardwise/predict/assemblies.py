"""Steps of workloads as their terms, remembered: what all formulas of one workload on one cluster start from."""

from __future__ import annotations

from shardwise.predict.blocks import computation
from shardwise.predict.remembered import remember
from shardwise.predict.terms.assembly import Assembly
from shardwise.predict.workspace import generation
from shardwise.spec.cluster import Cluster
from shardwise.spec.runtime import Runtime
from shardwise.spec.workload import Workload

_REMEMBERED = 64
"""Workloads that are remembered; the oldest goes first."""

_assemblies: dict[tuple[int, int, int], tuple[Assembly, Cluster]] = {}


def assembly_of(workload: Workload, cluster: Cluster, runtime: Runtime) -> Assembly:
    """Return the assembly of a workload; the same objects give the same one.

    Raises:
        BadInput: a model whose blocks are not known by formula.
    """
    key = (id(workload), id(cluster), id(runtime))  # an entry keeps all three alive, so their ids stay theirs
    found = _assemblies.get(key)
    if found is None:
        kernels = generation(cluster.gpu) if cluster.gpu is not None else ""
        computed = computation(workload, runtime, cluster.device_type, kernels)
        found = remember(_assemblies, key, (Assembly(computed, cluster.gpu), cluster), most=_REMEMBERED)
    return found[0]
