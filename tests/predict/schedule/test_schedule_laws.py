"""What holds for every schedule on GPUs, whatever its seconds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from predict.schedule.steps import step_of
from shardwise.predict.schedule import simulate
from shardwise.predict.schedule.costs import RootCosts, StepCosts, UnitCosts, UpdateCosts
from shardwise.spec.timeline import COMMUNICATION, LANES, Span, Timeline

seconds = st.sampled_from([0.0, 0.0, 0.25, 1.0, 2.0, 3.0, 5.0, 8.0])
modes = st.sampled_from(["reduce_each", "defer_all", "defer_replicate"])


@st.composite
def unit_costs(draw: Any) -> UnitCosts:
    gather, reduce, travel = draw(seconds), draw(seconds), draw(st.sampled_from([0.0, 0.0, 0.0, 2.0, 9.0]))
    copies = draw(seconds)
    return UnitCosts(
        forward=draw(seconds) + 0.5,
        backward=draw(seconds) + 0.5,
        forward_issue=draw(seconds),
        backward_issue=draw(seconds),
        fetch=draw(st.sampled_from([0.0, 0.0, 1.0])),
        copy_in=min(copies, 0.5),
        recopy_in=min(copies, 0.25),
        gather=gather,
        regather=gather if draw(st.booleans()) else 0.0,
        copy_out=copies,
        recopy_out=copies,
        reduce_copy_in=0.25 if reduce else 0.0,
        reduce=reduce,
        all_reduce=draw(seconds) if reduce else 0.0,
        store=draw(st.sampled_from([0.0, 0.0, 2.0])) if reduce else 0.0,
        travel=travel,
    )


@st.composite
def steps(draw: Any) -> StepCosts:
    kinds = draw(st.lists(unit_costs(), min_size=1, max_size=3))
    units = [draw(st.sampled_from(kinds)) for _ in range(draw(st.integers(1, 6)))]
    return step_of(
        *units,
        ahead=draw(st.integers(0, 3)),
        behind=draw(st.integers(0, 3)),
        root=RootCosts(unit=draw(unit_costs()), embed=draw(seconds), head=draw(seconds), head_backward=draw(seconds)),
        update=UpdateCosts(agree=draw(seconds), clip=draw(seconds), clip_exchange=draw(seconds), update=draw(seconds)),
        rules=draw(st.sampled_from(["nccl", "nccl", "fsdp1", "ddp"])),
        late=draw(st.sampled_from([None, 0])),
        buffers=draw(st.integers(1, 3)),
        separate_group=draw(st.booleans()),
        regather_group=draw(st.booleans()),
        micro_batches=draw(st.integers(1, 9)),
        mode=draw(modes),
        slowdown=draw(st.sampled_from([1.0, 1.0, 1.5])),
    )


def computing(step: StepCosts) -> float:
    """Seconds of a step's forwards and backwards while nothing slows them down."""
    root = step.root
    once = root.embed + root.head + root.head_backward + sum(unit.forward + unit.backward for unit in step.units)
    return step.micro_batches * once


@settings(deadline=None)
@given(step=steps())
def test_a_step_takes_at_least_what_any_lane_works(step):
    t = simulate(step)
    assert t.step_s >= computing(step) - 1e-9
    assert all(t.step_s >= t.busy[lane] - 1e-9 for lane in LANES)
    if not step.separate_group and not (step.regather_group and step.rules == "nccl"):
        assert t.step_s >= t.busy["all_gather"] + t.busy["reduce_scatter"] - 1e-9


@settings(deadline=None)
@given(step=steps())
def test_one_thing_at_a_time_on_every_lane(step):
    t = simulate(step)
    for lane in LANES:
        spans = sorted((span.start, span.end) for span in t.spans if span.lane == lane)
        assert all(end <= start + 1e-9 for (_, end), (start, _) in pairwise(spans)), lane
    assert all(0 <= span.start < span.end <= t.step_s + 1e-9 for span in t.spans)


@settings(deadline=None)
@given(step=steps())
def test_waits_are_the_gaps_of_the_compute_lane(step):
    t = simulate(replace(step, micro_batches=min(3, step.micro_batches)))
    spans = sorted((span for span in t.spans if span.lane == "compute"), key=lambda span: span.start)
    ends = [0.0, *(span.end for span in spans)]
    gaps = [(end, span.start, span) for end, span in zip(ends, spans, strict=False) if span.start > end]
    assert [(wait.start, wait.end, wait.held_up) for wait in t.waits] == gaps
    for wait in t.waits:
        assert wait.by in t.spans
        assert wait.by.end == wait.end or (wait.by.lane == "issue" and wait.by.start <= wait.end < wait.by.end)


@settings(deadline=None)
@given(step=steps())
def test_exposed_is_part_of_communication(step):
    t = simulate(step)
    assert 0 <= t.exposed_s <= t.communication_s + 1e-9
    assert all(-1e-9 <= t.exposed[lane] <= t.busy[lane] + 1e-9 for lane in COMMUNICATION)
    assert max(t.exposed.values()) - 1e-9 <= t.exposed_s <= sum(t.exposed.values()) + 1e-9
    assert t.exposed_s <= t.step_s - computing(step) + 1e-9
    assert t.busy["compute"] + t.exposed_s <= t.step_s + 1e-9


@settings(deadline=None)
@given(step=steps())
def test_spans_add_up_to_what_lanes_worked(step):
    t = simulate(replace(step, micro_batches=min(3, step.micro_batches)))
    for lane in LANES:
        assert t.busy[lane] == pytest.approx(sum(span.end - span.start for span in t.spans if span.lane == lane))
    assert exposed_by_instants(t) == pytest.approx((t.exposed_s, t.hidden_s), abs=1e-9)


def exposed_by_instants(t: Timeline) -> tuple[float, float]:
    """Exposed and hidden seconds by looking at every stretch between two neighbouring instants."""
    instants = sorted({instant for span in t.spans for instant in (span.start, span.end)})
    exposed = hidden = 0.0
    for start, end in pairwise(instants):
        lanes = {span.lane for span in t.spans if span.start <= start and span.end >= end}
        if lanes & set(COMMUNICATION):
            exposed += end - start if "compute" not in lanes else 0.0
            hidden += end - start if "compute" in lanes else 0.0
    return exposed, hidden


@settings(deadline=None)
@given(step=steps(), ahead=st.integers(0, 3), behind=st.integers(0, 3), buffers=st.integers(1, 4))
def test_order_changes_nothing_about_how_long_lanes_work(step, ahead, behind, buffers):
    """Prefetch depths and buffers say when, not what; nothing is left out or done twice."""
    step = replace(step, slowdown=1.0)
    other = step_of(*step.units, ahead=ahead, behind=behind)
    changed = replace(step, ahead=other.ahead, behind=other.behind, buffers=buffers)
    assert simulate(changed).busy == pytest.approx(simulate(step).busy)


@settings(deadline=None)
@given(step=steps(), factor=st.sampled_from([2.0, 0.001]))
def test_seconds_have_no_favourite_size(step, factor):
    """Everything twice as slow takes twice as long."""
    scaled = replace(
        step,
        units=tuple(scale(unit, factor) for unit in step.units),
        root=replace(scale(step.root, factor), unit=scale(step.root.unit, factor)),
        update=scale(step.update, factor),
    )
    assert simulate(scaled).step_s == pytest.approx(factor * simulate(step).step_s)


def scale(costs: Any, factor: float) -> Any:
    fields = {name: getattr(costs, name) for name in type(costs).__dataclass_fields__}
    return replace(costs, **{name: value * factor for name, value in fields.items() if isinstance(value, float)})


@settings(deadline=None)
@given(step=steps(), more=st.sampled_from(["forward", "backward", "gather", "regather", "reduce", "copy_out"]))
def test_more_work_never_makes_a_step_shorter(step, more):
    """Where nothing slows computing down: the order of issue is fixed, so every instant is a latest of sums. (What
    leaves for the host while its forward goes on leaves earlier when that takes longer, so it is left out.)"""
    step = replace(step, slowdown=1.0, units=tuple(replace(unit, travel=0.0) for unit in step.units))
    longer = tuple(
        replace(unit, **{more: value + 1}) if (value := getattr(unit, more)) else unit for unit in step.units
    )
    assert simulate(replace(step, units=longer)).step_s >= simulate(step).step_s - 1e-9


def with_row(step: StepCosts, blocks: int, period: int = 1) -> StepCosts:
    """The step with a long row of units between its first unit and one more like it: all alike, or each `period` of
    them like those before, as where every second block is checkpointed."""
    first, last = step.units[0], replace(step.units[-1], travel=0.0)
    checkpointed = replace(last, backward=last.backward + 2)
    units = (first, *([checkpointed, *[last] * (period - 1)] * blocks)[:blocks], first)
    prefetch = step_of(*units, ahead=len(step.ahead[-1]), behind=len(step.behind[-1]))
    return replace(step, units=units, names=prefetch.names, ahead=prefetch.ahead, behind=prefetch.behind)


@settings(deadline=None, max_examples=60)
@given(step=steps(), blocks=st.sampled_from([1, 3, 12]), period=st.integers(1, 3), count=st.integers(6, 30))
def test_multiplied_micro_batches_are_as_if_played(step, blocks, period, count):
    step = replace(with_row(step, blocks, period), micro_batches=count)
    short = simulate(step)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("shardwise.predict.schedule.frame.Frame._steady", lambda *_: False)
        patch.setattr("shardwise.predict.schedule.alike.AlikeUnits.skip", lambda self, place, *_: place)
        full = simulate(step)
    assert short.step_s == pytest.approx(full.step_s, rel=1e-9)
    assert (short.exposed_s, short.hidden_s) == pytest.approx((full.exposed_s, full.hidden_s), rel=1e-7, abs=1e-6)
    assert short.busy == pytest.approx(full.busy, rel=1e-9)
    assert short.exposed == pytest.approx(full.exposed, rel=1e-7, abs=1e-6)


@settings(deadline=None, max_examples=100)
@given(step=steps(), blocks=st.integers(6, 40), period=st.integers(1, 4))
def test_counted_units_are_as_if_played(step, blocks, period):
    """Alike units in the middle are counted; all is as if each had been played."""
    step = with_row(step, blocks, period)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("shardwise.predict.schedule.alike.AlikeUnits.skip", lambda self, place, *_: place)
        played = simulate(step)
    counted, brief = simulate(step), simulate(step, brief=True)
    for t in (counted, brief):
        assert t.step_s == pytest.approx(played.step_s, rel=1e-7)
        assert (t.exposed_s, t.hidden_s) == pytest.approx((played.exposed_s, played.hidden_s), rel=1e-7, abs=1e-6)
        assert t.busy == pytest.approx(played.busy, rel=1e-7)
        assert t.exposed == pytest.approx(played.exposed, rel=1e-7, abs=1e-6)
    assert (brief.spans, brief.waits) == ((), ())
    assert rounded(counted.spans) == rounded(played.spans)
    assert rounded_waits(counted) == rounded_waits(played)


def rounded(spans: Sequence[Span]) -> list[tuple[object, ...]]:
    """Spans by lane and time, to a millionth."""
    return sorted((*span[:4], round(span.start, 6), round(span.end, 6)) for span in spans)


def rounded_waits(t: Timeline) -> list[object]:
    """Waits that are more than a rounding error."""
    long = [wait for wait in t.waits if wait.end - wait.start > 1e-6]
    return [(round(wait.start, 6), round(wait.end, 6), rounded([wait.held_up, wait.by])) for wait in long]
