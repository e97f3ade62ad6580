"""Which units are gathered ahead of which: one rule for the engine that sets it and the schedule that predicts it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from shardwise.spec.layout import Prefetch


class Gathered(Protocol):
    """What must be known of a unit to gather it ahead."""

    @property
    def block(self) -> int | None:
        """Number of the decoder block that it is or lies in; None outside."""

    @property
    def checkpointed(self) -> bool:
        """That block recomputes its activations."""

    @property
    def has_backward(self) -> bool:
        """Whether backward needs its weights."""


def ahead_of(units: Sequence[Gathered], place: int, prefetch: Prefetch) -> list[int]:
    """Return the places of the units that unit `place` gathers ahead in forward, nearest first; -1 is the root.

    Units that share a recomputed block look no further than its end: in the recompute, the next block is done already.
    """
    reach = range(place + 1, min(len(units), place + 1 + prefetch.forward))
    if place < 0 or not units[place].checkpointed:
        return list(reach)
    block = units[place].block
    shared = sum(unit.block == block for unit in units) > 1
    return [other for other in reach if not shared or units[other].block == block]


def behind_of(units: Sequence[Gathered], place: int, prefetch: Prefetch) -> list[int]:
    """Return the places of the units that unit `place` gathers ahead in backward, nearest first; `len(units)` is the
    root. What backward does not need is left out."""
    reach = range(place - 1, max(-1, place - 1 - prefetch.backward), -1)
    return [other for other in reach if units[other].has_backward]
