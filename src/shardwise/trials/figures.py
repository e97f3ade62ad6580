"""Error figures over checked rows: by source, by statistic, overall; what fits as a table of hits and misses."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from shardwise.trials.validate import RowCheck

TENSORS = ("allocated", "active")
"""Statistics of what tensors occupy, which no constant enters."""


class Skipping(Protocol):
    """A row that may have been skipped, whatever is predicted of it."""

    @property
    def skipped_because(self) -> str | None:
        """Why; None: it was not."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Errors:
    """Errors of some rows, absolute and relative."""

    rows: int
    """How many rows."""
    median: float
    """Half of them are below."""
    p90: float
    """Nine of ten are below, linearly interpolated."""
    bias: float
    """Median of the signed errors: above 0, predictions are too high."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Confusion:
    """Rows that ran or ran out of memory, by what was predicted."""

    fits_called_fitting: int
    fits_called_oom: int
    oom_called_oom: int
    oom_called_fitting: int


def percentile(values: Sequence[float], share: float) -> float:
    """Return the value below which `share` of `values` lie, between two of them on the line through both."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])


def errors(relative: Sequence[float]) -> Errors | None:
    """Return the error figures of signed relative errors; None of none."""
    if not relative:
        return None
    absolute = [abs(error) for error in relative]
    return Errors(
        rows=len(relative),
        median=percentile(absolute, 0.5),
        p90=percentile(absolute, 0.9),
        bias=percentile(relative, 0.5),
    )


def errors_of_groups(relative: Iterable[tuple[str, float]]) -> dict[str, Errors]:
    """Return the error figures of signed relative errors, each with the name of its group, by name."""
    groups: dict[str, list[float]] = {}
    for name, error in relative:
        groups.setdefault(name, []).append(error)
    found = {name: errors(group) for name, group in sorted(groups.items())}
    return {name: figure for name, figure in found.items() if figure is not None}


def mean_of_sources(relative: Iterable[tuple[str, float]]) -> float:
    """Return the mean over sources of the mean absolute error, of errors with the names of their sources: what fits
    make small, so that a source counts the same however many rows it has."""
    sources: dict[str, list[float]] = {}
    for name, error in relative:
        sources.setdefault(name, []).append(abs(error))
    return sum(sum(found) / len(found) for found in sources.values()) / len(sources)


def skipped(checks: Iterable[Skipping]) -> dict[str, int]:
    """Return how many rows were skipped, by reason."""
    reasons = Counter(check.skipped_because for check in checks)
    return dict(sorted((reason, count) for reason, count in reasons.items() if reason is not None))


def errors_by(checks: Iterable[RowCheck], key: Callable[[RowCheck], str]) -> dict[str, Errors]:
    """Return the errors of the compared rows in groups, by name."""
    return errors_of_groups((key(check), check.memory.relative_error) for check in checks if check.memory is not None)


def by_source(checks: Iterable[RowCheck]) -> dict[str, Errors]:
    """Return the errors by the prefix of ids, which stands for the source, and the kind of statistic."""
    return errors_by(checks, lambda check: f"{check.row.family} {check.row.measured.statistic}")


def by_statistic(checks: Iterable[RowCheck]) -> dict[str, Errors]:
    """Return the errors by statistic."""
    return errors_by(checks, lambda check: str(check.row.measured.statistic))


def of_rows(checks: Iterable[RowCheck], *, tensors: bool | None = None, headline: bool = False) -> Errors | None:
    """Return the errors of some rows together.

    Args:
        checks: Rows.
        tensors: Only those of what tensors occupy (True), only the others (False), all (None).
        headline: Only rows that are determined best.
    """
    chosen = []
    for check in checks:
        memory = check.memory
        if memory is None or (headline and not memory.headline):
            continue
        if tensors is None or (memory.statistic in TENSORS) == tensors:
            chosen.append(memory.relative_error)
    return errors(chosen)


def confusion(checks: Iterable[RowCheck]) -> Confusion:
    """Return how rows that fitted and rows that ran out of memory were called."""
    counts = {(ran, called): 0 for ran in (True, False) for called in (True, False)}
    for check in checks:
        called = check.fits_predicted
        if called is not None:
            counts[check.row.measured.outcome == "ok", called] += 1
    return Confusion(
        fits_called_fitting=counts[True, True],
        fits_called_oom=counts[True, False],
        oom_called_oom=counts[False, False],
        oom_called_fitting=counts[False, True],
    )


def worst(checks: Iterable[RowCheck], count: int) -> list[RowCheck]:
    """Return the compared rows that are furthest off."""

    def size(check: RowCheck) -> float:
        memory = check.memory
        return 0.0 if memory is None else abs(memory.relative_error)

    return sorted((check for check in checks if check.memory is not None), key=size, reverse=True)[:count]


def wrongly_called(checks: Iterable[RowCheck]) -> list[RowCheck]:
    """Return the rows whose fitting was called wrongly."""
    return [c for c in checks if c.fits_predicted is not None and c.fits_predicted != (c.row.measured.outcome == "ok")]
