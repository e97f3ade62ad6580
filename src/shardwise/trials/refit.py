"""The constants of the memory prediction fitted anew to measured rows, within their bounds: to all sources, or to all
but one.

What tensors occupy rests on no constant, so rows of `allocated` and `active` have no say. Every source counts the same,
however many rows it has.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shardwise.predict.constants import ALLOCATOR_BUFFERS, ALLOCATOR_FACTOR, CUDA_CONTEXT, NCCL_CHANNEL, Constant
from shardwise.trials.descent import descend
from shardwise.trials.figures import TENSORS, Errors, errors, mean_of_sources
from shardwise.trials.validate import RowCheck

FITTED: tuple[Constant, ...] = (ALLOCATOR_FACTOR, ALLOCATOR_BUFFERS, CUDA_CONTEXT, NCCL_CHANNEL)
"""Constants that a published peak depends on."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LeftOut:
    """One source, predicted with constants that were fitted without it."""

    source: str
    """Prefix of its ids."""
    values: Mapping[str, float]
    """The constants."""
    errors: Errors
    """Its errors with them."""


def fit(checks: Sequence[RowCheck]) -> dict[str, float]:
    """Return the values of the constants, within their bounds, for which the mean error of the sources is smallest.

    Coordinate descent from the values in use. Rows that are not compared, or whose statistic rests on no constant, do
    not count; where none is left, the values in use come back.
    """
    rows = [check for check in checks if _rests_on_constants(check)]
    if not rows:
        return {constant.name: constant.value for constant in FITTED}
    return descend(FITTED, lambda values: _mean_error(rows, values))


def leave_one_out(checks: Sequence[RowCheck]) -> list[LeftOut]:
    """Return, for every source with rows that rest on constants, its errors with constants fitted to the others."""
    rows = [check for check in checks if _rests_on_constants(check)]
    found = []
    for source in sorted({check.row.family for check in rows}):
        values = fit([check for check in rows if check.row.family != source])
        figure = errors([_error(check, values) for check in rows if check.row.family == source])
        if figure is not None:
            found.append(LeftOut(source=source, values=values, errors=figure))
    return found


def _rests_on_constants(check: RowCheck) -> bool:
    memory = check.memory
    return memory is not None and memory.statistic not in TENSORS


def _error(check: RowCheck, values: Mapping[str, float]) -> float:
    memory, predicted = check.memory, check.predicted
    assert memory is not None
    assert predicted is not None
    return (predicted.gib(memory.statistic, values) - memory.measured) / memory.measured


def _mean_error(rows: Sequence[RowCheck], values: Mapping[str, float]) -> float:
    return mean_of_sources((check.row.family, _error(check, values)) for check in rows)
