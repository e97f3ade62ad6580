"""The collectives of a run or of a plan: how many of each kind, over which ranks, of how many bytes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Literal, Self

from pydantic import Field, model_validator

from shardwise.spec.strict import NotNegative, PositiveInt, Strict

CollectiveKind = Literal[
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "all_reduce",
    "broadcast",
    "reduce",
    "gather",
    "scatter",
    "send",
    "recv",
    "barrier",
]
"""What a call does, in the words of torch.distributed."""

Key = tuple[CollectiveKind, str, int]
"""Kind, axis, bytes of one call."""


class Collective(Strict):
    """Calls that are equal in kind, ranks and size."""

    kind: CollectiveKind
    """What they do."""
    axis: str
    """Mesh axis over which they go: `shard`, `replicate`, `tensor`; `shard/2`: pairs of neighbours on it; `world`: all
    ranks, where no axis holds them all; other groups by their ranks, as `ranks 0,3`."""
    payload_bytes: NotNegative
    """Bytes of one call: an all-gather's output; the input of reduce-scatter and all-to-all; else the tensor."""
    count: PositiveInt
    """Number of calls."""

    @property
    def bytes(self) -> int:
        """Bytes of all calls together."""
        return self.payload_bytes * self.count


class Total(Strict):
    """Calls of one kind over one axis, of any size."""

    kind: CollectiveKind
    """What they do."""
    axis: str
    """Mesh axis."""
    count: NotNegative
    """Number of calls."""
    bytes: NotNegative
    """Bytes of all calls together."""


class Difference(Strict):
    """One kind over one axis, where two counts disagree."""

    counted: Total
    """What ran."""
    planned: Total
    """What the plan means."""
    counted_sizes: dict[int, int] = Field(default_factory=dict)
    """Bytes of one call -> how many calls more were counted than planned."""
    planned_sizes: dict[int, int] = Field(default_factory=dict)
    """Bytes of one call -> how many calls more were planned than counted."""

    def __str__(self) -> str:
        """Return one line: kind, axis, what was counted, what was planned."""
        counted, planned = self.counted, self.planned
        return (
            f"{counted.kind} over {counted.axis}: counted {counted.count} calls, {counted.bytes:,} bytes; "
            f"planned {planned.count} calls, {planned.bytes:,} bytes "
            f"(only counted: {_sizes(self.counted_sizes)}; only planned: {_sizes(self.planned_sizes)})"
        )


class Collectives(Strict):
    """All collectives of one rank in some span, such as a training step; equal when every call is."""

    rows: tuple[Collective, ...]
    """By kind, axis and size, each once; use `of` to make it from counts in any order."""

    @model_validator(mode="after")
    def _is_sorted(self) -> Self:
        keys = [_key(row) for row in self.rows]
        if keys != sorted(set(keys)):
            raise ValueError("rows are not sorted by kind, axis and bytes, or one comes twice")
        return self

    @classmethod
    def of(cls, counts: Mapping[Key, int]) -> Collectives:
        """Make it from counts by kind, axis and bytes of one call; zero counts are left out."""
        return cls(
            rows=tuple(
                Collective(kind=kind, axis=axis, payload_bytes=size, count=counts[kind, axis, size])
                for kind, axis, size in sorted(counts)
                if counts[kind, axis, size]
            )
        )

    @property
    def totals(self) -> tuple[Total, ...]:
        """One entry per kind and axis."""
        pairs = dict.fromkeys((row.kind, row.axis) for row in self.rows)
        return tuple(self.total(kind, axis) for kind, axis in pairs)

    def total(self, kind: CollectiveKind, axis: str) -> Total:
        """Return the calls of one kind over one axis, whatever their size."""
        rows = [row for row in self.rows if (row.kind, row.axis) == (kind, axis)]
        return Total(kind=kind, axis=axis, count=sum(row.count for row in rows), bytes=sum(row.bytes for row in rows))

    def differences(self, planned: Collectives) -> tuple[Difference, ...]:
        """Return where these, counted, are not as planned, by kind and axis; empty exactly when the two are equal."""
        mine, theirs = self._counter(), planned._counter()
        more, fewer = mine - theirs, theirs - mine
        pairs = sorted({(kind, axis) for kind, axis, _ in [*more, *fewer]})
        return tuple(
            Difference(
                counted=self.total(kind, axis),
                planned=planned.total(kind, axis),
                counted_sizes=_of_pair(more, kind, axis),
                planned_sizes=_of_pair(fewer, kind, axis),
            )
            for kind, axis in pairs
        )

    def _counter(self) -> Counter[Key]:
        return Counter({_key(row): row.count for row in self.rows})

    def __str__(self) -> str:
        """Return one line per kind and axis."""
        return "\n".join(
            f"{total.kind} over {total.axis}: {total.count} calls, {total.bytes:,} bytes" for total in self.totals
        )


def _key(row: Collective) -> Key:
    return row.kind, row.axis, row.payload_bytes


def _of_pair(counts: Mapping[Key, int], kind: CollectiveKind, axis: str) -> dict[int, int]:
    return {key[2]: counts[key] for key in sorted(counts) if key[:2] == (kind, axis)}


def _sizes(sizes: Mapping[int, int]) -> str:
    return ", ".join(f"{count} of {size:,} bytes" for size, count in sizes.items()) or "none"
