"""Begin, micro-batches and end of a step. Every schedule is worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from predict.schedule.steps import UNIT, on, step_of, waits
from shardwise.predict.schedule import simulate
from shardwise.predict.schedule.costs import UnitCosts, UpdateCosts
from shardwise.predict.schedule.nccl import Fsdp2
from shardwise.spec.timeline import Later

ONE = UnitCosts(forward=4, backward=8, gather=3, reduce=5, all_reduce=6)


def test_ranks_agree_first():
    """The count of trained tokens takes 0-2, and the host waits for it: everything comes 2 later."""
    t = simulate(step_of(UnitCosts(forward=4, gather=3), update=UpdateCosts(agree=2)))
    assert on(t, "all_reduce") == [("", 0, 2)]
    assert on(t, "all_gather") == [("a", 2, 5)]
    assert (t.step_s, t.exposed_s) == (9, 5)


def test_reduce_each():
    """Gather 0-3, forward 3-7, backward 7-15, reduced 15-20, summed 20-26. The second micro-batch's gather waits for
    all that: 26-29, 29-33, 33-41, 41-46, 46-52."""
    t = simulate(step_of(ONE, micro_batches=2, mode="reduce_each"))
    assert on(t, "all_gather") == [("a", 0, 3), ("a", 26, 29)]
    assert on(t, "reduce_scatter") == [("a", 15, 20), ("a", 41, 46)]
    assert on(t, "all_reduce") == [("a", 20, 26), ("a", 46, 52)]
    assert t.step_s == 52


def test_defer_all():
    """Nothing is reduced at 15; the second micro-batch is gathered 15-18, computed 18-22 and 22-30, reduced 30-35 and
    summed 35-41."""
    t = simulate(step_of(ONE, micro_batches=2, mode="defer_all"))
    assert on(t, "all_gather") == [("a", 0, 3), ("a", 15, 18)]
    assert (on(t, "reduce_scatter"), on(t, "all_reduce")) == ([("a", 30, 35)], [("a", 35, 41)])
    assert t.step_s == 41


def test_defer_replicate():
    """Reduced 15-20, but not summed; gathered 20-23, computed 23-27 and 27-35, reduced 35-40 and summed 40-46."""
    t = simulate(step_of(ONE, micro_batches=2, mode="defer_replicate"))
    assert on(t, "reduce_scatter") == [("a", 15, 20), ("a", 35, 40)]
    assert on(t, "all_reduce") == [("a", 40, 46)]
    assert t.step_s == 46


def test_clipping_is_a_barrier():
    """Forward 0-4, backward 4-12, reduced 12-17; squares 17-19, their sum over ranks 19-20, update 20-23. The host
    reads the norm, so the update is issued at 20."""
    unit = UnitCosts(forward=4, backward=8, reduce=5)
    t = simulate(step_of(unit, update=UpdateCosts(clip=2, clip_exchange=1, update=3)))
    assert on(t, "compute")[2:] == [("", 17, 19), ("", 20, 23)]
    assert on(t, "all_reduce") == [("", 19, 20)]
    assert waits(t) == [(12, 17, "clip ", "reduce_scatter a"), (19, 20, "update ", "exchange ")]
    assert (t.step_s, t.exposed_s) == (23, 6)


def test_parameters_on_the_host_and_adam_there():
    """Fetched 0-2, put into the buffer 2-3, gathered 3-6; forward 6-10, backward 10-18, reduced 18-23, stored 23-25.
    Then the host: squares 25-28, their sum 28-29, Adam 29-49."""
    unit = UnitCosts(forward=4, backward=8, fetch=2, copy_in=1, gather=3, reduce=5, store=2)
    t = simulate(step_of(unit, update=UpdateCosts(clip=3, clip_exchange=1, host_update=20)))
    assert (on(t, "to_device"), on(t, "copy_in"), on(t, "all_gather")) == (
        [("a", 0, 2)],
        [("a", 2, 3)],
        [("a", 3, 6)],
    )
    assert on(t, "to_host") == [("a", 23, 25)]
    assert (on(t, "host"), on(t, "all_reduce")) == ([("", 25, 28), ("", 29, 49)], [("", 28, 29)])
    assert (t.step_s, t.busy["host"]) == (49, 23)
    assert t.exposed == {"to_device": 2, "all_gather": 3, "reduce_scatter": 5, "to_host": 2, "all_reduce": 1}


def test_fetches_run_ahead_of_gathers():
    """Fetches of 2 and gathers of 3 on streams of their own: a fetched 0-2 and gathered 2-5, b fetched 2-4, gathered
    5-8."""
    unit = UnitCosts(forward=4, fetch=2, gather=3)
    t = simulate(step_of(unit, unit))
    assert on(t, "to_device") == [("a", 0, 2), ("b", 2, 4)]
    assert on(t, "all_gather") == [("a", 2, 5), ("b", 5, 8)]


def test_adding_gradients_on_the_host_holds_the_host_up():
    """Two micro-batches, two units. First: forward 0-8; b back 8-16, reduced 16-21, stored 21-23 beside a 16-24, which
    is reduced 24-29, stored 29-31. Second, gradients are there, so each store is waited for before anything else is
    issued: forward 31-39, b 39-47, reduced 47-52, stored 52-54, and only then a 54-62, 62-67, 67-69."""
    unit = UnitCosts(forward=4, backward=8, reduce=5, store=2)
    t = simulate(step_of(unit, unit, micro_batches=2))
    assert on(t, "compute", "backward") == [("b", 8, 16), ("a", 16, 24), ("b", 39, 47), ("a", 54, 62)]
    assert on(t, "to_host") == [("b", 21, 23), ("a", 29, 31), ("b", 52, 54), ("a", 67, 69)]
    assert waits(t) == [(24, 31, "forward a", "store a"), (47, 54, "backward a", "store b")]


def test_optimizer_states_on_the_host():
    """Forward 0-4, backward 4-12; states brought 12-16, update 16-18, taken back 18-22."""
    unit = UnitCosts(forward=4, backward=8)
    t = simulate(step_of(unit, update=UpdateCosts(fetch=4, update=2, store=4)))
    assert (on(t, "to_device"), on(t, "compute", "update"), on(t, "to_host")) == (
        [("", 12, 16)],
        [("", 16, 18)],
        [("", 18, 22)],
    )
    assert (t.step_s, t.exposed_s) == (22, 8)


def test_the_host_runs_ahead_into_the_next_micro_batch():
    """Forward 4 and backward 8 are issued in 1 each. The second micro-batch is issued from 2 on, and waits for the
    first only: 0-4, 4-12, 12-16, 16-24, as fast as without a host."""
    unit = UnitCosts(forward=4, backward=8, forward_issue=1, backward_issue=1)
    t = simulate(step_of(unit, micro_batches=2))
    assert on(t, "issue") == [("a", 0, 1), ("a", 1, 2), ("a", 2, 3), ("a", 3, 4)]
    assert (t.step_s, t.waits) == (24, ())


@pytest.mark.parametrize("mode", ["reduce_each", "defer_all", "defer_replicate"])
@pytest.mark.parametrize("issue", [0, 1, 5, 9])
@pytest.mark.parametrize("store", [0, 2])
def test_many_micro_batches_are_counted_as_if_each_were_played(mode, issue, store, monkeypatch):
    """40 micro-batches, of which a few are played and the middle is multiplied, against all 40 played."""
    unit = replace(UNIT, all_reduce=7, forward_issue=issue, backward_issue=issue, copy_in=1, copy_out=1, store=store)
    step = step_of(unit, unit, unit, micro_batches=40, mode=mode, slowdown=1.25, update=UpdateCosts(clip=1, update=2))
    short = simulate(step)
    monkeypatch.setattr("shardwise.predict.schedule.frame.Frame._steady", lambda *_: False)
    full = simulate(step)
    assert len(short.spans) < len(full.spans) / 4
    assert {span.micro_batch for span in full.spans} == set(range(40))
    assert {0, 1, 39} <= {span.micro_batch for span in short.spans}
    for said in ("step_s", "exposed_s", "hidden_s"):
        assert getattr(short, said) == pytest.approx(getattr(full, said), rel=1e-9), said
    assert short.busy == pytest.approx(full.busy, rel=1e-9)
    assert short.exposed == pytest.approx(full.exposed, rel=1e-9)
    assert short.spans[-1] == pytest.approx(full.spans[-1])


def test_a_long_row_of_units_is_not_played_one_by_one():
    """80 units go as 3 of them do: gather 0-3, 80 x 4 and 80 x 8, the last reduction 5. Few operations are issued for
    it, though all 400 spans are there: 160 gathers, 160 computations, 80 reductions."""
    step = step_of(*[UNIT] * 80)
    whole, brief, played = simulate(step), simulate(step, brief=True), Fsdp2(step)
    played.run()
    assert (whole.step_s, len(whole.spans)) == (3 + 80 * 12 + 5, 400)
    assert (brief.step_s, brief.spans, brief.waits) == (whole.step_s, (), ())
    assert len(played.operations) < 60


@pytest.mark.parametrize("rules", ["nccl", "fsdp1", "ddp", "gloo"])
def test_collectives_inside_computing_are_told(rules):
    """2 of every micro-batch's 12 s of computing."""
    step = step_of(UnitCosts(forward=4, backward=8), rules=rules, micro_batches=7, tensor=2)
    assert simulate(step).tensor_s == 14


def test_spans_are_made_when_somebody_looks():
    """Once, and then they are a sequence like any other."""
    made = []
    later = Later(lambda: made.append("made") or ("a", "b", "c"))
    assert made == []
    assert (later[0], later[1:], len(later)) == ("a", ("b", "c"), 3)
    assert later == ["a", "b", "c"]
    assert later != ["a", "b"]
    assert made == ["made"]
