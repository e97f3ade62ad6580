"""Seconds of a collective by NCCL's algorithms: rings, trees, and all-reduce with the help of the switch."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import ceil, log2

from shardwise.catalogue.fabrics import known_fabrics, ring_factor
from shardwise.predict.links.buses import Bus, Buses
from shardwise.predict.links.groups import Group
from shardwise.spec.speeds import TimedKind


@dataclass(frozen=True, kw_only=True)
class Model:
    """The time of collectives, from the rates of links."""

    buses: Buses
    """The links of every group."""
    start_s: float
    """Seconds before the first byte is on its way."""
    step: float
    """Seconds of a step over those in NCCL's tuning table."""
    decline: float
    """How bus bandwidth falls with machines."""
    _known: dict[Group, Bus] = field(default_factory=dict, repr=False, compare=False)

    def bus(self, group: Group) -> Bus:
        """Return the links of a group of at least two ranks, the same object each time."""
        found = self._known.get(group)
        if found is None:
            found = self._known[group] = self.buses.of(group, self.decline)
        return found

    def seconds(self, kind: TimedKind, payload: float, group: Group) -> float:
        """Return the seconds of one collective.

        start + steps x latency + payload x factor / bus bandwidth, as NCCL's own model has it; of the algorithms for
        all-reduce the fastest, which is what NCCL takes.

        Args:
            kind: What it is.
            payload: Bytes of the whole buffer.
            group: The ranks, two at least.
        """
        bus = self.bus(group)
        seconds = self._ring(kind, payload, group, bus)
        if kind == "all_reduce" and bus.machines > 1:
            seconds = min(seconds, self._tree(payload, group, bus))
        if kind == "all_reduce" and bus.multicast is not None:
            seconds = min(seconds, 2 * bus.step_s * self.step + payload / bus.multicast)
        return self.start_s + seconds

    def _ring(self, kind: TimedKind, payload: float, group: Group, bus: Bus) -> float:
        """Return the seconds of a ring: once around for gathers and reductions, twice for sums."""
        around = 2 if kind == "all_reduce" else 1
        hops = bus.machines - 1
        latency = around * ((group.ranks - 1 - hops) * bus.step_s + hops * bus.hop_s)
        return latency * self.step + payload * ring_factor(kind, group.ranks) / bus.rate

    def _tree(self, payload: float, group: Group, bus: Bus) -> float:
        """Return the seconds of two trees over the machines with a chain inside each: up and down again."""
        depth = ceil(log2(bus.machines))
        chain = ceil(group.ranks / bus.machines) - 1
        latency = 2 * (chain * bus.step_s + depth * bus.hop_s)
        return latency * self.step + 2 * payload / (bus.rate * known_fabrics().tree.value)
