"""The Timeline: what happens when in one optimizer step, on which lane, and what computing waits for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple, TypeVar, get_args, overload

Item = TypeVar("Item")

Lane = Literal[
    "compute", "copy_in", "all_gather", "reduce_scatter", "all_reduce", "to_device", "to_host", "host", "issue"
]
"""Where something runs: the device's main stream; the stream that puts shards into gathers' buffers; the streams of
each kind of collective (whether they share a communicator is the schedule's matter); copies from the host to the
device and back; work of the host (an optimizer there); the host's thread that issues operations. On one lane one thing
runs at a time."""
LANES: tuple[Lane, ...] = get_args(Lane)
COMMUNICATION: tuple[Lane, ...] = ("all_gather", "reduce_scatter", "all_reduce", "to_device", "to_host")
"""Lanes of collectives and of copies between host and device."""

What = Literal[
    "forward",
    "backward",
    "copy_in",
    "copy_out",
    "reduce_copy_in",
    "reduce_sum",
    "all_gather",
    "reduce_scatter",
    "all_reduce",
    "fetch",
    "store",
    "leave",
    "return",
    "clip",
    "update",
    "exchange",
    "issue",
]
"""What a span is. `backward` holds recomputation; `copy_out` takes weights out of a gather's buffer, `reduce_copy_in`
puts gradients into a reduction's, `reduce_sum` (on CPUs) adds up what came; `fetch` brings shards from the host,
`store` takes gradients there; what a block saves for backward may `leave` for the host and `return`; `clip` is the
gradient norm; `exchange` is one agreement of all ranks, such as the count of trained tokens or the norm's sum."""

ROOT = "root"
"""Name of the root unit."""


class Span(NamedTuple):
    """Something that takes time on a lane of rank 0."""

    lane: Lane
    """Where."""
    what: What
    """What."""
    unit: str
    """For which unit, such as `model.layers.17` or `root`; empty for the whole model."""
    micro_batch: int
    """Number of the micro-batch, from 0."""
    start: float
    """Seconds since the step began."""
    end: float
    """Seconds since the step began."""


class Wait(NamedTuple):
    """A stretch in which the compute lane has work and cannot do it."""

    start: float
    """Seconds since the step began."""
    end: float
    """Seconds since the step began."""
    held_up: Span
    """What starts at `end`: it waited."""
    by: Span
    """What ended last of all it had to wait for."""


class Later(Sequence[Item]):
    """A sequence that is made when somebody first looks into it: most Timelines are asked for their totals alone."""

    def __init__(self, make: Callable[[], Sequence[Item]]) -> None:
        self._make: Callable[[], Sequence[Item]] | None = make
        self._items: Sequence[Item] = ()

    @property
    def items(self) -> Sequence[Item]:
        """All of it."""
        if self._make is not None:
            self._items, self._make = self._make(), None
        return self._items

    @overload
    def __getitem__(self, place: int) -> Item: ...

    @overload
    def __getitem__(self, place: slice) -> Sequence[Item]: ...

    def __getitem__(self, place: int | slice) -> Item | Sequence[Item]:
        return self.items[place]

    def __len__(self) -> int:
        return len(self.items)

    def __eq__(self, other: object) -> bool:
        return tuple(self) == tuple(other) if isinstance(other, Sequence) else NotImplemented

    __hash__ = None  # type: ignore[assignment]


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """One optimizer step of rank 0."""

    step_s: float
    """Seconds from the step's begin to its end."""
    spans: Sequence[Span]
    """What happens, in the order in which the schedule issues it; none in a brief timeline. Of many alike micro-batches
    in the middle of a step only the first are listed; `step_s`, `busy` and `exposed` count all."""
    waits: Sequence[Wait]
    """Where the compute lane stands still, in order, of the micro-batches whose spans are listed."""
    busy: dict[Lane, float]
    """Seconds in which each lane works, by interval union."""
    exposed: dict[Lane, float]
    """Seconds in which a collective or a copy to or from the host is under way on that lane and nothing is computed."""
    exposed_s: float
    """The same of all of them together, by interval union."""

    hidden_s: float = 0.0
    """Seconds in which a collective or a copy to or from the host is under way and something is computed."""
    tensor_s: float = 0.0
    """Seconds of computing that are collectives over the tensor axis, which nothing hides."""
    notes: tuple[str, ...] = ()
    """What a reader has to know of these figures: assumptions, what is left out."""

    @cached_property
    def overlap_efficiency(self) -> float:
        """Share of all communication (union over its lanes) under which something is computed; 1 when there is none."""
        total = self.communication_s
        return 1.0 if total <= 0 else 1.0 - self.exposed_s / total

    @property
    def communication_s(self) -> float:
        """Seconds in which any collective or copy to or from the host is under way."""
        return self.hidden_s + self.exposed_s
