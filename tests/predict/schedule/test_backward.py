"""Backward of FSDP2 on GPUs: gathers, reductions and who waits for whom. Every schedule is worked out by hand."""

from __future__ import annotations

from dataclasses import replace

from predict.schedule.steps import UNIT, on, step_of, waits, without
from shardwise.predict.schedule import simulate
from shardwise.predict.schedule.costs import RootCosts, UnitCosts, UpdateCosts

REDUCED = UnitCosts(forward=1, backward=4, reduce_copy_in=1, reduce=7)


def test_full_shard():
    """Forward ends at 15. The root's backward asks for c, whose second gather waits for c's copy-out at 11: 11-14. c's
    copy-out at 15 lets b be gathered, 15-18; c computes 15-23. Its reduction takes its turn on the wire before gather
    a, which is issued at b's copy-out, at 23: reduction c 23-28, gather a 28-31; b computes 23-31 and is reduced
    31-36, a 31-39 and 39-44. Exposed: gather a at the beginning, reduction a at the end."""
    t = simulate(step_of(UNIT, UNIT, UNIT))
    assert on(t, "all_gather")[3:] == [("c", 11, 14), ("b", 15, 18), ("a", 28, 31)]
    assert on(t, "compute", "backward") == [("c", 15, 23), ("b", 23, 31), ("a", 31, 39)]
    assert on(t, "reduce_scatter") == [("c", 23, 28), ("b", 31, 36), ("a", 39, 44)]
    assert (t.step_s, t.exposed["all_gather"], t.exposed["reduce_scatter"], t.exposed_s) == (44, 3, 5, 8)
    assert (t.busy["all_gather"], t.busy["reduce_scatter"], t.hidden_s) == (18, 15, 25)


def test_shard_grad_op_gathers_once():
    """As FULL_SHARD without gathers in backward; its computation hid them, so the step is as long."""
    unit = without(UNIT, "regather")
    t = simulate(step_of(unit, unit, unit))
    assert on(t, "all_gather") == [("a", 0, 3), ("b", 3, 6), ("c", 6, 9)]
    assert on(t, "reduce_scatter") == [("c", 23, 28), ("b", 31, 36), ("a", 39, 44)]
    assert t.step_s == 44


def test_nothing_gathered_ahead_in_backward():
    """c is gathered 11-14: issued at its own backward, but the host is there early. b's gather is issued after
    reduction c and waits for its turn: 28-31; b computes 31-39 and is reduced 39-44; a is gathered 44-47, computes
    47-55, reduced 55-60."""
    t = simulate(step_of(UNIT, UNIT, UNIT, behind=0))
    assert on(t, "all_gather")[3:] == [("c", 11, 14), ("b", 28, 31), ("a", 44, 47)]
    assert on(t, "compute", "backward") == [("c", 15, 23), ("b", 31, 39), ("a", 47, 55)]
    assert waits(t)[1:] == [(23, 31, "backward b", "all_gather b"), (39, 47, "backward a", "all_gather a")]
    assert t.step_s == 60


def test_two_gathered_ahead_in_backward():
    """The root's backward asks for c and b, 11-14 and 14-17; c's copy-out at 15 lets a be gathered, 17-20, before
    reduction c, which takes 23-28 as before."""
    t = simulate(step_of(UNIT, UNIT, UNIT, behind=2))
    assert on(t, "all_gather")[3:] == [("c", 11, 14), ("b", 14, 17), ("a", 17, 20)]
    assert on(t, "reduce_scatter")[0] == ("c", 23, 28)
    assert t.step_s == 44


def test_one_buffer_stalls_backward():
    """Forward ends at 3. c 3-7, into the buffer 7-8, reduced 8-15. b 8-12, then the buffer is taken until 15: in at
    15-16, reduced 16-23. a 16-20, waits until 23, in 23-24, reduced 24-31."""
    t = simulate(step_of(REDUCED, REDUCED, REDUCED))
    assert on(t, "reduce_scatter") == [("c", 8, 15), ("b", 16, 23), ("a", 24, 31)]
    assert waits(t) == [
        (12, 15, "reduce_copy_in b", "reduce_scatter c"),
        (20, 23, "reduce_copy_in a", "reduce_scatter b"),
    ]
    assert (t.step_s, t.exposed["reduce_scatter"]) == (31, 3 + 3 + 7)


def test_two_buffers_do_not():
    """c 3-7, in 7-8, reduced 8-15. b 8-12, in 12-13, reduced 15-22. a 13-17; of the two in flight the older one ended
    at 15: in 17-18, reduced 22-29."""
    t = simulate(step_of(REDUCED, REDUCED, REDUCED, buffers=2))
    assert on(t, "reduce_scatter") == [("c", 8, 15), ("b", 15, 22), ("a", 22, 29)]
    assert waits(t) == []
    assert t.step_s == 29


def test_gathers_and_reductions_take_turns():
    """FULL_SHARD with reductions of 7: reduction c 23-30, then gather a 30-33, then reduction b, ready at 31: 33-40. a
    waits 31-33 for its weights, computes 33-41 and is reduced 41-48."""
    unit = replace(UNIT, reduce=7)
    t = simulate(step_of(unit, unit, unit))
    assert on(t, "all_gather")[-1] == ("a", 30, 33)
    assert on(t, "reduce_scatter") == [("c", 23, 30), ("b", 33, 40), ("a", 41, 48)]
    assert waits(t)[1:] == [(31, 33, "backward a", "all_gather a")]


def test_a_communicator_for_reductions():
    """The same without turns: gather a 23-26 beside reduction c 23-30, b reduced 31-38, a computes 31-39, reduced
    39-46."""
    unit = replace(UNIT, reduce=7)
    t = simulate(step_of(unit, unit, unit, separate_group=True))
    assert on(t, "all_gather")[-1] == ("a", 23, 26)
    assert on(t, "reduce_scatter") == [("c", 23, 30), ("b", 31, 38), ("a", 39, 46)]
    assert waits(t)[1:] == []
    assert any("communicator" in note for note in t.notes)


def test_integer_resharding():
    """Gathers of 1 inside a small group in backward, whose communicator takes no turns with reductions: c, whose part
    is kept when its forward ends, 15-16, b 16-17, a at b's copy-out, 24-25, beside reduction c."""
    unit = replace(UNIT, regather=1)
    t = simulate(step_of(unit, unit, unit, regather_group=True))
    assert on(t, "all_gather")[3:] == [("c", 15, 16), ("b", 16, 17), ("a", 24, 25)]
    assert on(t, "reduce_scatter")[0] == ("c", 24, 29)


def test_a_small_group_gathers_what_was_kept():
    """Forward brings shards from the host, 0-2, casts them, 2-3, gathers, 3-6, and computes, 6-10, copying the part
    that is kept last of all. Backward copies that into its buffer, 10-11, and gathers, 11-12, without the host."""
    unit = UnitCosts(forward=4, backward=8, fetch=2, copy_in=1, recopy_in=1, gather=3, regather=1)
    t = simulate(step_of(unit, regather_group=True))
    assert on(t, "to_device") == [("a", 0, 2)]
    assert on(t, "copy_in") == [("a", 2, 3), ("a", 10, 11)]
    assert on(t, "all_gather") == [("a", 3, 6), ("a", 11, 12)]
    assert t.step_s == 20


def test_gradients_that_no_replica_sums_leave_after_every_backward():
    """`defer_replicate` without replicas defers nothing."""
    unit = UnitCosts(forward=4, backward=8, reduce=2, store=1)
    t = simulate(step_of(unit, micro_batches=2, mode="defer_replicate"))
    assert [unit for unit, *_ in on(t, "to_host")] == ["a", "a"]
    replicated = replace(unit, all_reduce=1)
    t = simulate(step_of(replicated, micro_batches=2, mode="defer_replicate"))
    assert [unit for unit, *_ in on(t, "to_host")] == ["a"]


def test_hybrid_sums_over_replicas_beside():
    """All-reduces of 6 on a stream and a communicator of their own, which nothing waits for before the end: c reduced
    23-28, summed 28-34; gather a 28-31; b 31-36, 36-42; a 39-44, 44-50. Exposed from 39 on, when nothing is left to
    compute: reduction a, and 42-39 + 6 of the sums."""
    unit = replace(UNIT, all_reduce=6)
    t = simulate(step_of(unit, unit, unit))
    assert on(t, "reduce_scatter") == [("c", 23, 28), ("b", 31, 36), ("a", 39, 44)]
    assert on(t, "all_reduce") == [("c", 28, 34), ("b", 36, 42), ("a", 44, 50)]
    assert on(t, "all_gather")[-1] == ("a", 28, 31)
    assert (t.step_s, t.exposed["all_reduce"], t.exposed_s) == (50, 3 + 6, 3 + 11)


def test_no_shard_copies_weights_and_sums():
    """Over a shard axis of one rank weights are copied, 1, forward and backward; gradients go into a buffer, 1, and
    over the replicas, 6. a copied 0-1, 1-5; b 5-6, 6-10; back b 10-11, 11-19, in 19-20, summed 20-26; a 20-21, 21-29,
    29-30, 30-36."""
    unit = UnitCosts(forward=4, backward=8, copy_out=1, recopy_out=1, reduce_copy_in=1, all_reduce=6)
    t = simulate(step_of(unit, unit))
    assert on(t, "compute", "copy_out") == [("a", 0, 1), ("b", 5, 6), ("b", 10, 11), ("a", 20, 21)]
    assert on(t, "all_reduce") == [("b", 20, 26), ("a", 30, 36)]
    assert (t.waits, t.step_s) == ((), 36)


def test_the_root_is_reduced_last_and_the_late_unit_after_it():
    """e is an embedding of its own: no gradient flows into its input, so it is reduced when all is over. Forward e
    0-1, a 1-5; a back 5-13, reduced 13-18; e back 13-15; the root's reduction waits for a's: 18-21; e's for the
    root's: 21-25. The update waits for it."""
    e, a = UnitCosts(forward=1, backward=2, reduce=4), UnitCosts(forward=4, backward=8, reduce=5)
    root = RootCosts(unit=UnitCosts(reduce=3))
    t = simulate(step_of(e, a, root=root, late=0, update=UpdateCosts(update=1)))
    assert on(t, "reduce_scatter") == [("b", 13, 18), ("root", 18, 21), ("a", 21, 25)]
    assert waits(t) == [(15, 25, "update ", "reduce_scatter a")]
    assert t.step_s == 26


def test_units_that_backward_does_not_need():
    """Frozen a is before all that is trained: it is neither gathered again nor reduced. Gather a 0-3, b 3-6; a 3-7, b
    7-11; b again at its copy-out at 7, behind its first: 7-10; b back 11-19, reduced 19-24."""
    frozen = UnitCosts(forward=4, gather=3)
    t = simulate(step_of(frozen, UNIT))
    assert on(t, "all_gather") == [("a", 0, 3), ("b", 3, 6), ("b", 7, 10)]
    assert on(t, "compute", "backward") == [("b", 11, 19)]
    assert on(t, "reduce_scatter") == [("b", 19, 24)]


def test_saved_activations_leave_and_return():
    """Ways of 2 beside units of 4 and 8: a leaves while it computes, 2-4, b 6-8, c 10-12. c's are used as they are; its
    backward starts b's way back, 12-14, b's starts a's, 20-22. Nothing waits."""
    unit = UnitCosts(forward=4, backward=8, travel=2)
    t = simulate(step_of(unit, unit, unit))
    assert on(t, "to_host") == [("a", 2, 4), ("b", 6, 8), ("c", 10, 12)]
    assert on(t, "to_device") == [("b", 12, 14), ("a", 20, 22)]
    assert (t.waits, t.step_s, t.exposed_s, t.hidden_s) == ((), 36, 0, 10)


def test_saved_activations_that_travel_longer_than_forward():
    """Ways of 6: a 0-6, b behind it 6-12, c 12-18. c's backward waits for its own departure, 12-18; b comes back
    18-24, a from b's backward on, 26-32, and that is hidden."""
    unit = UnitCosts(forward=4, backward=8, travel=6)
    t = simulate(step_of(unit, unit, unit))
    assert on(t, "to_host") == [("a", 0, 6), ("b", 6, 12), ("c", 12, 18)]
    assert on(t, "to_device") == [("b", 18, 24), ("a", 26, 32)]
    assert waits(t) == [(12, 18, "backward c", "leave c")]
    assert (t.step_s, t.exposed_s) == (42, 6)
