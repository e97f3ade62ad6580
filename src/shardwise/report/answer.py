"""What `shardwise plan` answers: a plan, what instruments say of its memory and its step, what would lower its peak."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from shardwise.report.waits import Waiting, merged_waits
from shardwise.spec.advice import Advice
from shardwise.spec.cluster import Cluster
from shardwise.spec.footprint import CATEGORIES, DeviceMemory, Footprint, HostMemory, Instant
from shardwise.spec.job import Job
from shardwise.spec.plan import Plan
from shardwise.spec.report import Report
from shardwise.spec.throughput import Throughput
from shardwise.spec.timeline import LANES, Timeline
from shardwise.spec.units import UnitTable
from shardwise.spec.workload import Workload


@dataclass(frozen=True, kw_only=True)
class PlanAnswer:
    """One plan, judged. Terminal and JSON are both made from this, so that their figures agree."""

    job: Job
    """What was asked, with row length and batch filled in."""
    workload: Workload
    """What a step computes."""
    cluster: Cluster
    """Where it would run."""
    plan: Plan
    """The decisions."""
    units: UnitTable
    """What is gathered and stored together."""
    reports: tuple[Report, ...]
    """What each instrument says, in the order in which they were asked for; at least one."""
    advice: tuple[Advice, ...]
    """What would lower the peak, the most first."""
    throughput: Throughput | None = None
    """What the time of a step comes to, of `timed`; None: no instrument says how long a step takes."""

    @property
    def verdict(self) -> Report:
        """The report that decides whether it fits: the last one that was asked for."""
        return self.reports[-1]

    @property
    def timed(self) -> Report | None:
        """The last report that says how long a step takes; None: there is none."""
        return next((report for report in reversed(self.reports) if report.timeline is not None), None)

    @property
    def fits(self) -> bool | None:
        """Whether cards and host hold it; None where no limit is known."""
        footprint = self.verdict.footprint
        known = [answer for answer in (device_fits(footprint), host_fits(footprint)) if answer is not None]
        return all(known) if known else None


def device_fits(footprint: Footprint) -> bool | None:
    """Tell whether the card holds it; None where no limit is known."""
    return None if footprint.device is None else footprint.device.fits


def host_fits(footprint: Footprint) -> bool | None:
    """Tell whether a node's memory holds it, from loading to the export; None where no limit is known."""
    host = footprint.host
    return None if host is None or host.limit is None else host_peak(host)[1] <= host.limit


def host_stages(host: HostMemory) -> dict[str, int]:
    """Return the bytes of each stage of a run."""
    return {"loading": host.loading, "training": host.training, "exporting": host.exporting}


def host_peak(host: HostMemory) -> tuple[str, int]:
    """Return the stage that needs most, and its bytes."""
    return max(host_stages(host).items(), key=lambda item: item[1])


def answer_to_json(answer: PlanAnswer) -> dict[str, Any]:
    """Return an answer as JSON; `docs/plan.md` documents the schema. Figures are in bytes and seconds."""
    model = answer.workload.model
    return {
        "model": {"name": model.name, "parameters": model.parameters, "blocks": model.layers, "note": model.note},
        "cluster": answer.cluster.model_dump(mode="json"),
        "job": answer.job.model_dump(mode="json"),
        "plan": {**answer.plan.model_dump(mode="json"), "fingerprint": answer.plan.fingerprint()},
        "fits": answer.fits,
        "reports": [report_to_json(report) for report in answer.reports],
        "throughput": None if answer.throughput is None else throughput_to_json(answer.throughput),
        "advice": [_advice(advice) for advice in answer.advice],
    }


def report_to_json(report: Report) -> dict[str, Any]:
    """Return one instrument's report as JSON, without its plan."""
    footprint = report.footprint
    return {
        "instrument": report.instrument,
        "footprint": {
            "peak": _instant(footprint.peak),
            "peaks": [_instant(instant) for instant in footprint.peaks],
            "largest_buffer": asdict(footprint.largest_buffer),
            "device": None if footprint.device is None else _device(footprint.device),
            "host": None if footprint.host is None else _host(footprint.host, host_fits(footprint)),
        },
        "timeline": None if report.timeline is None else timeline_to_json(report.timeline, report.plan),
        "notes": list(report.notes),
    }


def timeline_to_json(timeline: Timeline, plan: Plan) -> dict[str, Any]:
    """Return how long a step takes and what computing waits for as JSON; its spans are in the trace of `--perfetto`."""
    return {
        "step_s": timeline.step_s,
        "communication_s": timeline.communication_s,
        "exposed_s": timeline.exposed_s,
        "overlap_efficiency": timeline.overlap_efficiency,
        "tensor_s": timeline.tensor_s,
        "busy": {lane: timeline.busy[lane] for lane in LANES if timeline.busy.get(lane)},
        "exposed": {lane: timeline.exposed[lane] for lane in LANES if timeline.exposed.get(lane)},
        "waits": [_waiting(waiting) for waiting in merged_waits(timeline, plan.accumulation_steps)],
        "notes": list(timeline.notes),
    }


def throughput_to_json(throughput: Throughput) -> dict[str, Any]:
    """Return what the time of a step comes to as JSON."""
    return {
        "step_s": throughput.step_s,
        "tokens": throughput.tokens,
        "tokens_per_s": throughput.tokens_per_s,
        "tokens_per_s_per_gpu": throughput.tokens_per_s_per_gpu,
        "mfu": throughput.mfu,
        "hfu": throughput.hfu,
        "model_flops": throughput.flops.model,
        "recomputed_flops": throughput.flops.again,
        "peak_flops": throughput.peak_flops,
        "s_per_million_tokens": throughput.s_per_million,
        "price_per_gpu_hour": throughput.price_per_gpu_hour,
        "cost_per_million_tokens": throughput.cost_per_million,
    }


def _waiting(waiting: Waiting) -> dict[str, Any]:
    return {
        "place": waiting.place,
        "phase": waiting.phase,
        "lane": waiting.lane,
        "by": waiting.by,
        "unit": waiting.longest.by.unit,
        "units": list(waiting.units),
        "longest_s": waiting.longest.end - waiting.longest.start,
        "count": waiting.count,
        "total_s": waiting.total_s,
        "too_slow": waiting.too_slow,
    }


def _instant(instant: Instant) -> dict[str, Any]:
    live: Mapping[Any, int] = instant.live
    return {
        "phase": instant.phase,
        "where": instant.where,
        "allocated": instant.allocated,
        "live": {category: live[category] for category in CATEGORIES if live.get(category)},
    }


def _device(device: DeviceMemory) -> dict[str, Any]:
    return {**asdict(device), "fits": device.fits, "tight": device.tight}


def _host(host: HostMemory, fits: bool | None) -> dict[str, Any]:
    return {**asdict(host), "fits": fits}


def _advice(advice: Advice) -> dict[str, Any]:
    return {**asdict(advice), "peak": _instant(advice.peak)}
