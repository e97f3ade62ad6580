"""The step as a trace for ui.perfetto.dev: every span and wait of the Timeline, and no more, in Chrome's format."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from report.footprints import answer, footprint, units
from report.timelines import MS, STEP, span, timed
from shardwise.report.perfetto import trace_events
from shardwise.spec.timeline import ROOT

BLOCKS = "model.layers"
REQUIRED = {
    "X": {"name": str, "cat": str, "ts": float, "dur": float, "pid": int, "tid": int, "args": dict},
    "M": {"name": str, "pid": int, "tid": int, "args": dict},
}
"""What the format's description asks of complete events and of metadata: field -> type."""


def trace(timeline=STEP):
    report = timed(answer(footprint()), timeline).timed
    return json.loads(json.dumps(trace_events(report, units(), BLOCKS)))


def of(content, phase):
    return [event for event in content["traceEvents"] if event["ph"] == phase]


def names(content) -> dict[int, str]:
    return {event["tid"]: event["args"]["name"] for event in of(content, "M") if event["name"] == "thread_name"}


def test_every_event_has_what_the_format_asks_for():
    content = trace()
    assert content["displayTimeUnit"] == "ms"
    for event in content["traceEvents"]:
        for field, kind in REQUIRED[event["ph"]].items():
            assert isinstance(event[field], kind), (field, event)
        assert min(event["pid"], event["tid"]) > 0
        if event["ph"] == "X":
            assert event["ts"] >= 0
            assert event["dur"] >= 0
    metadata = {"process_name", "thread_name", "thread_sort_index"}
    assert {event["name"] for event in of(content, "M")} == metadata


def test_spans_and_waits_are_those_of_the_timeline():
    """Milliseconds of the drawing are thousands of microseconds."""
    content = trace()
    tracks = names(content)
    lanes = {"computing": "compute", "all-gather": "all_gather", "reduce-scatter": "reduce_scatter"}
    found = sorted(
        (lanes[tracks[event["tid"]]], event["cat"], event["args"]["unit"], round(event["ts"]), round(event["dur"]))
        for event in of(content, "X")
        if event["cat"] != "wait"
    )
    assert found == sorted(
        (one.lane, one.what, one.unit, round(one.start * 1e6), round((one.end - one.start) * 1e6)) for one in STEP.spans
    )
    waits = [event for event in of(content, "X") if event["cat"] == "wait"]
    assert [event["ts"] for event in waits] == pytest.approx([wait.start * 1e6 for wait in STEP.waits])
    assert [event["dur"] for event in waits] == pytest.approx([1000, 1000, 2600, 2600, 6100])
    assert {tracks[event["tid"]] for event in waits} == {"computing waits"}


def test_a_wait_says_what_waits_and_for_what():
    waits = [event for event in of(trace(), "X") if event["cat"] == "wait"]
    assert waits[2]["name"] == "wait for reduce-scatter block 2"
    assert waits[2]["args"]["waits"] == "copy into the reduction's buffer block 1, 2.60 ms"


def test_bytes_stand_at_collectives_whose_unit_is_known():
    """Block 0 gathers 2048 bytes and reduces 4096; the table of these tests knows no other."""
    sizes = {
        (event["cat"], event["args"]["unit"]): event["args"]["bytes"]
        for event in of(trace(), "X")
        if "bytes" in event["args"]
    }
    assert sizes == {("all_gather", "model.layers.0"): 2048, ("reduce_scatter", "model.layers.0"): 4096}


def test_what_overlaps_on_one_lane_gets_tracks_of_its_own():
    """Perfetto drops events that overlap on a track without one lying in the other."""
    spans = (*STEP.spans, span("all_gather", "all_gather", ROOT, 2, 4), span("all_gather", "all_gather", 7, 4, 4.5))
    content = trace(replace(STEP, spans=spans))
    assert "all-gather (2)" in names(content).values()
    ends: dict[int, float] = {}
    for event in sorted(of(content, "X"), key=lambda event: (event["tid"], event["ts"])):
        assert event["ts"] >= ends.get(event["tid"], 0.0) - 1e-9
        ends[event["tid"]] = event["ts"] + event["dur"]


def test_one_colour_per_kind_and_one_name_but_for_the_number():
    """Perfetto colours by the name without numbers."""
    gathers = [event for event in of(trace(), "X") if event["cat"] == "all_gather"]
    assert len({event["cname"] for event in gathers}) == 1
    assert {event["name"] for event in gathers} == {
        "all-gather root",
        "all-gather block 0",
        "all-gather block 1",
        "all-gather block 2",
    }


def test_a_report_without_a_timeline_is_a_mistake():
    (report,) = answer(footprint()).reports
    with pytest.raises(ValueError, match="no timeline"):
        trace_events(report, units(), BLOCKS)


def test_the_step_s_own_figures_stand_beside_the_events():
    about = trace()["otherData"]
    assert about["step_s"] == pytest.approx(30 * MS)
    assert about["instrument"] == "estimate"
