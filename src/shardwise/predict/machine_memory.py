"""What a machine holds beyond live tensors, added to what an instrument says of those: the card, and the host."""

from __future__ import annotations

from dataclasses import replace

from shardwise.predict.device import device_memory
from shardwise.predict.host import host_memory
from shardwise.predict.unit_rows import unit_kinds
from shardwise.spec.cluster import Cluster
from shardwise.spec.report import Instrument, Report
from shardwise.spec.workload import Workload

_SOURCES: dict[Instrument, str] = {
    "estimate": "estimated",
    "trace": "traced",
    "rehearse": "measured: rank 0 of a rehearsal",
    "run": "measured: rank 0 of a run",
}
"""Instrument -> where its figure of live tensors comes from."""


def with_machine(report: Report, workload: Workload, cluster: Cluster) -> Report:
    """Return a report whose footprint has the figures of the card (None on CPUs) and of the host.

    Raises:
        BadInput: a model or a layout that has no formula.
    """
    plan, footprint = report.plan, report.footprint
    peak = footprint.peak.allocated
    kinds = unit_kinds(workload, plan)
    on_gpus = cluster.gpu is not None
    host = host_memory(
        workload,
        plan,
        cluster,
        kinds,
        allocated=None if on_gpus else peak,
        offloaded=max(instant.live.get("offloaded", 0) for instant in footprint.peaks) if on_gpus else None,
    )
    device = None
    if on_gpus:
        largest = footprint.largest_buffer.bytes
        device = device_memory(peak, plan, cluster, largest_buffer=largest)
        tensors, *others = device.terms
        device = replace(device, terms=(replace(tensors, source=_SOURCES[report.instrument]), *others))
    return replace(report, footprint=replace(footprint, device=device, host=host))
