"""Bytes that collectives put on the wire, by the algorithm of each backend: per rank, and between hosts."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from shardwise.spec.collectives import Collective, Collectives
from shardwise.spec.plan import Mesh

Backend = Literal["gloo", "nccl"]

GLOO_MESSAGE_BYTES = 345
"""What a message of gloo over TCP costs beside its payload on links that send large packets: a header, two notices
that sender and receiver are ready, their packets' headers, acknowledgements. Measured on 2 to 4 ranks: 315 to 365."""

GLOO_SEGMENT_BYTES = 1 << 20
"""Largest piece that gloo's all-reduce sends at once."""


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """What is sent from one place to another."""

    payload_bytes: float = 0.0
    """Bytes of tensors."""
    messages: float = 0.0
    """Messages of gloo that carry them; 0 for NCCL, whose cost per message is not known here."""

    def __add__(self, other: Traffic) -> Traffic:
        """Return both together."""
        return Traffic(payload_bytes=self.payload_bytes + other.payload_bytes, messages=self.messages + other.messages)

    def on_wire(self, header_factor: float = 1.0) -> float:
        """Return all bytes that interfaces count for it, in both directions together.

        Args:
            header_factor: Bytes on the wire per byte of payload of a long transfer: 1 over loopback, about 1.05 over
                Ethernet with packets of 1500 bytes (a lab measures it: `Lab.header_factor`).
        """
        return self.payload_bytes * header_factor + self.messages * GLOO_MESSAGE_BYTES


Flow = tuple[int, int, Traffic]
"""Sender and receiver by their place in a group, and what is sent."""


def wire_bytes(collectives: Collectives, mesh: Mesh, backend: Backend = "gloo") -> Traffic:
    """Return what one rank sends, on average over the ranks of each group.

    ValueError for kinds that no training step has, such as broadcast.
    """
    total = Traffic()
    for row in collectives.rows:
        ranks = len(groups(row.axis, mesh)[0])
        for _, _, sent in _flows(row, ranks, backend):
            total += Traffic(payload_bytes=sent.payload_bytes / ranks, messages=sent.messages / ranks)
    return total


def between_hosts(
    collectives: Collectives, mesh: Mesh, hosts: Sequence[int], backend: Backend = "gloo"
) -> dict[tuple[int, int], Traffic]:
    """Return what goes from each host to each other one.

    Args:
        collectives: What every rank issues.
        mesh: Axes of the ranks.
        hosts: Host of each rank, by rank.
        backend: Whose algorithms send it.

    ValueError for kinds that no training step has, such as broadcast.
    """
    total: defaultdict[tuple[int, int], Traffic] = defaultdict(Traffic)
    for row in collectives.rows:
        for group in groups(row.axis, mesh):
            for sender, receiver, sent in _flows(row, len(group), backend):
                start, end = hosts[group[sender]], hosts[group[receiver]]
                if start != end:
                    total[start, end] += sent
    return dict(total)


def groups(axis: str, mesh: Mesh) -> list[tuple[int, ...]]:
    """Return the groups of ranks over which a collective on `axis` goes, each in the order of the axis.

    ValueError for an axis that the mesh does not have.
    """
    ranks = range(mesh.world)
    if axis == "world":
        return [tuple(ranks)]
    name, _, part = axis.partition("/")
    sizes = {"replicate": mesh.replicate, "shard": mesh.shard, "tensor": mesh.tensor}
    steps = {"replicate": mesh.shard * mesh.tensor, "shard": mesh.tensor, "tensor": 1}
    if name not in sizes:
        raise ValueError(f"{axis} is not an axis of a mesh: use {', '.join(sizes)} or world")
    size, step = sizes[name], steps[name]
    starts = [rank for rank in ranks if rank // step % size == 0]
    whole = [tuple(range(start, start + size * step, step)) for start in starts]
    length = int(part) if part else size
    return [group[first : first + length] for group in whole for first in range(0, size, length)]


def _flows(row: Collective, ranks: int, backend: Backend) -> Iterator[Flow]:
    """Yield what goes from whom to whom in all calls of a row."""
    if ranks == 1:
        return
    size, count = row.payload_bytes, row.count
    whole_twice = 2 * (ranks - 1) / ranks
    if row.kind == "all_to_all":
        pairs = [(a, b) for a in range(ranks) for b in range(ranks) if a != b]
        share, messages, edges = 1 / ranks, 1.0, pairs
    elif row.kind == "all_reduce" or (row.kind == "reduce_scatter" and backend == "gloo"):
        # gloo reduces and gathers along its ring in pieces, from each rank to the one before it.
        pieces = math.ceil(max(size / GLOO_SEGMENT_BYTES, 2 * ranks) / ranks) * ranks
        share, messages = whole_twice, whole_twice * min(pieces, math.ceil(size / 4))
        edges = _ring(ranks, -1 if backend == "gloo" else 1)
    elif row.kind in ("all_gather", "reduce_scatter"):
        share, messages, edges = (ranks - 1) / ranks, 2.0 * (ranks - 1), _ring(ranks, 1)
    else:
        raise ValueError(f"how {row.kind} is sent is not known here: a training step has none")
    sent = Traffic(payload_bytes=share * size * count, messages=messages * count if backend == "gloo" else 0.0)
    for sender, receiver in edges:
        yield sender, receiver, sent


def _ring(ranks: int, direction: int) -> list[tuple[int, int]]:
    return [(rank, (rank + direction) % ranks) for rank in range(ranks)]
