"""Advice: one change of a plan, and what it does to the peak."""

from __future__ import annotations

from dataclasses import dataclass

from shardwise.spec.footprint import Instant, Interval


@dataclass(frozen=True, kw_only=True, slots=True)
class Advice:
    """One change of a plan that lowers its peak."""

    settings: tuple[str, ...]
    """What to type, such as `activation_checkpointing=full`; several only where one needs the others."""
    does: str
    """What it does, in words."""
    costs: str
    """What it costs, in words."""
    lowers: int
    """Bytes by which the peak of allocated memory falls."""
    peak: Instant
    """Where the peak is then."""
    device: Interval | None
    """What the card shows then; None on CPUs."""
    fits: bool | None
    """Whether that is within the card's limit; None without a limit."""
