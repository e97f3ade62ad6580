"""Small steps in whole seconds, and what a timeline says of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from shardwise.predict.schedule.costs import RootCosts, StepCosts, UnitCosts, UpdateCosts
from shardwise.spec.timeline import Lane, Timeline

UNIT = UnitCosts(forward=4, backward=8, gather=3, regather=3, reduce=5)
"""What most steps are made of: forward hides a gather, backward a gather and a reduction."""


def step_of(*units: UnitCosts, ahead: int = 0, behind: int = 1, **changes: Any) -> StepCosts:
    """A step of units a, b, c, ... that are gathered so many ahead; the root has nothing unless it is given."""
    count = len(units)
    given: dict[str, Any] = {"root": RootCosts(unit=UnitCosts()), "update": UpdateCosts(), "rules": "nccl", **changes}
    return StepCosts(
        units=units,
        names=tuple("abcdefgh"[:count]) if count <= 8 else tuple(f"layers.{place}" for place in range(count)),
        ahead=(
            *(tuple(range(place + 1, min(count, place + 1 + ahead))) for place in range(count)),
            tuple(range(min(count, ahead))),
        ),
        behind=tuple(tuple(range(place - 1, max(-1, place - 1 - behind), -1)) for place in range(count + 1)),
        **given,
    )


def without(unit: UnitCosts, *pieces: str) -> UnitCosts:
    """The unit, some of its pieces taking no time."""
    return replace(unit, **dict.fromkeys(pieces, 0.0))


def on(timeline: Timeline, lane: Lane, *whats: str) -> list[tuple[str, float, float]]:
    """(unit, start, end) of all that runs on a lane, in the order of time; or of these kinds only."""
    spans = [span for span in timeline.spans if span.lane == lane and (not whats or span.what in whats)]
    return [(span.unit, span.start, span.end) for span in sorted(spans, key=lambda span: span.start)]


def waits(timeline: Timeline) -> list[tuple[float, float, str, str]]:
    """(start, end, who waits, for whom) of all waits, as `what unit`."""
    return [
        (wait.start, wait.end, f"{wait.held_up.what} {wait.held_up.unit}", f"{wait.by.what} {wait.by.unit}")
        for wait in timeline.waits
    ]
