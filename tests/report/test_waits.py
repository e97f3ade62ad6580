"""What computing waits for: alike waits merged, and how far the link is too slow, worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from report.timelines import COMPUTED, GATHERED, MS, REDUCED, STEP, WAITS, span
from shardwise.report.waits import merged_waits
from shardwise.spec.timeline import ROOT, Timeline, Wait


def of(*waits: Wait, spans=STEP.spans, micro_batches=1):
    return merged_waits(replace(STEP, waits=waits, spans=spans), micro_batches)


def test_waits_are_merged_by_phase_and_kind_with_the_most_first():
    """6.1 ms at the end, 2 x 2.6 ms for reductions of blocks, 1 + 1 ms for the first gathers: all 13.3 ms exposed."""
    last, within, first = merged_waits(STEP, 1)
    assert [one.place for one in (last, within, first)] == ["last", "within", "first"]
    assert last.units == (ROOT,)
    assert within.units == ("model.layers.2", "model.layers.1")
    assert first.units == (ROOT, "model.layers.0")
    assert [one.total_s / MS for one in (last, within, first)] == pytest.approx([6.1, 5.2, 2])
    assert (within.phase, within.lane, within.by, within.count) == ("backward", "reduce_scatter", "reduce_scatter", 2)


def test_a_link_is_too_slow_by_its_time_over_the_computing_beside_it():
    """Block 2's reduction runs from 13 to 17.6 beside 2 ms of backward; between both waits lie 4.6 ms of reduction and
    2 ms of backward again: 9.2 over 4."""
    _, within, _ = merged_waits(STEP, 1)
    assert within.too_slow == pytest.approx(2.3)


def test_a_link_that_is_fast_enough_may_start_too_late():
    """Between the waits that end at 10 and 20 ms, 4 ms of gathers stand beside 8 ms of computing; the first gather took
    2 ms beside none: 6 over 8."""
    gathers = [span("all_gather", "all_gather", 0, 8, 10), span("all_gather", "all_gather", 1, 16, 20)]
    computed = [
        span("compute", "forward", 7, 0, 8),
        span("compute", "forward", 0, 10, 18),
        span("compute", "forward", 1, 20, 28),
    ]
    waits = [Wait(8 * MS, 10 * MS, computed[1], gathers[0]), Wait(18 * MS, 20 * MS, computed[2], gathers[1])]
    (one,) = of(*waits, spans=(*gathers, *computed))
    assert one.too_slow == pytest.approx(6 / 8)


def test_nothing_computed_meanwhile_has_no_factor():
    gather = span("all_gather", "all_gather", 1, 10, 14)
    held_up = span("compute", "forward", 1, 14, 15)
    spans = (span("compute", "forward", 0, 5, 10), gather, held_up)
    (one,) = of(Wait(10 * MS, 14 * MS, held_up, gather), spans=spans)
    assert one.place == "within"
    assert one.too_slow is None


def test_the_last_reductions_are_one_whatever_is_held_up():
    """Block 0's reduction holds up the root's gradients, the root's holds up the norm."""
    copies = span("compute", "reduce_copy_in", ROOT, 26.8, 26.8)
    waits = (
        *WAITS[:4],
        Wait(22.7 * MS, 26.8 * MS, copies, REDUCED[2]),
        Wait(26.8 * MS, 28.8 * MS, COMPUTED[12], REDUCED[3]),
    )
    last = of(*waits, spans=(*STEP.spans, copies))[0]
    assert (last.place, last.units, last.count) == ("last", ("model.layers.0", ROOT), 2)
    assert last.total_s == pytest.approx(6.1 * MS)


def test_what_comes_behind_all_computing_is_waited_for_too():
    """The device is done at 30 ms, the copy of gradients at 30.5, the optimizer on the host at 34."""
    store = span("to_host", "store", ROOT, 29, 30.5)
    update = span("host", "update", "", 30.5, 34)
    found = of(spans=(*STEP.spans, store, update))
    assert [(one.place, one.lane, one.by, one.count) for one in found] == [
        ("end", "host", "update", 1),
        ("end", "to_host", "store", 1),
    ]
    assert [one.total_s / MS for one in found] == pytest.approx([3.5, 0.5])


def test_a_copy_out_belongs_to_what_is_computed_next():
    """The same unit is copied out before its forward at 3 ms and before its backward at 17.6 ms."""
    early = span("compute", "copy_out", 0, 2.9, 3)
    late = span("compute", "copy_out", 0, 17.5, 17.6)
    gather = span("all_gather", "all_gather", 1, 16, 17.5)
    found = of(
        Wait(2 * MS, 2.9 * MS, early, GATHERED[1]), Wait(15 * MS, 17.5 * MS, late, gather), spans=(*STEP.spans, gather)
    )
    assert {(one.place, one.phase) for one in found} == {("first", "forward"), ("within", "backward")}


@pytest.mark.parametrize(("micro_batches", "count"), [(2, 2), (3, 3), (6, 6)])
def test_micro_batches_that_are_not_listed_count_like_the_one_before(micro_batches, count):
    """Micro-batches 0, 1 and the last are listed at most; each has one wait of 1 ms."""
    listed = sorted({0, 1, micro_batches - 1})
    spans, waits = [], []
    for place, number in enumerate(listed):
        begin = 10 * place
        forward = span("compute", "forward", 0, begin, begin + 2, number)
        gather = span("all_gather", "all_gather", 1, begin, begin + 3, number)
        next_forward = span("compute", "forward", 1, begin + 3, begin + 5, number)
        spans += [forward, gather, next_forward]
        waits.append(Wait((begin + 2) * MS, (begin + 3) * MS, next_forward, gather))
    (one,) = of(*waits, spans=tuple(spans), micro_batches=micro_batches)
    assert one.count == count
    assert one.total_s == pytest.approx(count * MS)
    assert one.too_slow == pytest.approx(3 / 2)


def test_a_step_without_waits_has_none():
    assert merged_waits(replace(STEP, waits=()), 1) == ()
    assert merged_waits(Timeline(step_s=1, spans=(), waits=(), busy={}, exposed={}, exposed_s=0), 1) == ()
