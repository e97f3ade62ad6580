"""Clusters with round rates, for values worked out by hand."""

from __future__ import annotations

from shardwise.catalogue.clusters import find_cluster
from shardwise.spec.cluster import Cluster, Figure, Rates
from shardwise.spec.curve import Curve
from shardwise.spec.speeds import CollectiveSpeed, DeviceSpeeds, Measured

GB = 1e9


def figure(value: float) -> Figure:
    """A figure whose source is here."""
    return Figure(value=value, source="here")


def cluster(text: str, *, link: float = 100 * GB, peer_to_peer: bool = True, **changes) -> Cluster:
    """A cluster whose cards send `link` bytes a second in one direction."""
    found = find_cluster(text)
    rates = Rates(
        products={"bf16": figure(1e14)},
        memory=figure(1e12),
        link=figure(link),
        host=figure(25 * GB),
        peer_to_peer=peer_to_peer,
    )
    return found.model_copy(update={"gpu": found.gpu.model_copy(update={"rates": rates}), **changes})


def speed(kind: str, nodes: int, per_node: int, *points: tuple[float, float]) -> CollectiveSpeed:
    """A measured collective."""
    return CollectiveSpeed(kind=kind, nodes=nodes, per_node=per_node, curve=Curve(points=points, source="a probe"))


def measured(*speeds: CollectiveSpeed) -> Measured:
    """A probe that found these collectives."""
    curve = Curve(points=((1.0, 1.0),), source="a probe")
    return Measured(
        device=DeviceSpeeds(products={"fp32": curve}, memory={"fp32": curve}, issue_s=0.0),
        collectives=speeds,
        source="a probe",
    )
