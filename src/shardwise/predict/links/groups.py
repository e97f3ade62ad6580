"""Groups of ranks as the links between them see a collective: machines, ranks on each, neighbours that share adapters.

Ranks are numbered as in `predict.wire`: `tensor` fastest, then `shard`, then `replicate`, and each machine has the next
`per_node` of them.
"""

from __future__ import annotations

from functools import lru_cache
from math import lcm
from typing import NamedTuple

from shardwise.spec.layout import Mesh


class Group(NamedTuple):
    """Ranks that take part in one collective."""

    nodes: int
    """Machines that it spans."""
    per_node: int
    """Ranks of it on each of them; where that is uneven, ranks / machines, rounded up."""
    beside: int = 1
    """Groups of this kind at work at once on one machine, this one included: all of them where a group stays inside
    a machine, else those that leave it, as they share its adapters."""
    step: int = 1
    """Distance of neighbours of the group in the order of ranks; 1: next to each other."""

    @property
    def ranks(self) -> int:
        """Ranks that take part; more than there are where they spread unevenly."""
        return self.nodes * self.per_node


def group_of(axis: str, mesh: Mesh, per_node: int) -> Group:
    """Return the worst group over which a collective on `axis` goes.

    All groups of an axis have as many ranks. The worst is one that spans most machines; `beside` is then that of the
    machine where most groups meet.

    Args:
        axis: `shard`, `replicate`, `tensor`, `world`, or `shard/<k>`: `k` neighbours on that axis.
        mesh: Sizes of the axes.
        per_node: Ranks of one machine.

    ValueError for an axis that the mesh does not have.
    """
    size, stride = _extent(axis, mesh)
    return _worst(size, stride, mesh.world, min(per_node, mesh.world))


def _extent(axis: str, mesh: Mesh) -> tuple[int, int]:
    """Return how many ranks a group of `axis` has, and how far apart they are."""
    if axis == "world":
        return mesh.world, 1
    name, _, part = axis.partition("/")
    sizes = {
        "tensor": (mesh.tensor, 1),
        "shard": (mesh.shard, mesh.tensor),
        "replicate": (mesh.replicate, mesh.shard * mesh.tensor),
    }
    if name not in sizes:
        raise ValueError(f"{axis} is not an axis of a mesh: use {', '.join(sizes)} or world")
    size, stride = sizes[name]
    return (int(part) if part else size), stride


@lru_cache(maxsize=4096)
def _worst(size: int, stride: int, world: int, per_node: int) -> Group:
    span = size * stride
    if size == 1:
        return Group(1, 1, per_node)
    if stride >= per_node:
        return Group(size, 1, per_node, stride)
    if per_node % span == 0:
        return Group(1, size, per_node // size, stride)
    if span % per_node == 0 and per_node % stride == 0:
        return Group(span // per_node, per_node // stride, stride, stride)
    return _worst_of_uneven(size, stride, min(world, lcm(span, per_node)), per_node)


def _worst_of_uneven(size: int, stride: int, world: int, per_node: int) -> Group:
    """Return the worst of groups whose borders are not those of machines, by looking at each of one period.

    Neighbours are nearer than a machine is long, so a group touches every machine between its ends.
    """
    starts = [block + offset for block in range(0, world, size * stride) for offset in range(stride)]
    spans = [(start // per_node, (start + (size - 1) * stride) // per_node) for start in starts]
    nodes = max(last - first + 1 for first, last in spans)
    meeting = [0] * (world // per_node + 1)
    for first, last in spans:
        if last > first or nodes == 1:
            for node in range(first, last + 1):
                meeting[node] += 1
    return Group(nodes, -(-size // nodes), max(meeting), stride)
