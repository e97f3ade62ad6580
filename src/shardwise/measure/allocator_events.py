"""Live bytes over time as torch's CPU allocator saw them: an independent check of what a StorageTracker says.

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        training_step(...)
    events = allocator_events(profiler)
    events.peak().bytes, events.peak().by_operator

The allocator sees what no dispatch mode does: memory that kernels take for themselves. It does not know what was alive
before the profile began, so all figures count from there; memory of that time that is freed later does not count
either. It sees the threads that the profiler follows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch.profiler import profile

OUTSIDE = "outside operators"
"""Stands for the operator of memory that was taken outside of any, as resized storages are."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AllocatorEvent:
    """Memory taken or given back."""

    nanoseconds: int
    """When."""
    address: int
    """Where the memory begins."""
    bytes: int
    """Its size; negative when it was given back."""
    operator: str
    """Innermost operator that was running."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AllocatorPeak:
    """The instant at which most was alive."""

    bytes: int
    """Bytes alive that were taken since the profile began."""
    by_operator: Mapping[str, int]
    """The same by the operator in which they were taken."""


@dataclass(frozen=True, kw_only=True)
class AllocatorEvents:
    """What one process took and gave back during a profile, in order."""

    events: tuple[AllocatorEvent, ...]
    """Every event of known memory."""

    def live(self) -> Iterator[int]:
        """Yield the bytes alive after each event."""
        alive = 0
        for event in self.events:
            alive += event.bytes
            yield alive

    def peak(self) -> AllocatorPeak:
        """Return the highest instant; the first of several."""
        highest, place = 0, -1
        for index, alive in enumerate(self.live()):
            if alive > highest:
                highest, place = alive, index
        return AllocatorPeak(bytes=highest, by_operator=self._alive_after(place))

    def _alive_after(self, place: int) -> dict[str, int]:
        alive: dict[int, AllocatorEvent] = {}
        for event in self.events[: place + 1]:
            if event.bytes > 0:
                alive[event.address] = event
            else:
                del alive[event.address]
        found: Counter[str] = Counter()
        for event in alive.values():
            found[event.operator] += event.bytes
        return dict(found.most_common())


def allocator_events(profiler: profile) -> AllocatorEvents:
    """Read the CPU allocator's events out of a finished profile that was made with `profile_memory=True`.

    Memory that is taken at an address where some is alive was given back in a thread that the profiler does not follow:
    it counts as given back just before.
    """
    results: Any = profiler.profiler
    found = sorted(_events(results.kineto_results.experimental_event_tree()), key=lambda event: event.nanoseconds)
    alive: dict[int, AllocatorEvent] = {}
    events: list[AllocatorEvent] = []
    for event in found:
        before = alive.pop(event.address, None)
        if before is not None:
            events.append(_given_back(before, event))
        if event.bytes > 0:
            alive[event.address] = event
            events.append(event)
    return AllocatorEvents(events=tuple(events))


def _given_back(taken: AllocatorEvent, event: AllocatorEvent) -> AllocatorEvent:
    return AllocatorEvent(
        nanoseconds=event.nanoseconds, address=taken.address, bytes=-taken.bytes, operator=event.operator
    )


def _events(tree: Iterable[Any]) -> Iterator[AllocatorEvent]:
    waiting = list(tree)
    while waiting:
        node = waiting.pop()
        waiting += node.children
        if node.tag.name != "Allocation" or node.typed[1].device.type != "cpu":
            continue
        parent = node.parent
        while parent is not None and parent.tag.name != "TorchOp":
            parent = parent.parent
        yield AllocatorEvent(
            nanoseconds=node.start_time_ns,
            address=node.typed[1].ptr,
            bytes=node.typed[1].alloc_size,
            operator=OUTSIDE if parent is None else parent.name,
        )
