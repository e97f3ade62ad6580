"""Forward of FSDP2 on GPUs: which gathers run beside which computation. Every schedule is worked out by hand."""

from __future__ import annotations

from predict.schedule.steps import UNIT, on, step_of, waits, without
from shardwise.predict.schedule import simulate
from shardwise.predict.schedule.costs import RootCosts, UnitCosts

FORWARD = without(UNIT, "backward", "regather", "reduce")


def test_nothing_to_exchange():
    """Three forwards of 4 and backwards of 8, one after the other: 3 x 12."""
    t = simulate(step_of(*[UnitCosts(forward=4, backward=8)] * 3))
    assert on(t, "compute", "forward") == [("a", 0, 4), ("b", 4, 8), ("c", 8, 12)]
    assert on(t, "compute", "backward") == [("c", 12, 20), ("b", 20, 28), ("a", 28, 36)]
    assert (t.step_s, t.waits, t.exposed_s, t.hidden_s, t.overlap_efficiency) == (36, (), 0, 0, 1)


def test_gathers_are_hidden_but_for_the_first():
    """Gather a 0-3 is bare, a computes 3-7. The host is ahead, so b is gathered right behind a, 3-6, and c behind b,
    6-9: the copy-out of a, for which it waits, was at 3. 3 of 9 seconds are exposed, the step takes 3 + 3 x 4."""
    t = simulate(step_of(FORWARD, FORWARD, FORWARD))
    assert on(t, "all_gather") == [("a", 0, 3), ("b", 3, 6), ("c", 6, 9)]
    assert on(t, "compute") == [("a", 3, 7), ("b", 7, 11), ("c", 11, 15)]
    assert waits(t) == [(0, 3, "forward a", "all_gather a")]
    assert (t.step_s, t.exposed_s, t.hidden_s) == (15, 3, 6)


def test_a_step_bound_by_gathers():
    """Gathers of 6 run back to back, 0-18; each unit computes 4 when its own is there. Before a, b and c computing
    waits 6, 2 and 2, in which a gather always runs: 10 of 18 seconds are exposed."""
    unit = UnitCosts(forward=4, gather=6)
    t = simulate(step_of(unit, unit, unit))
    assert on(t, "all_gather") == [("a", 0, 6), ("b", 6, 12), ("c", 12, 18)]
    assert on(t, "compute") == [("a", 6, 10), ("b", 12, 16), ("c", 18, 22)]
    assert waits(t) == [
        (0, 6, "forward a", "all_gather a"),
        (10, 12, "forward b", "all_gather b"),
        (16, 18, "forward c", "all_gather c"),
    ]
    assert (t.step_s, t.exposed["all_gather"], t.hidden_s) == (22, 10, 8)


def test_two_gathers_run_ahead_and_no_more():
    """Gathers of 1, units of 10. a 0-1, b 1-2, c 2-3 as it waits for the copy-out of a at 1. d waits for that of b,
    which comes after a has computed: at 11. The buffers of two gathers are held, not of three."""
    unit = UnitCosts(forward=10, gather=1)
    t = simulate(step_of(unit, unit, unit, unit))
    assert on(t, "all_gather") == [("a", 0, 1), ("b", 1, 2), ("c", 2, 3), ("d", 11, 12)]


def test_depth_two_gathers_three_ahead():
    """As above, but a asks for b and c, and b for c and d. When d is issued, streams of gathers have been told to wait
    for the copy-out of a only, at 1: so it follows c, 3-4."""
    unit = UnitCosts(forward=10, gather=1)
    t = simulate(step_of(unit, unit, unit, unit, ahead=2))
    assert on(t, "all_gather") == [("a", 0, 1), ("b", 1, 2), ("c", 2, 3), ("d", 3, 4)]


def test_copies_into_and_out_of_buffers():
    """Copy-in 1, gather 3, copy-out 1, forward 4. a: in 0-1, gathered 1-4, out 4-5, computed 5-9. b is put into its
    buffer beside gather a, 1-2, gathered 4-7, out 9-10. c waits for the copy-out of a at 5: in 5-6, gathered 7-10, out
    14-15."""
    unit = UnitCosts(forward=4, gather=3, copy_in=1, copy_out=1)
    t = simulate(step_of(unit, unit, unit))
    assert on(t, "copy_in") == [("a", 0, 1), ("b", 1, 2), ("c", 5, 6)]
    assert on(t, "all_gather") == [("a", 1, 4), ("b", 4, 7), ("c", 7, 10)]
    assert on(t, "compute", "copy_out") == [("a", 4, 5), ("b", 9, 10), ("c", 14, 15)]
    assert t.step_s == 19


def test_the_root_comes_first():
    """The root's gather 0-2 is bare, the embedding computes 2-3; the first unit's follows on the wire, 2-5, and
    computing waits 3-5. b is gathered 5-8, as the copy-out of the root was at 2. Head and loss at the end, 13-15."""
    root = RootCosts(unit=UnitCosts(gather=2), embed=1, head=2)
    t = simulate(step_of(FORWARD, FORWARD, root=root))
    assert on(t, "all_gather") == [("root", 0, 2), ("a", 2, 5), ("b", 5, 8)]
    assert on(t, "compute") == [("root", 2, 3), ("a", 5, 9), ("b", 9, 13), ("root", 13, 15)]
    assert waits(t) == [(0, 2, "forward root", "all_gather root"), (3, 5, "forward a", "all_gather a")]


def test_a_small_model_waits_for_the_host():
    """Units of 1 that take 5 to issue: the last part of each is issued at 5, 10 and 15, and is all that is left to
    do."""
    unit = UnitCosts(forward=1, forward_issue=5)
    t = simulate(step_of(unit, unit, unit))
    assert on(t, "issue") == [("a", 0, 5), ("b", 5, 10), ("c", 10, 15)]
    assert on(t, "compute") == [("a", 4, 5), ("b", 9, 10), ("c", 14, 15)]
    assert waits(t)[1] == (5, 9, "forward b", "issue b")
    assert (t.step_s, t.busy["compute"], t.busy["issue"]) == (15, 3, 15)


def test_a_slow_host_issues_gathers_late_unless_asked_ahead():
    """Forward 4 takes 6 to issue; gathers of 3. Without asking ahead, b's gather is issued when a is, at 6, and c's at
    12: gathered 6-9 and 12-15, computed 9-13 and 15-19. Asked for one ahead, they are issued at 0 and 6: b computes
    8-12, as its last part is issued at 12, and c 14-18."""
    unit = UnitCosts(forward=4, gather=3, forward_issue=6)
    plain, asked = (simulate(step_of(unit, unit, unit, ahead=ahead)) for ahead in (0, 1))
    assert on(plain, "all_gather") == [("a", 0, 3), ("b", 6, 9), ("c", 12, 15)]
    assert on(plain, "compute") == [("a", 3, 7), ("b", 9, 13), ("c", 15, 19)]
    assert on(asked, "all_gather") == [("a", 0, 3), ("b", 3, 6), ("c", 6, 9)]
    assert on(asked, "compute") == [("a", 3, 7), ("b", 8, 12), ("c", 14, 18)]
    assert waits(plain)[1] == (7, 9, "forward b", "all_gather b")
    assert waits(asked)[1] == (7, 8, "forward b", "issue b")


def test_computing_is_slower_beside_a_collective():
    """Half as fast while a gather runs: b is gathered 3-6, c 6-9, so a does 3 of its 4 from 3 to 9 and the last by 10.
    Then the wire is quiet: b 10-14, c 14-18. Of 9 seconds of gathers 3 are exposed."""
    t = simulate(step_of(FORWARD, FORWARD, FORWARD, slowdown=2))
    assert on(t, "all_gather") == [("a", 0, 3), ("b", 3, 6), ("c", 6, 9)]
    assert on(t, "compute") == [("a", 3, 10), ("b", 10, 14), ("c", 14, 18)]
    assert (t.busy["compute"], t.exposed_s) == (15, 3)


def test_slower_in_parts():
    """Forward 4 at a third of the speed while the wire works: a starts at 1; b is gathered 1-2 and c 2-3, in which two
    thirds are done; 10 thirds are left at 3, so it ends at 3 + 10/3. d waits for the copy-out of b."""
    unit = UnitCosts(forward=4, gather=1)
    t = simulate(step_of(unit, unit, unit, unit, slowdown=3))
    (_, _, end), *_ = on(t, "compute")
    assert abs(end - (3 + 10 / 3)) < 1e-12
    assert on(t, "all_gather")[3] == ("d", end, end + 1)
