"""Constants fitted within their bounds: coordinate descent on any error."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from shardwise.predict.constants import Constant

ROUNDS = 3
"""Passes over the constants; each looks at STEPS values of one constant, in a range half as wide as the pass before."""
STEPS = 9


def descend(constants: Sequence[Constant], error: Callable[[Mapping[str, float]], float]) -> dict[str, float]:
    """Return the values of `constants`, within their bounds, for which `error` is smallest, from the values in use on.

    Args:
        constants: What may move.
        error: Takes values by name.
    """
    best = {constant.name: constant.value for constant in constants}
    lowest = error(best)
    for turn in range(ROUNDS):
        for constant in constants:
            for value in _values(constant, best[constant.name], turn):
                tried = {**best, constant.name: value}
                found = error(tried)
                if found < lowest:
                    best, lowest = tried, found
    return best


def _values(constant: Constant, around: float, turn: int) -> list[float]:
    """Return the values of a constant that one pass looks at."""
    width = (constant.high - constant.low) / 2**turn
    low, high = max(constant.low, around - width / 2), min(constant.high, around + width / 2)
    return [low + (high - low) * step / (STEPS - 1) for step in range(STEPS)]
