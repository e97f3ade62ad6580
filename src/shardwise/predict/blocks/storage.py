"""Bytes that live as long as something refers to them, by what they are for."""

from __future__ import annotations

ACTIVATION, RECOMPUTED, TEMPORARY, GRADIENT, LOGITS, UNCOUNTED = range(6)
"""What a storage is for; UNCOUNTED: parameters and others that are not the computation's."""


class Memory:
    """Live bytes by kind, and the highest sum so far."""

    __slots__ = ("at_peak", "live", "now", "peak")

    def __init__(self) -> None:
        self.live = [0, 0, 0, 0, 0, 0]
        self.now = 0
        self.reset()

    def reset(self) -> None:
        """Forget the highest sum: from here on it is looked for again."""
        self.peak = self.now
        self.at_peak = self.live[:]


class Storage:
    """Bytes that live as long as this object does."""

    __slots__ = ("__weakref__", "kind", "memory", "size", "waiting")

    def __init__(self, memory: Memory, size: int, kind: int) -> None:
        self.memory, self.size, self.kind = memory, size, kind
        self.waiting = 0
        if kind != UNCOUNTED:
            memory.now += size
            memory.live[kind] += size
            if memory.now > memory.peak:
                memory.peak = memory.now
                memory.at_peak = memory.live[:]

    def __del__(self) -> None:
        if self.kind != UNCOUNTED:
            self.memory.now -= self.size
            self.memory.live[self.kind] -= self.size

    def save(self, kind: int) -> None:
        """Count a temporary as a kind of activation from here on; what has a name of its own keeps it."""
        if self.kind == TEMPORARY:
            self.turn(kind)

    def turn(self, kind: int) -> None:
        """Count these bytes as another kind from here on."""
        self.memory.live[self.kind] -= self.size
        self.memory.live[kind] += self.size
        self.kind = kind
