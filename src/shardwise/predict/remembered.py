"""Values remembered: the newest of a dictionary, or per object as long as that lives, for objects that cannot be
hashed, such as a ModelSpec."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

Key = TypeVar("Key")
Value = TypeVar("Value")

LIMIT = 8192
"""Values kept per object; at more, all are forgotten."""


class Remembered(Generic[Value]):
    """A value per object and key. The object is told by identity and has to be immutable."""

    def __init__(self) -> None:
        self._by_id: dict[int, tuple[weakref.ref[object], dict[Hashable, Value]]] = {}

    def get(self, owner: object, key: Hashable, make: Callable[[], Value]) -> Value:
        """Return the value for `owner` and `key`, made on first demand."""
        place = id(owner)
        held = self._by_id.get(place)
        if held is None or held[0]() is not owner:
            held = (weakref.ref(owner, lambda _: self._forget(place)), {})
            self._by_id[place] = held
        values = held[1]
        if key not in values:
            made = make()
            if len(values) >= LIMIT:
                values.clear()
            values[key] = made
        return values[key]

    def _forget(self, place: int) -> None:
        """Drop what is remembered of an object that is gone, unless a new one took its place."""
        held = self._by_id.get(place)
        if held is not None and held[0]() is None:
            del self._by_id[place]


def remember(known: dict[Key, Value], key: Key, made: Value, *, most: int) -> Value:
    """Keep a value that was made, and return it; of `most` values the oldest goes."""
    if len(known) >= most:
        known.pop(next(iter(known)))
    known[key] = made
    return made
