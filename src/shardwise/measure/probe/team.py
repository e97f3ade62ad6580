"""All ranks of a probe: who they are, what they agree on, and the groups that a mesh would make of them."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from shardwise.spec.problems import BadInput, Problem


class Shape(NamedTuple):
    """How many machines a group spans, and how many of its ranks are on each."""

    nodes: int
    """Machines."""
    per_node: int
    """Ranks of the group on each."""

    def __str__(self) -> str:
        """As people write it: `2 hosts x 4`."""
        return f"{self.nodes} host{'s' if self.nodes > 1 else ''} x {self.per_node}"


@dataclass(frozen=True, kw_only=True)
class Team:
    """This rank among all; ranks are numbered machine by machine."""

    rank: int
    """Number of this rank."""
    nodes: int
    """Machines."""
    per_node: int
    """Ranks of each."""
    device: torch.device
    """This rank's device."""
    hosts: tuple[str, ...] = field(default=("",))
    """Name of every rank's machine."""

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self.nodes * self.per_node

    def slowest(self, seconds: Sequence[float]) -> list[float]:
        """Return, place by place, the largest value of all ranks. Collective, and a barrier."""
        if self.world == 1:
            return list(seconds)
        values = torch.tensor(seconds, dtype=torch.float64)
        dist.all_reduce(values, op=dist.ReduceOp.MAX)
        return [float(value) for value in values]

    def everyone(self, value: float) -> tuple[float, ...]:
        """Return every rank's value, by rank. Collective."""
        if self.world == 1:
            return (value,)
        values = torch.zeros(self.world, dtype=torch.float64)
        values[self.rank] = value
        dist.all_reduce(values)
        return tuple(float(each) for each in values)

    def barrier(self) -> None:
        """Wait for all ranks."""
        self.slowest([0.0])

    def name(self, rank: int) -> str:
        """Return how people find a rank: its number, and its machine where there are several."""
        if self.nodes == 1:
            return f"rank {rank}"
        return f"rank {rank} (host {rank // self.per_node}, {self.hosts[rank]})"

    def group(self, shape: Shape) -> dist.ProcessGroup:
        """Return this rank's group of a shape; groups of that shape cover all ranks. Collective."""
        if shape == (self.nodes, self.per_node):
            assert dist.group.WORLD is not None
            return dist.group.WORLD
        made: dict[tuple[int, ...], dist.ProcessGroup] = {}
        for ranks in members(shape, self.nodes, self.per_node):
            made[ranks] = dist.new_group(list(ranks))
        return next(group for ranks, group in made.items() if self.rank in ranks)


def join(device: torch.device) -> Team:
    """Return this process's team: torchrun's ranks, whose process group is initialised, or this process alone.

    Raises:
        BadInput: machines with different numbers of ranks.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return Team(rank=0, nodes=1, per_node=1, device=device, hosts=(socket.gethostname(),))
    rank, world = dist.get_rank(), dist.get_world_size()
    seen: list[Any] = [None] * world
    dist.all_gather_object(seen, (int(os.environ.get("GROUP_RANK", "0")), socket.gethostname()))
    counts = [sum(node == each for node, _ in seen) for each in sorted({node for node, _ in seen})]
    if len(set(counts)) > 1 or [node for node, _ in seen] != sorted(node for node, _ in seen):
        reason = f"machines must have equally many ranks, numbered machine by machine; they have {counts}"
        raise BadInput(Problem(field="torchrun", reason=reason, fix="use one --nproc-per-node on every machine"))
    hosts = tuple(host for _, host in seen)
    return Team(rank=rank, nodes=len(counts), per_node=counts[0], device=device, hosts=hosts)


def shapes(nodes: int, per_node: int) -> tuple[Shape, ...]:
    """Return the shapes of groups that meshes make of `nodes` x `per_node` ranks, the whole first: on one machine, and
    over all machines, every divisor of its ranks."""
    divisors = [part for part in range(per_node, 0, -1) if per_node % part == 0]
    across = [Shape(nodes, part) for part in divisors] if nodes > 1 else []
    return tuple(across + [Shape(1, part) for part in divisors if part > 1])


def members(shape: Shape, nodes: int, per_node: int) -> tuple[tuple[int, ...], ...]:
    """Return the ranks of every group of a shape: neighbours on one machine; over all machines, ranks that lie as far
    apart as the tensor axis between them is long."""
    groups = per_node // shape.per_node
    if shape.nodes == 1:
        firsts = range(0, nodes * per_node, shape.per_node)
        return tuple(tuple(range(first, first + shape.per_node)) for first in firsts)
    places = [[node * per_node + place for place in range(per_node)] for node in range(nodes)]
    return tuple(tuple(rank for ranks in places for rank in ranks[first::groups]) for first in range(groups))
