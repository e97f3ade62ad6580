"""The constants of the model of time fitted anew to measured rows, within their bounds: to all sources, or to all but
one. Every source counts the same, however many rows it has.

A step is simulated anew for every value of a constant, so a fit does not try all values at once: it looks at how each
row answers to each constant alone, and takes the answers to multiply. Errors that are reported are those of whole
simulations with the values found.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import exp, log

from shardwise.predict.constants import Constant
from shardwise.predict.links.constants import CONSTANTS as OF_LINKS
from shardwise.predict.pace.constants import CONSTANTS as OF_PACE
from shardwise.trials.descent import descend
from shardwise.trials.figures import Errors, errors, mean_of_sources
from shardwise.trials.refit import LeftOut
from shardwise.trials.throughput_checks import TimeCheck, Timer, time_of
from shardwise.trials.throughput_figures import compared

FITTED: tuple[Constant, ...] = (*OF_PACE, *OF_LINKS)
"""Constants that a published throughput depends on."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Response:
    """How the step of one row answers to the constants."""

    check: TimeCheck
    """The row."""
    logs: Mapping[str, tuple[float, float, float]]
    """Constant -> logarithm of the step time over that with the values in use, at its lowest value, its value in use
    and its highest."""

    def relative_error(self, values: Mapping[str, float]) -> float:
        """Return the error of its throughput if the answers to single constants multiply."""
        timed = self.check.timed
        assert timed is not None
        total = sum(_between(constant, self.logs[constant.name], values[constant.name]) for constant in FITTED)
        return timed.tokens_per_s / self.check.measured * exp(-total) - 1

    def moved(self, constant: Constant) -> float:
        """Return the largest share by which the constant changes the step within its bounds."""
        low, _, high = self.logs[constant.name]
        return exp(max(abs(low), abs(high))) - 1


@dataclass(frozen=True, kw_only=True, slots=True)
class TimesLeftOut:
    """Every source predicted with constants that were fitted without it."""

    sources: tuple[LeftOut, ...]
    """One after the other."""
    together: Errors
    """Errors of all their rows."""


def responses(checks: Sequence[TimeCheck], timer: Timer = time_of) -> list[Response]:
    """Return how every compared row answers to the constants, by two simulations per constant."""
    return [_response(check, timer) for check in compared(checks)]


def fit(answers: Sequence[Response]) -> dict[str, float]:
    """Return the values of the constants, within their bounds, for which the mean error of the sources is smallest.

    Without rows, the values in use come back.
    """
    if not answers:
        return {constant.name: constant.value for constant in FITTED}
    return descend(FITTED, lambda values: _mean_error(answers, values))


def leave_one_out(answers: Sequence[Response], timer: Timer = time_of) -> TimesLeftOut | None:
    """Return the errors of every source with constants fitted to the others; None of fewer than two sources."""
    names = sorted({answer.check.row.family for answer in answers})
    if len(names) < 2:
        return None
    found, pooled = [], []
    for name in names:
        values = fit([answer for answer in answers if answer.check.row.family != name])
        relative = [_error(answer.check, values, timer) for answer in answers if answer.check.row.family == name]
        figure = errors(relative)
        assert figure is not None
        found.append(LeftOut(source=name, values=values, errors=figure))
        pooled += relative
    overall = errors(pooled)
    assert overall is not None
    return TimesLeftOut(sources=tuple(found), together=overall)


def _response(check: TimeCheck, timer: Timer) -> Response:
    timed = check.timed
    assert timed is not None

    def answer(constant: Constant, value: float) -> float:
        if value == constant.value:
            return 0.0
        return log(timer(timed.case, {constant.name: value}).step_s / timed.timeline.step_s)

    logs = {one.name: (answer(one, one.low), 0.0, answer(one, one.high)) for one in FITTED}
    return Response(check=check, logs=logs)


def _between(constant: Constant, logs: tuple[float, float, float], value: float) -> float:
    """Return the logarithm at a value, on the lines through those at the bounds and at the value in use."""
    if value <= constant.value:
        width, far = constant.value - constant.low, logs[0]
        return 0.0 if width == 0 else far * (constant.value - value) / width
    return logs[2] * (value - constant.value) / (constant.high - constant.value)


def _error(check: TimeCheck, values: Mapping[str, float], timer: Timer) -> float:
    """Return the error of a row simulated with these values."""
    timed = check.timed
    assert timed is not None
    slower = timer(timed.case, values).step_s / timed.timeline.step_s
    return timed.tokens_per_s / slower / check.measured - 1


def _mean_error(answers: Sequence[Response], values: Mapping[str, float]) -> float:
    return mean_of_sources((answer.check.row.family, answer.relative_error(values)) for answer in answers)
