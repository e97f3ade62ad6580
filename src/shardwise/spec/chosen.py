"""A value that was chosen for a key of the Job, and the setting that it came from."""

from __future__ import annotations

from dataclasses import dataclass

from shardwise.spec.keys import Given
from shardwise.spec.yaml_text import shown

_LONGEST = 60


@dataclass(frozen=True)
class Chosen:
    """The value of one dotted key of the Job, and the setting that gave it."""

    value: object
    """Value in the Job's own form."""
    given: Given
    """Where it comes from."""

    def __str__(self) -> str:
        value = self.given.value
        words = shown(value) if isinstance(value, str) else repr(value)
        return f"{shown(self.given.written)}: {words.lower() if isinstance(value, bool) else words[:_LONGEST]}"

    def at_least(self, least: int) -> bool:
        """Tell whether the value is a whole number of `least` or more."""
        return isinstance(self.value, int) and not isinstance(self.value, bool) and self.value >= least
