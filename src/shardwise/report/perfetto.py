"""A Timeline as a trace that ui.perfetto.dev and chrome://tracing open: a track per lane, and one for waits.

The format is Chrome's trace event format in JSON: complete events (`ph` X) with microseconds in `ts` and `dur`, and
metadata events (`ph` M) that name process and tracks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from shardwise.report.timeline_words import LANE_WORDS, WHAT_WORDS, seconds_text, unit_words
from shardwise.spec.report import Report
from shardwise.spec.timeline import LANES, ROOT, Lane, Span, Wait, What
from shardwise.spec.units import UnitTable

PROCESS = 1
_FIRST_TRACK = 1
"""Process and thread 0 are the idle ones of an operating system, which Perfetto shows apart."""
_DIGITS = 3
"""Of a microsecond."""
_SAME_INSTANT = 0.5e-9
"""Seconds; what lies nearer is one instant at that many digits."""

_COLOURS: dict[What, str] = {
    "forward": "thread_state_running",
    "backward": "rail_animation",
    "copy_in": "generic_work",
    "copy_out": "generic_work",
    "reduce_copy_in": "generic_work",
    "reduce_sum": "generic_work",
    "all_gather": "good",
    "reduce_scatter": "bad",
    "all_reduce": "terrible",
    "fetch": "rail_load",
    "store": "rail_load",
    "leave": "rail_load",
    "return": "rail_load",
    "clip": "rail_response",
    "update": "rail_response",
    "exchange": "thread_state_iowait",
    "issue": "grey",
}
"""Names of chrome://tracing's colours. Perfetto takes a colour by the event's name without its numbers, and so one for
each kind too."""
_WAIT_COLOUR = "black"


def trace_events(report: Report, units: UnitTable, block_list: str) -> dict[str, Any]:
    """Return a report's timeline as a trace; of many alike micro-batches, those that the timeline lists.

    Args:
        report: With a timeline, else ValueError.
        units: The plan's units; their bytes stand at gathers and reductions.
        block_list: Dotted name of the model's list of blocks.
    """
    timeline = report.timeline
    if timeline is None:
        raise ValueError("this report has no timeline")
    sizes = _payloads(units)
    tracks = _tracks(timeline.spans)
    waiting = _FIRST_TRACK + len(tracks)
    events = list(_names(report, [*(name for name, _ in tracks), "computing waits"]))
    for track, (_, spans) in enumerate(tracks, start=_FIRST_TRACK):
        events += [_span(span, track, block_list, sizes) for span in spans]
    events += [_wait(wait, waiting, block_list) for wait in timeline.waits]
    about = {
        "plan": report.plan.fingerprint(),
        "instrument": report.instrument,
        "step_s": timeline.step_s,
        "micro_batches": report.plan.accumulation_steps,
    }
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": about}


def _payloads(units: UnitTable) -> Mapping[tuple[What, str], int]:
    sizes: dict[tuple[What, str], int] = {}
    for row in units.rows:
        name = row.name or ROOT
        sizes["all_gather", name] = row.all_gather_bytes
        sizes["reduce_scatter", name] = row.reduce_scatter_bytes
    return sizes


def _tracks(spans: Iterable[Span]) -> list[tuple[str, list[Span]]]:
    """Return the tracks with their spans: one per lane, and more where things on a lane overlap."""
    lanes: dict[Lane, list[list[Span]]] = {}
    for span in sorted(spans, key=lambda one: (one.start, one.end)):
        rows = lanes.setdefault(span.lane, [])
        free = next((row for row in rows if row[-1].end <= span.start + _SAME_INSTANT), None)
        if free is None:
            rows.append([span])
        else:
            free.append(span)
    return [
        (LANE_WORDS[lane] if number == 0 else f"{LANE_WORDS[lane]} ({number + 1})", row)
        for lane in LANES
        for number, row in enumerate(lanes.get(lane, ()))
    ]


def _names(report: Report, tracks: list[str]) -> Iterator[dict[str, Any]]:
    yield {
        "ph": "M",
        "name": "process_name",
        "pid": PROCESS,
        "tid": _FIRST_TRACK,
        "args": {"name": f"rank 0, {report.instrument}"},
    }
    for track, name in enumerate(tracks, start=_FIRST_TRACK):
        yield {"ph": "M", "name": "thread_name", "pid": PROCESS, "tid": track, "args": {"name": name}}
        yield {"ph": "M", "name": "thread_sort_index", "pid": PROCESS, "tid": track, "args": {"sort_index": track}}


def _span(span: Span, track: int, block_list: str, sizes: Mapping[tuple[What, str], int]) -> dict[str, Any]:
    known = sizes.get((span.what, span.unit))
    return {
        "name": _name(span, block_list),
        "cat": span.what,
        "cname": _COLOURS[span.what],
        **_times(span.start, span.end, track),
        "args": {
            "unit": span.unit,
            "micro_batch": span.micro_batch,
            **({} if known is None else {"bytes": known}),
        },
    }


def _wait(wait: Wait, track: int, block_list: str) -> dict[str, Any]:
    return {
        "name": f"wait for {_name(wait.by, block_list)}",
        "cat": "wait",
        "cname": _WAIT_COLOUR,
        **_times(wait.start, wait.end, track),
        "args": {
            "waits": f"{_name(wait.held_up, block_list)}, {seconds_text(wait.end - wait.start)}",
            "for": _name(wait.by, block_list),
            "micro_batch": wait.held_up.micro_batch,
        },
    }


def _name(span: Span, block_list: str) -> str:
    unit = unit_words(span.unit, block_list) if span.unit else ""
    return f"{WHAT_WORDS[span.what]} {unit.removeprefix('the ')}".strip()


def _times(start: float, end: float, track: int) -> dict[str, Any]:
    begin = round(start * 1e6, _DIGITS)
    return {
        "ph": "X",
        "ts": begin,
        "dur": round(round(end * 1e6, _DIGITS) - begin, _DIGITS),
        "pid": PROCESS,
        "tid": track,
    }
