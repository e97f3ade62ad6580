"""Predicted tokens per second and GPU, held against measured ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from shardwise.catalogue.networks import network_of
from shardwise.predict.step_time import timeline_of
from shardwise.spec.problems import BadInput
from shardwise.spec.timeline import Timeline
from shardwise.trials.cases import Case, Skipped, case_of
from shardwise.trials.measured import MeasuredRow

Timer = Callable[[Case, Mapping[str, float] | None], Timeline]
"""Gives the step of a case; `values` of constants may take the place of the usual."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Timed:
    """What the model of time says of a row."""

    case: Case
    """What was run."""
    timeline: Timeline
    """Its step."""
    network_assumed: bool
    """The row names no network between its nodes: one is assumed by the card."""

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second and GPU."""
        return tokens_of(self.case) / self.timeline.step_s


@dataclass(frozen=True, kw_only=True, slots=True)
class TimeCheck:
    """One row with what became of its throughput."""

    row: MeasuredRow
    """The row."""
    skipped_because: str | None = None
    """Why nothing was predicted of it."""
    timed: Timed | None = None
    """What was; None where nothing is asked of the row or it was skipped."""

    @property
    def measured(self) -> float:
        """Tokens per second and GPU; only of rows that have them."""
        figure = self.row.measured.tokens_per_s_per_gpu
        assert figure is not None
        return figure

    @property
    def headline(self) -> bool:
        """The row is determined well enough to be shown as an error figure."""
        return "throughput" in self.row.headline

    @property
    def relative_error(self) -> float | None:
        """(predicted - measured) / measured; None of a row that is not predicted."""
        return None if self.timed is None else self.timed.tokens_per_s / self.measured - 1


def tokens_of(case: Case) -> float:
    """Return the tokens per optimizer step and GPU."""
    return case.plan.global_batch * case.workload.seq_len / case.plan.mesh.world


def asks_throughput(row: MeasuredRow) -> bool:
    """Whether a row is good for comparing throughput."""
    return "throughput" in row.use and row.measured.tokens_per_s_per_gpu is not None


def time_of(case: Case, values: Mapping[str, float] | None = None) -> Timeline:
    """Return the step of a case, without spans and waits.

    Raises:
        BadInput: nothing is known of how fast the card computes; a layout that no formula describes.
    """
    return timeline_of(case.workload, case.plan, case.cluster, case.runtime, values=values, brief=True)


def check_times(rows: Iterable[MeasuredRow], timer: Timer = time_of) -> list[TimeCheck]:
    """Return every row with its predicted throughput, where it is good for that."""
    return [_checked(row, timer) for row in rows]


def _checked(row: MeasuredRow, timer: Timer) -> TimeCheck:
    if not asks_throughput(row):
        return TimeCheck(row=row)
    try:
        case = case_of(row)
        _refuse(row)
        timeline = timer(case, None)
    except Skipped as error:
        return TimeCheck(row=row, skipped_because=str(error))
    except BadInput as error:
        return TimeCheck(row=row, skipped_because="; ".join(problem.reason for problem in error.problems))
    network = network_of(case.cluster)
    assumed = network is not None and network.assumed
    return TimeCheck(row=row, timed=Timed(case=case, timeline=timeline, network_assumed=assumed))


def _refuse(row: MeasuredRow) -> None:
    """Refuse what a time cannot be given of.

    How many forwards make a step decides how often gradients are reduced and weights updated. Where only adapters
    train, both are small, and one is taken.

    Raises:
        Skipped: with the reason.
    """
    plan = row.plan
    unknown = [
        name
        for name, value in (("activation_checkpointing", plan.activation_checkpointing), ("loss", plan.loss))
        if value == "unknown"
    ]
    if plan.accumulation is None and row.lora is None:
        unknown.append("accumulation")
    if unknown:
        raise Skipped(f"time needs, and the row does not state: {', '.join(f'plan.{name}' for name in unknown)}")
