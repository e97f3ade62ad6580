"""A whole probe: devices, links, hosts, and who of them is slow."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date

import torch

from shardwise.measure.probe import compute, hooks, links, peers
from shardwise.measure.probe.team import Team
from shardwise.measure.probe.timing import CPU, CUDA, Limits, Timing, curve
from shardwise.spec.speeds import CollectiveSpeed, DeviceSpeeds, HostSpeeds, Measured
from shardwise.spec.strict import Dtype

DTYPES: tuple[Dtype, ...] = ("fp32", "bf16", "fp16")
"""Dtypes of matrix products; one that a device has no units for is slow, and its curve says so."""

BUSY = 0.7
"""Load of a core, over the last minute, above which something else runs."""
JUDGED_S = 1e-4
"""Shorter operations do not tell a slow rank from a disturbed one."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One curve, with its spread."""

    what: str
    """What was timed, such as `all_gather, 2 hosts x 4`."""
    unit: str
    """`bytes` or `FLOPs`: of the sizes."""
    timings: tuple[Timing, ...]
    """By size."""


@dataclass(frozen=True, kw_only=True)
class Probed:
    """What a probe found."""

    measured: Measured
    """What plans are timed with."""
    rows: tuple[Row, ...]
    """Every curve."""
    findings: tuple[peers.Finding, ...]
    """What is slower than its like."""
    notes: tuple[str, ...]
    """What else the reader of the figures should know."""
    seconds: float
    """How long the probe took, without the start of its ranks."""


def limits_of(device: torch.device) -> Limits:
    """Return how far a probe of such devices goes."""
    return CUDA if device.type == "cuda" else CPU


def probe(team: Team, limits: Limits) -> Probed:
    """Measure everything. Collective; every rank returns the same."""
    started = time.monotonic()
    source, notes = _source(team), _busy(team)
    device, rows = _device(team, limits)
    findings = _slow_devices(rows, team)
    speeds: list[CollectiveSpeed] = []
    host, host_rows = _host(team, limits, source)
    if team.world > 1:
        disturbed = links.disturbance(team, limits)
        costs = {"slowdown": disturbed.slowdown, "post_s": disturbed.post_s}
        device = device.model_copy(update={**costs, "unit_s": hooks.unit_s(team, limits, disturbed.post_s)})
        for timed in links.collectives(team, limits):
            nodes, per_node = timed.shape
            found = curve(timed.timings, source)
            speeds.append(CollectiveSpeed(kind=timed.kind, nodes=nodes, per_node=per_node, curve=found))
            rows.append(Row(what=f"{timed.kind}, {timed.shape}", unit="bytes", timings=timed.timings))
        findings += _slow_links(team, limits)
    seconds = max(team.everyone(time.monotonic() - started))
    measured = Measured(device=device, collectives=tuple(speeds), host=host, source=source)
    return Probed(measured=measured, rows=(*rows, *host_rows), findings=tuple(findings), notes=notes, seconds=seconds)


def _device(team: Team, limits: Limits) -> tuple[DeviceSpeeds, list[Row]]:
    source = _source(team)
    products = {dtype: compute.products(dtype, team, limits) for dtype in DTYPES}
    attended = DTYPES if team.device.type == "cuda" else DTYPES[:2]
    attention = {dtype: compute.attention(dtype, team, limits) for dtype in attended}
    memory = {dtype: compute.memory(dtype, team, limits) for dtype in attended}
    rows = [Row(what=f"matrix products, {dtype}", unit="FLOPs", timings=found) for dtype, found in products.items()]
    rows += [Row(what=f"causal attention, {dtype}", unit="FLOPs", timings=found) for dtype, found in attention.items()]
    rows += [Row(what=f"pointwise operations, {dtype}", unit="bytes", timings=found) for dtype, found in memory.items()]
    speeds = DeviceSpeeds(
        products={dtype: curve(found, source) for dtype, found in products.items()},
        attention={dtype: curve(found, source) for dtype, found in attention.items()},
        memory={dtype: curve(found, source) for dtype, found in memory.items()},
        issue_s=compute.issue_s(team, limits),
    )
    return speeds, rows


def _host(team: Team, limits: Limits, source: str) -> tuple[HostSpeeds, list[Row]]:
    adam = compute.adam(team, limits)
    if team.device.type != "cuda":
        return HostSpeeds(adam_s=adam.seconds), []
    link = compute.host_link(team, limits)
    rows = [Row(what="host to device and back", unit="bytes", timings=link)]
    return HostSpeeds(adam_s=adam.seconds, link=curve(link, source)), rows


def _slow_devices(rows: Sequence[Row], team: Team) -> list[peers.Finding]:
    found = []
    for what in ("matrix products", "causal attention", "pointwise operations"):
        timings = [timing for row in rows if row.what.startswith(what) for timing in row.timings]
        judged = [timing.by_rank for timing in timings if timing.seconds >= JUDGED_S]
        found += peers.slow_devices(what, judged, team)
    return found


def _slow_links(team: Team, limits: Limits) -> list[peers.Finding]:
    found = []
    places = zip(peers.pair_rounds(team.nodes, team.per_node), ("inside a host", "between hosts"), strict=True)
    for schedule, where in places:
        if schedule:
            found += peers.slow_links(peers.measure_pairs(schedule, team, limits), team, where)
    return found


def _busy(team: Team) -> tuple[str, ...]:
    """Say where cores had other work in the minute before the probe."""
    cores = os.cpu_count() or 1
    loads = team.everyone(os.getloadavg()[0] / cores)
    rank = max(range(team.world), key=lambda rank: loads[rank])
    if loads[rank] < BUSY:
        return ()
    where = team.hosts[rank] if team.nodes > 1 else "this machine"
    return (f"{where} was busy before the probe (load {loads[rank]:.1f} a core): it looks slower than it is",)


def _source(team: Team) -> str:
    if team.device.type == "cuda":
        what = f"{torch.cuda.get_device_name(team.device)}, NCCL"
    else:
        what = f"CPU, {torch.get_num_threads()} thread{'s' if torch.get_num_threads() > 1 else ''} a rank, gloo"
    ranks = f"{team.nodes} host{'s' if team.nodes > 1 else ''} x {team.per_node} ranks"
    return f"shardwise probe, {date.today().isoformat()}: {ranks}, {what}, torch {torch.__version__}"
