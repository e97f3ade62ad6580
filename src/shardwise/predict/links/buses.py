"""What a group of ranks has between its members: bus bandwidth, the time of a step, and where these are from."""

from __future__ import annotations

from dataclasses import dataclass

from shardwise.catalogue.fabrics import Bridge, Fabric, known_fabrics
from shardwise.catalogue.networks import Network
from shardwise.predict.links.groups import Group
from shardwise.spec.cluster import NVL72, Rates


@dataclass(frozen=True, kw_only=True, slots=True)
class Bus:
    """The links of one group."""

    rate: float
    """Bytes a second of bus bandwidth that large rings reach."""
    step_s: float
    """Seconds of a ring's step inside a machine."""
    hop_s: float
    """Seconds of a ring's step between machines."""
    multicast: float | None
    """Bytes of payload a second of an all-reduce with the switch's help; None: there is no such help."""
    machines: int
    """Machines between which a network carries the ring; NVLink over a rack makes it one machine."""
    source: str
    """Where the rate is from."""
    assumed: bool = False
    """Whether that rests on something that nobody said, such as the network."""


@dataclass(frozen=True, kw_only=True)
class Buses:
    """The links of a cluster, by groups."""

    rates: Rates
    """Of the card."""
    per_node: int
    """Devices of a machine."""
    network: Network | None
    """Between machines; None: there is one machine."""
    fabric: Fabric
    """Between the devices of a machine."""
    bridge: Bridge | None
    """Between neighbours, where the card has one."""

    def of(self, group: Group, decline: float) -> Bus:
        """Return the links of a group of at least two ranks.

        Args:
            group: The ranks.
            decline: Bus bandwidth between machines falls as (machines / 2) to minus this.
        """
        if group.nodes == 1:
            return self._inside(group)
        assert self.network is not None
        if self.network.kind == NVL72:
            return self._inside(Group(1, group.ranks, group.beside, group.step))
        inside = self._inside(group)
        between = self._between(group) * (group.nodes / 2) ** -decline
        capped = group.per_node > 1 and inside.rate < between
        return Bus(
            rate=inside.rate if capped else between,
            step_s=inside.step_s,
            hop_s=inside.hop_s,
            multicast=None,
            machines=group.nodes,
            source=inside.source if capped else self._network_source(self.network),
            assumed=inside.assumed if capped else self.network.assumed,
        )

    def _inside(self, group: Group) -> Bus:
        """Return the links between the ranks of the group in one machine."""
        facts = known_fabrics()
        pcie = self.fabric.wiring == "host"
        rate, source, assumed = self._bridged(group) or (*self._plain(group), False)
        multicast = self.fabric.multicast
        return Bus(
            rate=rate,
            step_s=facts.latency["pcie" if pcie else "nvlink"].value,
            hop_s=facts.latency["network"].value,
            multicast=self.rates.link.value * multicast.value if multicast else None,
            machines=1,
            source=source,
            assumed=assumed,
        )

    def _plain(self, group: Group) -> tuple[float, str]:
        share, link = self.fabric.share, self.rates.link
        wired = 1.0
        if self.fabric.devices is not None:
            wired = min(1.0, (group.per_node - 1) / (self.fabric.devices - 1))
        elif self.fabric.through is not None and not (self.rates.peer_to_peer and self._under_one_root(group)):
            share = self.fabric.through
        return link.value * wired * share.value, f"{link.value / 1e9:g} GB/s ({link.source}), of that {share.value:g}"

    def _bridged(self, group: Group) -> tuple[float, str, bool] | None:
        """Return rate, source and whether it is assumed, where a bridge joins the pair."""
        if self.bridge is None or not self.bridge.usual or (group.per_node, group.step) != (2, 1):
            return None
        return self.bridge.bus.value, f"an NVLink bridge between neighbours ({self.bridge.bus.source})", True

    def _under_one_root(self, group: Group) -> bool:
        return (group.per_node - 1) * group.step < known_fabrics().direct.value

    def _between(self, group: Group) -> float:
        """Return what the adapters of a machine give to this group: its share of the ranks of the machine or, alone,
        at least one adapter, and never more than what the groups beside it leave."""
        network = self.network
        assert network is not None
        alone = network.reached * min(1.0, group.per_node / self.per_node)
        if network.adapter_rate is not None:
            alone = max(alone, network.adapter_rate * network.achieved.value)
        return min(alone, network.reached / group.beside)

    @staticmethod
    def _network_source(network: Network) -> str:
        rate = f"{network.name}, {network.node_rate / 1e9:g} GB/s a machine ({network.source})"
        return f"{rate}, of that {network.achieved.value:g} ({network.achieved.source})"
