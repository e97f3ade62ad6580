"""What is wrong with an input, said so that it can be mended."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One thing that is wrong with the user's input."""

    field: str
    """Where: a dotted configuration key, or a file with its line (`faq.jsonl:12`)."""
    value: object = None
    """What was given; None when something is missing."""
    reason: str
    """What is wrong with it, in one clause."""
    allowed: str = ""
    """What would be accepted, when that can be listed."""
    fix: str = ""
    """The likely remedy ("did you mean 'full_shard'?")."""
    line: int | None = None
    """Line in the configuration file, counted from 1, when known."""

    def __str__(self) -> str:
        """One line: `field: value: reason; allowed: ...; fix`."""
        place = f"line {self.line}: {self.field}" if self.line is not None else self.field
        parts = [f"{place}: {self.value!r}: {self.reason}" if self.value is not None else f"{place}: {self.reason}"]
        if self.allowed:
            parts.append(f"allowed: {self.allowed}")
        if self.fix:
            parts.append(self.fix)
        return "; ".join(parts)


class BadInput(Exception):
    """The input cannot be used; holds every problem found, so that all can be mended at once. Exit code 2."""

    def __init__(self, problems: Problem | Iterable[Problem]) -> None:
        self.problems: tuple[Problem, ...] = (problems,) if isinstance(problems, Problem) else tuple(problems)
        super().__init__("\n".join(str(problem) for problem in self.problems))

    def __reduce__(self) -> tuple[type[BadInput], tuple[tuple[Problem, ...]]]:
        """Keep the problems when one rank sends this to the others."""
        return type(self), (self.problems,)


def did_you_mean(given: str, choices: Iterable[str]) -> str:
    """Return "did you mean 'x'?" for the nearest of `choices`, or "" when none is near."""
    by_lower = {choice.lower(): choice for choice in choices}
    near = difflib.get_close_matches(given.lower(), by_lower, n=1, cutoff=0.6)
    return f"did you mean {by_lower[near[0]]!r}?" if near else ""
