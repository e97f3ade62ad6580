"""Predictions held against measured rows, like with like: what tensors occupy, what the allocator holds, what the card
shows, and whether it fits."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from shardwise.predict.constants import GIB
from shardwise.predict.device import device_memory
from shardwise.predict.estimate import estimate
from shardwise.spec.footprint import DeviceMemory, Footprint, Instant, Phase
from shardwise.spec.problems import BadInput
from shardwise.spec.report import Report
from shardwise.trials.cases import Case, Skipped, case_of
from shardwise.trials.measured import MeasuredRow, Statistic

By = Literal["estimate", "trace"]
"""Which instrument predicts."""

TRAINING: tuple[Phase, ...] = ("forward", "backward", "optimizer_step")
"""Phases that published peaks are of."""

Compared = Literal["allocated", "reserved", "device"]

COMPARED_WITH: dict[Statistic, Compared] = {
    "allocated": "allocated",
    "active": "allocated",
    "reserved": "reserved",
    "unknown": "reserved",
    "nvidia-smi": "device",
}
"""Statistic of a row -> the figure of a prediction that means the same. A source that does not name its tool is taken
to mean what most tools print."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryCheck:
    """One measured peak with its prediction."""

    predicted: float
    """GiB."""
    measured: float
    """GiB."""
    statistic: Statistic
    """What was measured."""
    headline: bool
    """The row is determined well enough to be shown as an error figure."""

    @property
    def relative_error(self) -> float:
        """(predicted - measured) / measured."""
        return (self.predicted - self.measured) / self.measured


@dataclass(frozen=True, kw_only=True, slots=True)
class Predicted:
    """What an instrument says of a row."""

    case: Case
    """What was run."""
    peak: Instant
    """The highest instant of the step."""
    largest_buffer: int
    """Bytes of the largest contiguous buffer."""
    device: DeviceMemory
    """What the card holds."""

    def gib(self, statistic: Statistic, values: Mapping[str, float] | None = None) -> float:
        """Return the figure that a statistic means, in GiB; `values` of constants may take the place of the usual."""
        device = self.device if values is None else device_of(self.case, self.peak, self.largest_buffer, values)
        figures = {
            "allocated": self.peak.allocated,
            "reserved": device.reserved.value,
            "device": device.total.value,
        }
        return figures[COMPARED_WITH[statistic]] / GIB


@dataclass(frozen=True, kw_only=True, slots=True)
class RowCheck:
    """One row with what became of it."""

    row: MeasuredRow
    """The row."""
    skipped_because: str | None = None
    """Why nothing was predicted of it."""
    predicted: Predicted | None = None
    """What was; None where nothing is asked of the row or it was skipped."""

    @property
    def memory(self) -> MemoryCheck | None:
        """Its peak against the prediction, where the row is good for that."""
        measured = self.row.measured
        if self.predicted is None or not asks_memory(self.row):
            return None
        assert measured.peak_gib is not None
        assert measured.statistic is not None
        return MemoryCheck(
            predicted=self.predicted.gib(measured.statistic),
            measured=measured.peak_gib,
            statistic=measured.statistic,
            headline="memory" in self.row.headline,
        )

    @property
    def fits_predicted(self) -> bool | None:
        """Whether the card has enough by the prediction; None where the row is not good for that."""
        if self.predicted is None or not asks_feasibility(self.row) or not self.predicted.case.knows_card:
            return None
        return self.predicted.device.fits


def asks_memory(row: MeasuredRow) -> bool:
    """Whether a row is good for comparing peaks."""
    return "memory" in row.use and row.measured.peak_gib is not None and row.measured.statistic is not None


def asks_feasibility(row: MeasuredRow) -> bool:
    """Whether a row is good for telling what fits; one that ran out of memory always is."""
    return "feasibility" in row.use or row.measured.outcome == "oom"


def device_of(
    case: Case, peak: Instant, largest_buffer: int, values: Mapping[str, float] | None = None
) -> DeviceMemory:
    """Return what the card holds of a case at its highest instant."""
    return device_memory(peak.allocated, case.plan, case.cluster, largest_buffer=largest_buffer, values=values)


def check_rows(rows: Iterable[MeasuredRow], by: By = "estimate") -> list[RowCheck]:
    """Return every row with its prediction."""
    instrument: Callable[[Case], Report] = _estimated if by == "estimate" else _traced
    return [_checked(row, instrument) for row in rows]


def _checked(row: MeasuredRow, instrument: Callable[[Case], Report]) -> RowCheck:
    if not asks_memory(row) and not asks_feasibility(row):
        return RowCheck(row=row)
    try:
        case = case_of(row)
        if not asks_memory(row) and not case.knows_card:
            raise Skipped(f"the catalogue does not know the card: {row.cluster.gpu}")
        report = instrument(case)
    except Skipped as error:
        return RowCheck(row=row, skipped_because=str(error))
    except BadInput as error:
        return RowCheck(row=row, skipped_because="; ".join(str(problem) for problem in error.problems))
    peak, buffer = _peak_of_training(report.footprint), report.footprint.largest_buffer.bytes
    device = device_of(case, peak, buffer)
    return RowCheck(row=row, predicted=Predicted(case=case, peak=peak, largest_buffer=buffer, device=device))


def _peak_of_training(footprint: Footprint) -> Instant:
    """Return the highest instant of a training step: published peaks are of training, without evaluation."""
    steps = [instant for instant in footprint.peaks if instant.phase in TRAINING]
    return max(steps, key=lambda instant: instant.allocated)


def _estimated(case: Case) -> Report:
    return estimate(case.workload, case.plan, case.cluster, case.runtime)


def _traced(case: Case) -> Report:
    """Return the trace of a case, run as shardwise runs it: transformers' code of today, checkpoints not reentrant.

    Raises:
        Skipped: a program that shardwise does not run.
    """
    runtime, plan = case.runtime, case.plan
    alone = runtime.sharding == "none" and plan.mesh.world == 1
    if runtime.sharding != "fsdp2" and not alone:
        raise Skipped(f"the trace runs FSDP2 or one process, and this is {runtime.sharding}")
    if runtime.base_quantization is not None:
        raise Skipped("the trace runs no quantised base yet")
    if alone and runtime.autocast:
        raise Skipped("the trace runs no autocast: what trains rests in another dtype than the computation's")
    from shardwise.predict.trace import trace

    if alone:
        in_turn = plan.reduce_scatter.model_copy(update={"asynchronous": False})
        plan = plan.model_copy(update={"reduce_scatter": in_turn})
    return trace(case.workload, plan, case.cluster, wrapped=not alone)
