"""The Report: a plan with what an instrument says of it. Any two can be laid side by side."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from shardwise.spec.footprint import Footprint
from shardwise.spec.plan import Plan
from shardwise.spec.timeline import Timeline

Instrument = Literal["estimate", "trace", "rehearse", "run"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """What one instrument says of one plan."""

    instrument: Instrument
    """Where the figures come from."""
    plan: Plan
    """The plan."""
    footprint: Footprint
    """Its memory."""
    timeline: Timeline | None = None
    """Its step, lane by lane; None: not looked at, or speeds of this cluster are not known."""
    notes: tuple[str, ...] = ()
    """What a reader has to know: stand-ins, what was left out, assumptions."""
