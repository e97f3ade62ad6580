"""Fabrics between devices: what collectives reach of a link's rate, latencies, and collectives measured on them."""

from __future__ import annotations

from functools import cache
from typing import Annotated, Literal

from pydantic import Field, model_validator

from shardwise.catalogue.clusters import find_cluster
from shardwise.catalogue.data import read_data
from shardwise.spec.cluster import Cluster, Figure, Gpu
from shardwise.spec.speeds import TimedKind
from shardwise.spec.strict import PositiveInt, Strict

MIB = 2**20

FIT_MIB = (16.0, 64.0, 256.0, 1024.0)
"""Payloads at which a curve that is published as a straight line is looked at."""

Names = Annotated[tuple[str, ...], Field(strict=False)]


class Fabric(Strict):
    """How the devices of one machine are joined."""

    cards: Names = ()
    """Cards of the catalogue that come with it; those linked over PCIe are not listed."""
    wiring: Literal["switch", "mesh", "host"]
    """`switch`: any ranks at a card's full rate; `mesh`: a link to each other device; `host`: over PCIe."""
    devices: int | None = Field(default=None, gt=1)
    """Devices of a whole mesh, over whose links a card's rate is; None: no mesh."""
    share: Figure
    """Bus bandwidth of a large ring over the card's rate; over PCIe, where all reach each other's memory directly."""
    through: Figure | None = None
    """The same through host memory; None: not over PCIe."""
    multicast: Figure | None = None
    """Payload that an all-reduce with the switch's help moves a second, over the card's rate; None: it cannot help."""


class Bridge(Strict):
    """NVLink between two neighbouring PCIe cards."""

    cards: Names
    """Cards that can have one."""
    usual: bool
    """Whether machines with these cards usually have them, and are taken to."""
    bus: Figure
    """Bytes a second of a large ring over the pair."""


class Fit(Strict):
    """A measurement that is published as a straight line: seconds = floor + payload x factor / bus."""

    floor: float = Field(gt=0)
    """Seconds of a collective of almost nothing."""
    bus: float = Field(gt=0)
    """Bytes a second of bus bandwidth for large ones."""


class FabricCurve(Strict):
    """Collectives that were measured on a known fabric, all ranks or `per_node` of each machine taking part."""

    cluster: str
    """As people type it, network included."""
    kind: TimedKind
    """What was measured."""
    per_node: PositiveInt | None = None
    """Ranks of each machine that took part; None: all."""
    bus: Annotated[tuple[Annotated[tuple[float, float], Field(strict=False)], ...], Field(strict=False)] = ()
    """(MiB of the whole payload, GB/s of bus bandwidth)."""
    fit: Fit | None = None
    """In place of `bus`."""
    within: float = Field(gt=1)
    """Largest factor between measured and predicted seconds that is accepted."""
    source: str
    """Where it is from."""

    @model_validator(mode="after")
    def _one_form(self) -> FabricCurve:
        if bool(self.bus) == (self.fit is not None):
            raise ValueError("a curve has `bus` or `fit`")
        return self

    def on(self) -> Cluster:
        """Return the cluster."""
        return find_cluster(self.cluster)

    def shape(self) -> tuple[int, int]:
        """Return machines and ranks of each that took part."""
        cluster = self.on()
        return cluster.nodes, self.per_node or cluster.per_node

    def points(self) -> tuple[tuple[float, float], ...]:
        """Return (bytes of the whole payload, seconds)."""
        nodes, per_node = self.shape()
        factor = ring_factor(self.kind, nodes * per_node)
        if self.fit is not None:
            sizes = [mib * MIB for mib in FIT_MIB]
            return tuple((size, self.fit.floor + size * factor / self.fit.bus) for size in sizes)
        return tuple((mib * MIB, mib * MIB * factor / (rate * 1e9)) for mib, rate in self.bus)


class Fabrics(Strict):
    """`fabrics.yaml`."""

    fabrics: dict[str, Fabric]
    """By name."""
    bridges: Annotated[tuple[Bridge, ...], Field(strict=False)]
    """Of all PCIe cards that can have one."""
    latency: dict[Literal["nvlink", "pcie", "network"], Figure]
    """Seconds of one step of a ring, by what it crosses."""
    tree: Figure
    """Bus bandwidth of trees over that of rings."""
    direct: Figure
    """Devices of a machine that usually sit under one root complex."""
    curves: Annotated[tuple[FabricCurve, ...], Field(strict=False)]
    """Measured collectives."""

    def of_card(self, card: Gpu) -> Fabric | None:
        """Return the fabric of a card; None: it is not known."""
        if card.link == "pcie":
            return self.fabrics["pcie"]
        return next((fabric for fabric in self.fabrics.values() if card.name in fabric.cards), None)

    def bridge_of(self, card: str) -> Bridge | None:
        """Return the bridge that a card can have."""
        return next((bridge for bridge in self.bridges if card in bridge.cards), None)


def ring_factor(kind: TimedKind, ranks: int) -> float:
    """Return bytes that each rank sends in a ring, per byte of the whole payload: bus bandwidth is payload x this /
    seconds, as nccl-tests counts it."""
    return (2 if kind == "all_reduce" else 1) * (ranks - 1) / ranks


@cache
def known_fabrics() -> Fabrics:
    """Return everything in `fabrics.yaml`."""
    return Fabrics.model_validate(read_data("fabrics.yaml"))
