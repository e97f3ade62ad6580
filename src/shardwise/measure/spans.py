"""What ran when on a rank: compute and collectives as intervals, from torch.profiler; exposed communication."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch.profiler import profile

Interval = tuple[float, float]
"""(start, end) in seconds."""

KINDS = {
    "all_gather": "all_gather",
    "_allgather_base": "all_gather",
    "all_to_all": "reduce_scatter",
    "alltoall": "reduce_scatter",
    "reduce_scatter": "reduce_scatter",
    "_reduce_scatter_base": "reduce_scatter",
    "all_reduce": "all_reduce",
    "allreduce": "all_reduce",
}
"""Name that a backend gives a collective -> its kind. An all-to-all is how gradients are reduced here on CPUs."""

_BACKENDS = ("gloo:", "nccl:")
_POSTED = "shardwise::"
_KERNELS = ("aten::", "fsdp::")


@dataclass(frozen=True, kw_only=True)
class Spans:
    """Intervals of one rank."""

    compute: tuple[Interval, ...]
    """When a kernel ran, merged."""
    collectives: dict[str, tuple[Interval, ...]]
    """Kind -> when at least one of that kind was under way, merged."""

    def exposed(self) -> dict[str, float]:
        """Return, by kind, the seconds in which such a collective was under way and nothing was computed."""
        return {kind: total(without(spans, self.compute)) for kind, spans in self.collectives.items()}

    def exposed_total(self) -> float:
        """Return the seconds in which any collective was under way and nothing was computed."""
        every = merged(span for spans in self.collectives.values() for span in spans)
        return total(without(every, self.compute))


def spans_of(profiled: profile) -> Spans:
    """Read the intervals of a finished profile of this process's CPU activity.

    Compute is what operators of ATen and FSDP2 (its copies) did on any thread. A gloo reduce-scatter shows as the
    all-reduce that it is; messages of an exchange as the collective within which they were posted.
    """
    events: Any = profiled.events  # untyped in torch
    compute: list[Interval] = []
    collectives: dict[str, list[Interval]] = {}
    messages: list[Interval] = []
    posted: list[tuple[Interval, str]] = []
    for event in events() or ():
        span = (event.time_range.start / 1e6, event.time_range.end / 1e6)
        backend = next((word for word in _BACKENDS if event.name.startswith(word)), None)
        name = event.name.removeprefix(backend or "")
        if event.name.startswith(_KERNELS):
            compute.append(span)
        elif event.name.startswith(_POSTED):
            posted.append((span, event.name.removeprefix(_POSTED)))
        elif backend is not None and name in ("send", "recv"):
            messages.append(span)
        elif backend is not None:
            collectives.setdefault(KINDS.get(name, name), []).append(span)
    for message in messages:
        kind = next((kind for (start, end), kind in posted if start <= message[0] <= end), "message")
        collectives.setdefault(kind, []).append(message)
    return Spans(compute=merged(compute), collectives={kind: merged(spans) for kind, spans in collectives.items()})


def merged(spans: Iterable[Interval]) -> tuple[Interval, ...]:
    """Return the union of intervals as disjoint ones, in order."""
    joined: list[Interval] = []
    for start, end in sorted(spans):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((start, end))
    return tuple(joined)


def without(spans: Sequence[Interval], holes: Sequence[Interval]) -> tuple[Interval, ...]:
    """Return what of `spans` lies outside `holes`; both disjoint and in order."""
    left: list[Interval] = []
    place = 0
    for start, end in spans:
        while place < len(holes) and holes[place][1] <= start:
            place += 1
        at = place
        while at < len(holes) and holes[at][0] < end:
            if holes[at][0] > start:
                left.append((start, holes[at][0]))
            start = max(start, holes[at][1])
            at += 1
        if start < end:
            left.append((start, end))
    return tuple(left)


def total(spans: Iterable[Interval]) -> float:
    """Return the summed length of disjoint intervals."""
    return sum(end - start for start, end in spans)
