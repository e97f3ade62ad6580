"""Throughput of measured rows for tests: steps that last what a test says."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardwise.spec.timeline import LANES, Timeline
from shardwise.trials.cases import Case
from shardwise.trials.measured import MeasuredRow
from shardwise.trials.throughput_checks import TimeCheck, check_times
from trials.rows import row


def timeline(step_s: float) -> Timeline:
    """Return a step in which nothing but computing happens."""
    idle = dict.fromkeys(LANES, 0.0)
    busy = {**idle, "compute": step_s}
    return Timeline(step_s=step_s, spans=(), waits=(), busy=busy, exposed=idle, exposed_s=0.0)


def lasting(step_s: float):
    """Return a timer of steps that all last as long."""

    def timer(case: Case, values: Mapping[str, float] | None = None) -> Timeline:
        return timeline(step_s)

    return timer


def timed_row(measured: float, **changes: Any) -> dict[str, Any]:
    """Return a row with a throughput, changed as `trials.rows.row` does."""
    return row(**{"measured__tokens_per_s_per_gpu": measured, "use": ["throughput"], **changes})


def checked(content: dict[str, Any], step_s: float) -> TimeCheck:
    """Return a row predicted to take `step_s` per step."""
    return check_times([MeasuredRow.model_validate(content)], lasting(step_s))[0]
