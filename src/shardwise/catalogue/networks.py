"""The network between the machines of a cluster: its wire rate, and what collectives reach of it."""

from __future__ import annotations

from functools import cache
from math import prod
from typing import Annotated, Literal, TypedDict, cast

from pydantic import Field

from shardwise.catalogue.cards import cards
from shardwise.catalogue.data import read_data
from shardwise.spec.cluster import NETWORKS, NVL72, Cluster, Figure, Gpu
from shardwise.spec.problems import BadInput, Problem, did_you_mean
from shardwise.spec.strict import PositiveInt, Strict

Kind = Literal["ib", "roce", "rdma", "efa", "opa", "eth", "net", "nvl72"]
"""InfiniBand, RDMA over Ethernet, RDMA of no said kind, AWS, Omni-Path, Ethernet with kernel sockets, no said kind,
NVLink over the machines of a rack."""

RACK = 72
"""Devices that NVLink joins in a rack of `nvl72`."""

GIGABIT = 125e6
"""Bytes."""

MOST_GIGABITS = 1_000_000
"""Of a machine: more is a slip of the keyboard. NVLink of a machine with eight B200 is 57,600."""

Share = Annotated[float, Field(gt=0, le=1)]


class Network(Strict):
    """What joins the machines of one cluster. Every rate is in bytes per second and one direction."""

    name: str
    """As typed or assumed, in lower case: `ib-8x400`, `roce-1600`, `nvl72`."""
    kind: Kind
    """What it is; `net`: the kind is not known."""
    adapters: PositiveInt | None
    """Of one machine; None: only the rate of the whole machine is said."""
    adapter_rate: float | None
    """Wire rate of one adapter; None where their number is."""
    node_rate: float = Field(gt=0)
    """Wire rate of all adapters of one machine."""
    achieved: Figure
    """Share of the wire rate that large collectives reach between two machines."""
    lowest: Share
    """The smallest share that was reported, of any number of machines."""
    highest: Share
    """The largest."""
    assumed: bool
    """The cluster names no network; this is what machines of its card often have."""
    source: str
    """Of the rate."""

    @property
    def reached(self) -> float:
        """Bytes per second of a machine that large collectives reach between two."""
        return self.node_rate * self.achieved.value


class _Range(Strict):
    achieved: float = Field(gt=0)
    lowest: float = Field(gt=0)
    highest: float = Field(gt=0)


class _Known(_Range):
    """One of `kinds` in `networks.yaml`."""

    gigabytes: _Range | None = None
    source: str

    def shares(self, adapter_rate: float) -> tuple[float, float, float]:
        """Return the shares of the wire that are reached, at the least and at the most, with adapters of this rate."""
        most = self.gigabytes
        if most is None:
            return self.achieved, self.lowest, self.highest
        return (
            min(self.achieved, 1e9 * most.achieved / adapter_rate),
            min(self.lowest, 1e9 * most.lowest / adapter_rate),
            min(self.highest, 1e9 * most.highest / adapter_rate),
        )


class _Assumed(Strict):
    """One of `assumed` in `networks.yaml`."""

    cards: Annotated[tuple[str, ...], Field(strict=False)]
    kind: str
    gigabits: PositiveInt
    adapters: bool
    rack: PositiveInt | None = None
    source: str


class _Else(Strict):
    network: str
    source: str


class _File(Strict):
    kinds: dict[str, _Known]
    tcp_below: PositiveInt
    assumed: Annotated[tuple[_Assumed, ...], Field(strict=False)]
    assumed_else: _Else


@cache
def _file() -> _File:
    return _File.model_validate(read_data("networks.yaml"))


def network_of(cluster: Cluster) -> Network | None:
    """Return what joins the cluster's machines; None: it has one.

    Raises:
        BadInput: its network is not one.
    """
    if cluster.nodes == 1:
        return None
    if cluster.network is not None:
        check_network(cluster.network, cluster.gpu, cluster.world)
        return _network(cluster.network, cluster, assumed=False, source="as named")
    name, source = _assumption(cluster.gpu, cluster.per_node, cluster.nodes)
    return _network(name, cluster, assumed=True, source=source)


def assumed_network(gpu: Gpu | None, *, per_node: int = 8, nodes: int = 2) -> str:
    """Return the network that is assumed between machines of a card (None: of CPU processes) that name none.

    Adapters go with devices: eight A100 have `roce-1600`, four of them `roce-800`.
    """
    return _assumption(gpu, per_node, nodes)[0]


def _assumption(gpu: Gpu | None, per_node: int, nodes: int) -> tuple[str, str]:
    """Return the assumed network and why."""
    for rule in _file().assumed:
        if gpu is None or gpu.name not in rule.cards:
            continue
        if rule.rack is not None and nodes * per_node <= rule.rack:
            return NVL72, rule.source
        rate = f"{per_node}x{rule.gigabits}" if rule.adapters else str(per_node * rule.gigabits)
        return f"{rule.kind}-{rate}", rule.source
    return _file().assumed_else.network, _file().assumed_else.source


def check_network(network: str, gpu: Gpu | None, world: int, *, field: str = "cluster", value: str = "") -> None:
    """Refuse what names no network, or not one of this cluster.

    Args:
        network: `<kind>-<adapters>x<Gb/s of each>`, `<kind>-<Gb/s of a machine>` or `nvl72`, in lower case.
        gpu: The card; None: CPU processes.
        world: Devices of the cluster.
        field: Where it stands, for the message.
        value: What was typed there; default: the network.

    Raises:
        BadInput: an unknown kind, a rate of 0 or beyond all networks, or a rack of NVLink that is too large or has
            cards that are in none.
    """
    wrong = _not_a_rack(gpu, world) if network == NVL72 else not_a_network(network)
    if wrong["reason"]:
        raise BadInput(Problem(field=field, value=value or network, **wrong))


class Wrong(TypedDict):
    """What a Problem says of a network; an empty reason where nothing is wrong."""

    reason: str
    """What is wrong."""
    allowed: str
    """What would be right."""
    fix: str
    """What to write instead."""


def not_a_network(network: str) -> Wrong:
    """Return what is wrong with the name of a network, in lower case, whatever the cluster."""
    kind, _, rate = network.partition("-")
    counts = rate.split("x")
    reason = fix = ""
    if network == NVL72:
        return _wrong("")
    if kind not in NETWORKS:
        reason, fix = f"{kind!r} is not a kind of network", did_you_mean(kind, (*NETWORKS, NVL72))
    elif not rate:
        reason, fix = f"{network!r} does not say how fast it is", f"write {kind}-8x400 or {kind}-100, as it is"
    elif len(counts) > 2 or not all(_is_number(count) for count in counts):
        reason = f"{rate!r} is not a rate"
    elif prod(map(int, counts)) == 0:
        reason = "a rate of 0 is no network"
    elif prod(map(int, counts)) > MOST_GIGABITS:
        reason = f"no machine has more than {MOST_GIGABITS:,} Gb/s"
    return _wrong(reason, fix)


def _wrong(reason: str, fix: str = "") -> Wrong:
    allowed = f"{', '.join(NETWORKS)} with adapters and Gb/s (ib-8x400) or Gb/s alone (roce-1600), {NVL72}"
    return Wrong(reason=reason, allowed=allowed, fix=fix)


def _is_number(text: str) -> bool:
    """Tell whether a text is digits alone, and so few that they are a number of something."""
    return text.isascii() and text.isdigit() and len(text) < 20


def _not_a_rack(gpu: Gpu | None, world: int) -> Wrong:
    """Return what is wrong with a cluster as a rack of `nvl72`, and what to write instead."""
    if gpu is None or gpu.link != "nvlink" or gpu.rates is None:
        return _wrong(f"{NVL72} joins cards with NVLink, which these are not", "name the network between the machines")
    if gpu.name in cards() and not any(rule.rack and gpu.name in rule.cards for rule in _file().assumed):
        other = assumed_network(gpu)
        return _wrong(
            f"no rack joins {gpu.name} over NVLink", f"name the network between the machines, such as {other}"
        )
    if world <= RACK:
        return _wrong("")
    beyond = assumed_network(gpu, nodes=RACK + 1, per_node=4)
    return _wrong(f"a rack of {NVL72} holds {RACK} devices, not {world}", f"name what joins racks, such as {beyond}")


def _network(name: str, cluster: Cluster, *, assumed: bool, source: str) -> Network:
    if name == NVL72:
        assert cluster.gpu is not None
        assert cluster.gpu.rates is not None
        return _described(name, NVL72, None, cluster.per_node * cluster.gpu.rates.link.value, assumed, source)
    kind, _, rate = name.partition("-")
    counts = [int(count) for count in rate.split("x")]
    adapters = counts[0] if len(counts) == 2 else None
    return _described(name, kind, adapters, GIGABIT * counts[-1] * (adapters or 1), assumed, source)


def _described(name: str, kind: str, adapters: int | None, node_rate: float, assumed: bool, source: str) -> Network:
    file = _file()
    sockets = kind == "eth" or (kind == "net" and node_rate < GIGABIT * file.tcp_below)
    known = file.kinds["eth" if sockets else kind]
    adapter_rate = None if adapters is None else node_rate / adapters
    achieved, lowest, highest = known.shares(adapter_rate or node_rate)
    return Network(
        name=name,
        kind=cast(Kind, kind),
        adapters=adapters,
        adapter_rate=adapter_rate,
        node_rate=node_rate,
        achieved=Figure(value=achieved, source=known.source),
        lowest=lowest,
        highest=highest,
        assumed=assumed,
        source=source,
    )
