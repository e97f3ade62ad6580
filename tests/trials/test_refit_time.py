"""Constants of time fitted within bounds, to answers of rows to single constants."""

from __future__ import annotations

from math import exp

import pytest

from shardwise.predict.constants import Constant
from shardwise.trials.descent import descend
from shardwise.trials.measured import MeasuredRow
from shardwise.trials.refit_time import FITTED, fit, leave_one_out, responses
from shardwise.trials.throughput_checks import check_times
from trials.timed import timed_row, timeline

MOVED = FITTED[0]


def _timer(case, values=None):
    """A step of 1 s, e times as long over the range of one constant."""
    value = (values or {}).get(MOVED.name, MOVED.value)
    return timeline(exp((value - MOVED.value) / (MOVED.high - MOVED.low)))


def _checks(value, *ids):
    """Rows that were measured at a value of the constant: 1152 tokens over the step's seconds."""
    measured = 1152 / _timer(None, {MOVED.name: value}).step_s
    rows = [MeasuredRow.model_validate(timed_row(measured, id=name)) for name in ids]
    return check_times(rows, _timer)


def test_a_fit_finds_the_constant_that_made_the_measurements():
    true = (MOVED.low + MOVED.value) / 2
    answers = responses(_checks(true, "A-1", "B-1"), _timer)
    found = fit(answers)
    assert found[MOVED.name] == pytest.approx(true, abs=(MOVED.high - MOVED.low) / 32)
    assert {name: value for name, value in found.items() if name != MOVED.name} == {
        constant.name: constant.value for constant in FITTED[1:]
    }


def test_answers_of_single_constants_multiply():
    (answer,) = responses(_checks(MOVED.value, "A-1"), _timer)
    usual = {constant.name: constant.value for constant in FITTED}
    assert answer.relative_error(usual) == pytest.approx(0.0)
    for value in (MOVED.low, MOVED.high):
        slower = _timer(None, {MOVED.name: value}).step_s
        assert answer.relative_error({**usual, MOVED.name: value}) == pytest.approx(1 / slower - 1)


def test_a_constant_moves_a_step_by_what_it_changes_at_most_within_its_bounds():
    """e times as long over the whole range: the longer way from the value in use, up or down."""
    (answer,) = responses(_checks(MOVED.value, "A-1"), _timer)
    longest = max(MOVED.high - MOVED.value, MOVED.value - MOVED.low) / (MOVED.high - MOVED.low)
    assert answer.moved(MOVED) == pytest.approx(exp(longest) - 1)
    assert answer.moved(FITTED[1]) == 0


def test_a_source_is_predicted_with_constants_of_the_others():
    """A was measured at the lowest value, B at the one in use: without A nothing moves, without B all the way down."""
    checks = _checks(MOVED.low, "A-1", "A-2") + _checks(MOVED.value, "B-1")
    left = leave_one_out(responses(checks, _timer), _timer)
    by_source = {one.source: one for one in left.sources}
    assert by_source["A"].values[MOVED.name] == MOVED.value
    assert by_source["B"].values[MOVED.name] == MOVED.low
    assert by_source["A"].errors.rows == 2
    assert left.together.rows == 3


def test_one_source_alone_cannot_be_left_out_and_no_rows_move_nothing():
    assert leave_one_out(responses(_checks(MOVED.value, "A-1"), _timer), _timer) is None
    assert fit([]) == {constant.name: constant.value for constant in FITTED}


def test_descent_stays_within_bounds():
    bounded = Constant(name="C", value=2.0, low=1.0, high=3.0, meaning="", source="", unit="ratio")
    assert descend([bounded], lambda values: abs(values["C"] - 10)) == {"C": 3.0}
    assert descend([bounded], lambda values: abs(values["C"] - 1.5))["C"] == pytest.approx(1.5, abs=0.1)
    assert descend([bounded], lambda values: 0.0) == {"C": 2.0}
