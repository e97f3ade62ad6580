"""Schedules on CPUs, worked out by hand."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.predict.schedule.costs import RootCosts, StepCosts, UnitCosts, UpdateCosts
from shardwise.predict.schedule.gloo import simulate_gloo

UNIT = UnitCosts(forward=4, backward=6, gather=3, regather=3)
NONE = ((), (), ())
AHEAD, BEHIND = ((1,), (), (0,)), ((), (0,), (1,))
"""One unit ahead; the root gathers the first in forward and the last in backward."""


def step(**changes: object) -> StepCosts:
    """Two equal units and a root that does nothing."""
    plain = StepCosts(
        units=(UNIT, UNIT),
        names=("layers.0", "layers.1"),
        root=RootCosts(unit=UnitCosts()),
        update=UpdateCosts(),
        rules="gloo",
        ahead=NONE,
        behind=NONE,
    )
    return replace(plain, **changes)  # type: ignore[arg-type]


def starts(timeline, what):
    return [span.start for span in timeline.spans if span.what == what]


def test_gathers_that_block_are_all_exposed():
    """3 + 4 + 3 + 4 forward, 3 + 6 + 3 + 6 backward: 32, of which 12 are gathers."""
    made = simulate_gloo(step(background_gathers=False))
    assert made.step_s == 32
    assert made.exposed == {"all_gather": 12}
    assert made.overlap_efficiency == 0


def test_a_gather_ahead_hides_under_the_unit_before():
    """The root posts gather 0 (0-3); unit 0 posts gather 1 (3-6) and computes 3-7, unit 1 7-11. In backward the root
    posts gather 1 (11-14), unit 1 posts gather 0 (14-17) and computes 14-20, unit 0 20-26."""
    made = simulate_gloo(step(ahead=AHEAD, behind=BEHIND))
    assert made.step_s == 26
    assert made.exposed == {"all_gather": 6}
    assert made.hidden_s == 6
    assert [(wait.start, wait.end, wait.by.unit) for wait in made.waits] == [(0, 3, "layers.0"), (11, 14, "layers.1")]


REDUCED = replace(UNIT, reduce_copy_in=1, reduce=8)


def test_reductions_in_the_background_wait_when_too_many_are_in_flight():
    """As above until 20; copies 20-21, reduction 1 on the wire 21-29. Unit 0 computes 21-27, copies 27-28 and posts
    reduction 0 (29-37); two are in flight where one may be, so it waits until 29. The end waits until 37."""
    made = simulate_gloo(step(units=(REDUCED, REDUCED), ahead=AHEAD, behind=BEHIND, buffers=1))
    assert made.step_s == 37
    assert starts(made, "reduce_scatter") == [21, 29]
    assert made.exposed["reduce_scatter"] == 9


def test_reductions_that_block():
    """As above until 21; unit 1's reduction 21-29 is waited for; unit 0 computes 29-35, copies 35-36, reduces 36-44."""
    made = simulate_gloo(
        step(units=(REDUCED, REDUCED), ahead=AHEAD, behind=BEHIND, buffers=1, background_reductions=False)
    )
    assert made.step_s == 44
    assert made.exposed["reduce_scatter"] == 16


def test_what_arrived_is_added_up_when_a_reduction_is_finished():
    """One unit at a time: reduction 1 is done at 29, its sum 29-31; then unit 0: 31-37, copy 37-38, 38-46, 46-48."""
    unit = replace(REDUCED, reduce_sum=2)
    made = simulate_gloo(step(units=(unit, unit), ahead=AHEAD, behind=BEHIND, background_reductions=False))
    assert made.step_s == 48
    assert starts(made, "reduce_sum") == [29, 46]


def test_computing_beside_the_wire_is_slower():
    """Gather 1 is on the wire 3-6; unit 0 computes beside it: in 3 s it does 2 of its 4, the rest takes 2: until 8.
    Unit 1 8-12; gather 12-15, gather 0 15-18: unit 1's backward does 2 of 6 by 18, ends at 22, unit 0's at 28."""
    made = simulate_gloo(step(ahead=AHEAD, behind=BEHIND, slowdown=1.5))
    assert made.step_s == pytest.approx(28)


def test_a_unit_without_an_end_in_backward_is_reduced_after_the_root():
    """Unit 0 is late. Without gathers: forward 8, backward 6, copy 1, reduction 15-23; unit 0 15-21; the root's
    reduction posted at 21 (23-28), then unit 0's copy 21-22 and reduction 28-36."""
    unit = replace(REDUCED, gather=0, regather=0)
    root = RootCosts(unit=UnitCosts(reduce=5))
    made = simulate_gloo(step(units=(unit, unit), root=root, late=0, buffers=9))
    assert [span.unit for span in made.spans if span.what == "reduce_scatter"] == ["layers.1", "root", "layers.0"]
    assert made.step_s == 36


def test_deferred_reductions_come_once():
    """Three micro-batches, no gathers: 3 x (8 + 12) and, in the last, two copies and the second reduction bare:
    reductions 1 (55-63) and 0 (63-71) with unit 0 done at 62."""
    unit = replace(REDUCED, gather=0, regather=0)
    made = simulate_gloo(step(units=(unit, unit), micro_batches=3, mode="defer_all", buffers=9))
    assert starts(made, "reduce_scatter") == [55, 63]
    assert made.step_s == 71


def test_only_sums_over_replicas_are_deferred():
    """reduce_each has them in each micro-batch, defer_replicate in the last alone."""
    unit = replace(REDUCED, gather=0, regather=0, all_reduce=2)
    each = simulate_gloo(step(units=(unit, unit), micro_batches=3))
    deferred = simulate_gloo(step(units=(unit, unit), micro_batches=3, mode="defer_replicate"))
    assert len(starts(each, "all_reduce")) == 6
    assert len(starts(deferred, "all_reduce")) == 2
    assert len(starts(deferred, "reduce_scatter")) == 6


def test_the_ends_of_a_step():
    """Agreement 1, then 20 of computing, clipping 2, its sum 1, update 5."""
    update = UpdateCosts(agree=1, clip=2, clip_exchange=1, update=5)
    unit = replace(UNIT, gather=0, regather=0)
    made = simulate_gloo(step(units=(unit, unit), update=update))
    assert made.step_s == 29
    assert made.exposed == {"all_reduce": 2}
    assert made.waits[0].held_up.what == "forward"


seconds = st.integers(0, 9)
units = st.builds(
    UnitCosts,
    forward=seconds,
    backward=seconds,
    gather=seconds,
    regather=seconds,
    copy_in=seconds,
    copy_out=seconds,
    recopy_out=seconds,
    reduce_copy_in=seconds,
    reduce=seconds,
    all_reduce=seconds,
)


@given(units, units, st.integers(1, 3), st.integers(1, 3), st.booleans(), st.booleans())
@settings(max_examples=100, deadline=None)
def test_a_step_is_computing_and_what_is_exposed(first, second, micro_batches, buffers, gathers, reductions):
    made = simulate_gloo(
        step(
            units=(first, second),
            ahead=AHEAD,
            behind=BEHIND,
            micro_batches=micro_batches,
            buffers=buffers,
            background_gathers=gathers,
            background_reductions=reductions,
        )
    )
    wire = sum(seconds for lane, seconds in made.busy.items() if lane != "compute")
    assert made.step_s == pytest.approx(made.busy.get("compute", 0) + sum(wait.end - wait.start for wait in made.waits))
    assert made.step_s >= wire - 1e-9
    assert 0 <= made.exposed_s <= wire + 1e-9
    assert made.exposed_s == pytest.approx(sum(wait.end - wait.start for wait in made.waits))
    ends = [span for span in made.spans if span.lane != "compute"]
    assert all(before.end <= after.start for before, after in pairwise(ends))
