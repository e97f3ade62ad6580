"""The learning rate is a function of the optimizer step alone."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.engine.optimizer import Schedule


def _rates(kind, warmup, total):
    schedule = Schedule(kind=kind, peak=1.0, warmup_steps=warmup, total_steps=total)
    return [schedule.at(step) for step in range(total)]


def test_constant_after_warm_up():
    assert _rates("constant", 3, 6) == pytest.approx([0.25, 0.5, 0.75, 1, 1, 1])


def test_linear_falls_to_zero_at_the_end():
    assert _rates("linear", 0, 4) == pytest.approx([1, 0.75, 0.5, 0.25])
    assert Schedule(kind="linear", peak=1.0, warmup_steps=0, total_steps=4).at(4) == 0


def test_cosine_is_half_way_in_the_middle():
    assert _rates("cosine", 0, 4) == pytest.approx([1, 0.853553, 0.5, 0.146447], abs=1e-6)


@given(
    kind=st.sampled_from(["constant", "linear", "cosine"]),
    warmup=st.integers(0, 50),
    total=st.integers(1, 200),
    peak=st.floats(1e-7, 1.0),
)
def test_laws(kind, warmup, total, peak):
    schedule = Schedule(kind=kind, peak=peak, warmup_steps=min(warmup, total), total_steps=total)
    rates = [schedule.at(step) for step in range(total)]
    assert all(0 <= rate <= peak * (1 + 1e-12) for rate in rates)
    rising, falling = rates[: schedule.warmup_steps], rates[schedule.warmup_steps :]
    assert rising == sorted(rising)
    assert falling == sorted(falling, reverse=True)
    assert not falling or falling[0] == pytest.approx(peak)
