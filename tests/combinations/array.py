"""A covering array: few rows that between them hold every wanted group of values."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

from combinations.features import Item, Pair, Row

CANDIDATES = 24
"""Rows that are tried for each row that is taken."""

Group = tuple[Item, ...]
"""Values of two features or more, in the order of the features."""


class CoveringArray:
    """Rows that cover every wanted group and hold allowed pairs only; the same rows on every machine.

    Greedy: each row starts from a group that is still missing and takes, feature by feature, the value that covers
    most; among equals the one of least cost.
    """

    def __init__(
        self,
        features: Mapping[str, Sequence[str]],
        allowed: Collection[Pair],
        wanted: Sequence[Group],
        cost: Mapping[Item, int],
        apart: Sequence[Group] = (),
    ) -> None:
        """Find the rows.

        Args:
            features: Values by feature; every row has one of each.
            allowed: The pairs that can stand together.
            wanted: What is to be covered.
            cost: Of values that are dear to run; the others cost nothing.
            apart: What no row may hold whole, beside the pairs that are not allowed.

        Raises:
            ValueError: a wanted group that cannot be part of a whole row.
        """
        self._features = features
        self._together = frozenset(allowed) | {(second, first) for first, second in allowed}
        self._cost = cost
        self._apart = [set(group) for group in apart]
        self._missing: dict[Item, dict[Group, None]] = {}
        for group in wanted:
            for item in group:
                self._missing.setdefault(item, {})[group] = None
        self.rows: list[Row] = []
        """The rows."""
        while left := list(dict.fromkeys(group for groups in self._missing.values() for group in groups)):
            candidates = list(self._candidates(left))
            if not candidates:
                raise ValueError(f"no row can hold any of {left}")
            self._take(max(candidates, key=lambda row: (len(set(self._covered(row))), -self._spent(row))))

    def _spent(self, row: Row) -> int:
        return sum(self._cost.get(item, 0) for item in row.items())

    def _covered(self, row: Row) -> Iterator[Group]:
        """Yield the missing groups that a row holds, once for each of their values."""
        for item in row.items():
            for group in self._missing.get(item, {}):
                if all(row.get(feature) == value for feature, value in group):
                    yield group

    def _take(self, row: Row) -> None:
        self.rows.append({feature: row[feature] for feature in self._features})
        for group in set(self._covered(row)):
            for item in group:
                del self._missing[item][group]

    def _candidates(self, left: list[Group]) -> Iterator[Row]:
        """Yield whole rows, each from another missing group and with the features in another order."""
        names = list(self._features)
        for number in range(CANDIDATES):
            start = left[number * 7 % len(left)]
            stride = 1 + 2 * (number % 3)
            turned = [names[(place * stride + number) % len(names)] for place in range(len(names))]
            order = dict.fromkeys([*turned, *names])
            row = self._completed(dict(start), [name for name in order if name not in dict(start)])
            if row is not None:
                yield row

    def _completed(self, row: Row, order: list[str]) -> Row | None:
        """Give a row a value of each feature in `order`, going back where none is left; None when nothing fits."""
        if not order:
            return row
        feature, *later = order
        fitting = [value for value in self._features[feature] if self._fits(row, (feature, value))]
        for value in sorted(fitting, key=lambda value: self._rank(row, (feature, value))):
            whole = self._completed({**row, feature: value}, later)
            if whole is not None:
                return whole
        return None

    def _fits(self, row: Row, item: Item) -> bool:
        held = {*row.items(), item}
        return all((item, other) in self._together for other in row.items()) and not any(
            group <= held for group in self._apart
        )

    def _rank(self, row: Row, item: Item) -> tuple[int, int]:
        """Order of a value for a row: first what completes most missing groups, then what costs least."""
        grown = {**row, item[0]: item[1]}
        gain = sum(
            all(grown.get(feature) == value for feature, value in group) for group in self._missing.get(item, {})
        )
        return -gain, self._cost.get(item, 0)
