"""What a walk has done: the operations of one phase, equal ones together."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import TypeVar

from shardwise.predict.work import AttentionWork, Exchange, PartWork, Product, Work
from shardwise.spec.speeds import TimedKind

_Entry = TypeVar("_Entry", bound=Hashable)
_Counts = dict[tuple[int, ...], int]


class Record:
    """The operations of one phase: plain tuples -> how often; `Work` gives them their names."""

    __slots__ = ("attention", "exchanges", "moves", "products")

    def __init__(self) -> None:
        self.products: _Counts = {}
        self.attention: dict[AttentionWork, int] = {}
        self.moves: dict[int, int] = {}
        self.exchanges: dict[tuple[TimedKind, int], int] = {}

    def work(self, *others: Record) -> Work:
        """Return what this record and others hold together."""
        records = (self, *others)
        products = _together(*(record.products for record in records))
        exchanges = _together(*(record.exchanges for record in records))
        return Work(
            products=tuple((Product(*sizes), count) for sizes, count in products.items()),
            attention=tuple(_together(*(record.attention for record in records)).items()),
            moves=tuple(_together(*(record.moves for record in records)).items()),
            exchanges=tuple((Exchange(*exchange), count) for exchange, count in exchanges.items()),
        )


class Phases:
    """The records of forward, of backward, and of what backward computes again."""

    __slots__ = ("again", "backward", "forward")

    def __init__(self) -> None:
        self.forward, self.backward, self.again = Record(), Record(), Record()

    def work(self) -> PartWork:
        """Return the work of the part."""
        return PartWork(forward=self.forward.work(), backward=self.backward.work(self.again), again=self.again.work())


def _together(*counts: Mapping[_Entry, int]) -> dict[_Entry, int]:
    summed: dict[_Entry, int] = {}
    for one in counts:
        for entry, count in one.items():
            summed[entry] = summed.get(entry, 0) + count
    return summed
