"""A pairwise covering array: few rows that between them hold every pair of values that can stand together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from combinations.features import Pair, Row

CANDIDATES = 24
"""Rows that are tried for each row that is taken."""


def covering_array(
    features: Mapping[str, Sequence[str]], wanted: Sequence[Pair], cost: Mapping[tuple[str, str], int]
) -> list[Row]:
    """Return rows that cover every wanted pair and hold no other; the same rows on every machine.

    Greedy: each row starts from a pair that is still missing and takes, feature by feature, the value that covers most;
    among equals the one of least cost.

    Args:
        features: Values by feature.
        wanted: The pairs that can stand together; every row holds one value of each feature.
        cost: Of values that are dear to run; the others cost nothing.

    Raises:
        ValueError: a wanted pair that cannot be part of a whole row.
    """
    allowed = frozenset(wanted) | {(second, first) for first, second in wanted}
    missing = dict.fromkeys(wanted)
    rows: list[Row] = []
    while missing:
        best: tuple[int, int, Row] | None = None
        for row in _candidates(features, list(missing), allowed, missing, cost):
            gain = sum(pair in missing for pair in _pairs(row, features))
            spent = sum(cost.get(item, 0) for item in row.items())
            if best is None or (gain, -spent) > best[:2]:
                best = gain, -spent, row
        if best is None:
            raise ValueError(f"no row can hold any of {list(missing)}")
        rows.append(best[2])
        for pair in _pairs(best[2], features):
            missing.pop(pair, None)
    return rows


def _pairs(row: Row, features: Mapping[str, Sequence[str]]) -> Iterator[Pair]:
    items = [(feature, row[feature]) for feature in features]
    for place, first in enumerate(items):
        for second in items[place + 1 :]:
            yield first, second


def _candidates(
    features: Mapping[str, Sequence[str]],
    missing: list[Pair],
    allowed: frozenset[Pair],
    uncovered: Mapping[Pair, None],
    cost: Mapping[tuple[str, str], int],
) -> Iterator[Row]:
    """Yield whole rows, each from another missing pair and with the features in another order."""
    names = list(features)
    for number in range(CANDIDATES):
        start = missing[number * 7 % len(missing)]
        turned = [names[(place * (1 + 2 * (number % 3)) + number) % len(names)] for place in range(len(names))]
        order = list(dict.fromkeys([*turned, *names]))
        row = _grown(dict(start), order, features, allowed, uncovered, cost)
        if row is not None:
            yield row


def _grown(
    row: Row,
    order: list[str],
    features: Mapping[str, Sequence[str]],
    allowed: frozenset[Pair],
    uncovered: Mapping[Pair, None],
    cost: Mapping[tuple[str, str], int],
) -> Row | None:
    """Complete a row, going back where no value is left; None when nothing completes it."""
    feature = next((name for name in order if name not in row), None)
    if feature is None:
        return row
    possible = [
        value
        for value in features[feature]
        if all(((feature, value), item) in allowed for item in row.items())
    ]
    gains = {
        value: sum(((feature, value), item) in uncovered or (item, (feature, value)) in uncovered for item in row.items())
        for value in possible
    }
    for value in sorted(possible, key=lambda value: (-gains[value], cost.get((feature, value), 0))):
        whole = _grown({**row, feature: value}, order, features, allowed, uncovered, cost)
        if whole is not None:
            return whole
    return None
