"""The first FSDP, DistributedDataParallel and ZeRO-2. Every schedule is worked out by hand."""

from __future__ import annotations

from predict.schedule.steps import UNIT, on, step_of, waits, without
from shardwise.predict.schedule import simulate
from shardwise.predict.schedule.costs import UnitCosts, UpdateCosts


def test_the_first_fsdp_gathers_two_ahead_at_most():
    """Gathers of 1, units of 10, freed after forward. a 0-1, b 1-2. Before c is gathered the host waits until a has
    been computed, at 11, before d until b has, at 21."""
    unit = UnitCosts(forward=10, gather=1, regather=1)
    t = simulate(step_of(unit, unit, unit, unit, rules="fsdp1"))
    assert on(t, "all_gather")[:4] == [("a", 0, 1), ("b", 1, 2), ("c", 11, 12), ("d", 21, 22)]
    assert on(t, "compute", "forward") == [("a", 1, 11), ("b", 11, 21), ("c", 21, 31), ("d", 31, 41)]


def test_the_first_fsdp_backward():
    """Forward as FSDP2 here, but before gather c the host waits until a is computed, at 7: 7-10. Freed and not waited
    for are then b and c. The root asks for c, so the host waits for b, at 11: 11-14. c's backward, 15-23, asks for b,
    when only c is left: 14-17. Its weights are freed, its reduction is issued, 23-28; b's backward asks for a, and the
    host waits for c's forward, at 15: the wire is free at 28, 28-31. b 23-31, reduced 31-36, a 31-39, reduced
    39-44."""
    t = simulate(step_of(UNIT, UNIT, UNIT, rules="fsdp1"))
    assert on(t, "all_gather") == [("a", 0, 3), ("b", 3, 6), ("c", 7, 10), ("c", 11, 14), ("b", 14, 17), ("a", 28, 31)]
    assert on(t, "compute", "backward") == [("c", 15, 23), ("b", 23, 31), ("a", 31, 39)]
    assert on(t, "reduce_scatter") == [("c", 23, 28), ("b", 31, 36), ("a", 39, 44)]


def test_reductions_of_the_first_fsdp_do_not_hold_backward_up():
    """Backward 4, cast 1 beside it, reduced 7: c 3-7, cast 7-8, 8-15; b 7-11, cast 15-16, as the stream is busy,
    16-23; a 11-15, 23-24, 24-31."""
    unit = UnitCosts(forward=1, backward=4, reduce_copy_in=1, reduce=7)
    t = simulate(step_of(unit, unit, unit, rules="fsdp1"))
    assert on(t, "compute", "backward") == [("c", 3, 7), ("b", 7, 11), ("a", 11, 15)]
    assert on(t, "copy_in", "reduce_copy_in") == [("c", 7, 8), ("b", 15, 16), ("a", 23, 24)]
    assert on(t, "reduce_scatter") == [("c", 8, 15), ("b", 16, 23), ("a", 24, 31)]
    assert t.waits == ()


def test_the_first_fsdp_keeps_weights_while_it_defers():
    """SHARD_GRAD_OP without synchronising: the second micro-batch gathers nothing."""
    unit = without(UNIT, "regather")
    t = simulate(step_of(unit, rules="fsdp1", micro_batches=2, mode="defer_all"))
    assert on(t, "all_gather") == [("a", 0, 3)]
    assert on(t, "reduce_scatter") == [("a", 27, 32)]


def test_ddp_sums_as_gradients_come():
    """Forward 0-8; b 8-16, summed 16-22; a 16-24, summed 24-30."""
    unit = UnitCosts(forward=4, backward=8, all_reduce=6)
    t = simulate(step_of(unit, unit, rules="ddp"))
    assert on(t, "all_reduce") == [("b", 16, 22), ("a", 24, 30)]
    assert (t.step_s, t.exposed_s, t.waits) == (30, 6, ())


def test_ddp_sums_do_not_hold_backward_up():
    """Sums of 20: b 16-36, a 36-56; backward ends at 24, the update waits from then on."""
    unit = UnitCosts(forward=4, backward=8, all_reduce=20)
    t = simulate(step_of(unit, unit, rules="ddp", update=UpdateCosts(update=1)))
    assert on(t, "all_reduce") == [("b", 16, 36), ("a", 36, 56)]
    assert waits(t) == [(24, 56, "update ", "all_reduce a")]


def test_zero_2_gathers_what_it_updated():
    """Gradients reduced to shards, 16-21 and 24-29, updated 29-31, all weights gathered 31-38, bare."""
    unit = UnitCosts(forward=4, backward=8, reduce=5)
    t = simulate(step_of(unit, unit, rules="ddp", update=UpdateCosts(update=2, gather=7)))
    assert on(t, "reduce_scatter") == [("b", 16, 21), ("a", 24, 29)]
    assert on(t, "all_gather") == [("", 31, 38)]
    assert (t.step_s, t.exposed_s) == (38, 5 + 7)
