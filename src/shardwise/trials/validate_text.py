"""Checked rows as JSON for machines and as text for people."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from shardwise.predict.constants import GIB
from shardwise.trials import figures, throughput_text
from shardwise.trials.figures import Confusion, Errors, skipped
from shardwise.trials.refit import FITTED, LeftOut, leave_one_out
from shardwise.trials.throughput_text import Findings, constants_text, error_table, errors_as_json
from shardwise.trials.validate import By, RowCheck

WORST = 10
"""Rows that the text names as furthest off."""


def as_json(checks: Sequence[RowCheck], by: By, throughput: Findings | None = None) -> dict[str, Any]:
    """Return everything for machines; README of the measurements explains the fields of a row.

    Args:
        checks: Rows with their memory.
        by: What predicted it.
        throughput: The same rows with their throughput; None: it was not looked at.
    """
    times = {check.row.id: throughput_text.row_as_json(check) for check in throughput.checks} if throughput else {}
    summary = _summary(checks, by)
    summary["throughput"] = throughput_text.summary_as_json(throughput) if throughput else None
    return {"rows": [{**_row(check), "throughput": times.get(check.row.id)} for check in checks], "summary": summary}


def _row(check: RowCheck) -> dict[str, Any]:
    memory = check.memory
    compared = None
    if memory is not None:
        compared = {
            "predicted": memory.predicted,
            "measured": memory.measured,
            "relative_error": memory.relative_error,
            "statistic": memory.statistic,
            "headline": memory.headline,
        }
    return {
        "id": check.row.id,
        "outcome": check.row.measured.outcome,
        "fits_predicted": check.fits_predicted,
        "skipped_because": check.skipped_because,
        "memory": compared,
    }


def _summary(checks: Sequence[RowCheck], by: By) -> dict[str, Any]:
    return {
        "by": by,
        "rows": len(checks),
        "compared": sum(check.memory is not None for check in checks),
        "skipped": skipped(checks),
        "overall": errors_as_json(figures.of_rows(checks)),
        "tensors": errors_as_json(figures.of_rows(checks, tensors=True)),
        "headline_tensors": errors_as_json(figures.of_rows(checks, tensors=True, headline=True)),
        "headline_others": errors_as_json(figures.of_rows(checks, tensors=False, headline=True)),
        "by_statistic": {name: asdict(figure) for name, figure in figures.by_statistic(checks).items()},
        "by_source": {name: asdict(figure) for name, figure in figures.by_source(checks).items()},
        "leave_one_source_out": [
            {"source": left.source, "constants": dict(left.values), **asdict(left.errors)}
            for left in leave_one_out(checks)
        ],
        "feasibility": asdict(figures.confusion(checks)),
    }


def as_text(checks: Sequence[RowCheck], by: By, throughput: Findings | None = None) -> str:
    """Return everything for people; arguments as `as_json`."""
    lines = [*_lines(checks, by)]
    if throughput is not None:
        lines += ["", *throughput_text.lines(throughput)]
    return "\n".join(lines)


def _lines(checks: Sequence[RowCheck], by: By) -> Iterator[str]:
    compared = sum(check.memory is not None for check in checks)
    yield f"{len(checks)} rows, {compared} with a peak to compare, predicted by {by}"
    yield ""
    yield "peak memory, relative error"
    yield from error_table(_overall(checks))
    for title, groups in (("by statistic", figures.by_statistic(checks)), ("by source", figures.by_source(checks))):
        yield ""
        yield title
        yield from error_table(groups)
    yield from _leave_one_out(leave_one_out(checks))
    yield from _headline_reserved(checks)
    yield ""
    yield "furthest off"
    yield from (f"  {line}" for check in figures.worst(checks, WORST) for line in worst_lines(check))
    yield ""
    yield from _feasibility(figures.confusion(checks), figures.wrongly_called(checks))
    yield ""
    for reason, count in skipped(checks).items():
        yield f"skipped {count}: {reason}"


def _overall(checks: Sequence[RowCheck]) -> dict[str, Errors]:
    named = {
        "headline, allocated or active": figures.of_rows(checks, tensors=True, headline=True),
        "headline, others": figures.of_rows(checks, tensors=False, headline=True),
        "all, allocated or active": figures.of_rows(checks, tensors=True),
        "all, others": figures.of_rows(checks, tensors=False),
        "all": figures.of_rows(checks),
    }
    return {name: figure for name, figure in named.items() if figure is not None}


def _leave_one_out(left: Sequence[LeftOut]) -> Iterator[str]:
    if not left:
        return
    yield ""
    yield "by source, constants fitted without it (statistics that rest on constants)"
    yield from error_table({one.source: one.errors for one in left})
    for one in left:
        yield f"  {one.source}: {constants_text(FITTED, one.values)}"


def _headline_reserved(checks: Sequence[RowCheck]) -> Iterator[str]:
    """Say of every headline row that rests on constants how."""
    rows = [c for c in checks if c.memory and c.memory.headline and c.memory.statistic not in figures.TENSORS]
    if rows:
        yield ""
        yield "headline rows that rest on constants"
    for check in rows:
        assert check.predicted is not None
        yield f"  {_figures(check)}"
        terms = ", ".join(f"{term.name} {term.bytes / GIB:.2f}" for term in check.predicted.device.terms)
        yield f"      {terms} GiB; ALLOCATOR_FACTOR and ALLOCATOR_BUFFERS of predict/constants.py"


def _figures(check: RowCheck) -> str:
    memory = check.memory
    assert memory is not None
    return (
        f"{check.row.id}: {memory.predicted:.2f} GiB predicted, {memory.measured:.2f} {memory.statistic},"
        f" {memory.relative_error:+.1%}"
    )


def worst_lines(check: RowCheck) -> Iterator[str]:
    """Yield what a row's prediction consists of, and which of its fields are guesses."""
    assert check.predicted is not None
    yield _figures(check)
    peak = check.predicted.peak
    parts = sorted(peak.live.items(), key=lambda part: -part[1])
    sizes = ", ".join(f"{name.replace('_', ' ')} {size / GIB:.2f}" for name, size in parts[:4] if size)
    yield f"    {peak.phase.replace('_', ' ')}, {peak.where}: {sizes} GiB"
    guesses = [name for name in check.row.assumed if name.startswith(("plan.", "lora.", "model."))]
    if guesses:
        yield f"    assumed in the row: {', '.join(guesses)}"


def _feasibility(table: Confusion, wrong: Sequence[RowCheck]) -> Iterator[str]:
    yield "does it fit?      called fitting   called out of memory"
    yield f"  ran             {table.fits_called_fitting:14}   {table.fits_called_oom:20}"
    yield f"  out of memory   {table.oom_called_fitting:14}   {table.oom_called_oom:20}"
    for check in wrong:
        assert check.predicted is not None
        device = check.predicted.device
        limit = f" of {device.limit / GIB:.2f}" if device.limit is not None else ""
        yield (
            f"  {check.row.id} {check.row.measured.outcome}: {check.predicted.peak.allocated / GIB:.2f} GiB in tensors,"
            f" {device.total.value / GIB:.2f}{limit} on the card"
        )
