"""Live bytes over time as a log of births, resizes and deaths, and what is read from it.

A storage is one `Piece` for each thing that it is for. Its category may become known after its birth (whether a tensor
is saved for backward shows when the block's forward is over) and then holds for all of its life: so nothing is added
up while the log is written, and each byte has exactly one category at any instant.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from shardwise.spec.footprint import PHASES, Category, Instant, LargestBuffer, Phase


class Piece:
    """One storage, as long as it is for one thing."""

    __slots__ = ("bytes", "category", "operator", "where")

    def __init__(self, category: Category, where: str, operator: object) -> None:
        self.bytes = 0
        """Its size now; 0 when it is dead or freed."""
        self.category: Category = category
        """What it is for."""
        self.where = where
        """Unit at work when it was born."""
        self.operator = operator
        """Operator that it was born in; a word where there was none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Key:
    """What is at work."""

    step: int
    """Optimizer steps done before it."""
    phase: Phase
    """Phase of the step."""
    micro_batch: int
    """Micro-batch of the step, counted from 0."""
    where: str
    """Unit at work: a block such as `model.layers.1`, an embedding of its own, `root`, `loss`, `gradients` (between
    backward and optimizer), `optimizer`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Segment:
    """The time in which one unit is at work, without a break."""

    key: Key
    """What is at work."""
    visit: int
    """How many segments with this key came before."""
    start: Mapping[Category, int]
    """Live bytes when it begins."""
    peak: Mapping[Category, int]
    """Live bytes at its highest instant, by what is allocated on the device; the first of several."""
    end: Mapping[Category, int]
    """Live bytes when it is over."""

    @property
    def instant(self) -> Instant:
        """Its highest instant."""
        return Instant(phase=self.key.phase, where=self.key.where, live=self.peak)


class StorageLog:
    """What happened to storages, in order."""

    def __init__(self) -> None:
        self._events: list[tuple[Piece, int]] = []
        self._marks: list[tuple[int, Key]] = []

    def resize(self, piece: Piece, size: int) -> None:
        """Give a piece another size: its first one is its birth, 0 its death."""
        if size != piece.bytes:
            self._events.append((piece, size - piece.bytes))
            piece.bytes = size

    def mark(self, key: Key) -> None:
        """Begin a segment."""
        self._marks.append((len(self._events), key))

    def sizes(self) -> Iterator[tuple[Piece, int]]:
        """Yield (piece, change in bytes) in order."""
        return iter(self._events)

    def segments(self) -> list[Segment]:
        """Return all segments so far in order; those in which nothing happened are left out."""
        live: dict[Category, int] = {}
        found: list[Segment] = []
        visits: Counter[Key] = Counter()
        ends = [place for place, _ in self._marks[1:]] + [len(self._events)]
        for (begin, key), end in zip(self._marks, ends, strict=True):
            if begin == end:
                continue
            start, peak = dict(live), dict(live)
            highest = allocated = _allocated(live)
            for piece, change in self._events[begin:end]:
                live[piece.category] = live.get(piece.category, 0) + change
                if piece.category != "offloaded":
                    allocated += change
                    if allocated > highest:
                        highest, peak = allocated, dict(live)
            found.append(Segment(key=key, visit=visits[key], start=start, peak=peak, end=dict(live)))
            visits[key] += 1
        return found

    def largest(self) -> LargestBuffer | None:
        """Return the largest piece that was ever on the device; None when there was none."""
        sizes: dict[Piece, int] = {}
        best: tuple[int, Piece] | None = None
        for piece, change in self._events:
            size = sizes[piece] = sizes.get(piece, 0) + change
            if piece.category != "offloaded" and (best is None or size > best[0]):
                best = (size, piece)
        if best is None:
            return None
        return LargestBuffer(bytes=best[0], category=best[1].category, where=best[1].where)


def peaks(segments: Iterable[Segment]) -> tuple[Instant, ...]:
    """Return the highest instant of each phase that was seen, in the order of PHASES."""
    highest: dict[Phase, Instant] = {}
    for segment in segments:
        instant, phase = segment.instant, segment.key.phase
        if phase not in highest or instant.allocated > highest[phase].allocated:
            highest[phase] = instant
    return tuple(highest[phase] for phase in PHASES if phase in highest)


def _allocated(live: Mapping[Category, int]) -> int:
    return sum(size for category, size in live.items() if category != "offloaded")
