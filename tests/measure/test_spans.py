"""Exposed communication by interval union."""

from __future__ import annotations

import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.profiler import ProfilerActivity, profile

from harness.ranks import run_ranks
from shardwise.measure.spans import Spans, merged, spans_of, total, without

_intervals = st.lists(
    st.tuples(st.integers(0, 60), st.integers(1, 20)).map(lambda pair: (float(pair[0]), float(pair[0] + pair[1]))),
    max_size=12,
)


def _ticks(spans):
    return {tick for start, end in spans for tick in range(int(start), int(end))}


@given(spans=_intervals, holes=_intervals)
def test_unions_and_differences_are_those_of_sets(spans, holes):
    assert _ticks(merged(spans)) == _ticks(spans)
    assert total(merged(spans)) == len(_ticks(spans))
    left = without(merged(spans), merged(holes))
    assert _ticks(left) == _ticks(spans) - _ticks(holes)
    assert merged(left) == left


def test_a_collective_is_exposed_where_nothing_is_computed():
    spans = Spans(
        compute=((0.0, 2.0), (5.0, 6.0)),
        collectives={"all_gather": ((1.0, 4.0),), "reduce_scatter": ((3.0, 5.5),)},
    )
    assert spans.exposed() == {"all_gather": 2.0, "reduce_scatter": 2.0}
    assert spans.exposed_total() == 3.0


def test_a_profile_shows_both_lanes():
    def body(rank, world):
        tensor = torch.ones(1000, 1000)
        with profile(activities=[ProfilerActivity.CPU]) as recorded:
            work = dist.all_reduce(torch.ones(1_000_000), async_op=True)
            tensor @ tensor
            work.wait()
            received = torch.empty(world * 1000)
            dist.all_to_all_single(received, torch.ones(world * 1000))
        spans = spans_of(recorded)
        return sorted(spans.collectives), total(spans.compute) > 0, spans.exposed_total()

    for kinds, computed, exposed in run_ranks(body, 2):
        assert kinds == ["all_reduce", "reduce_scatter"]
        assert computed
        assert exposed >= 0
