"""What the host of one node does for its devices, where nothing was measured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from shardwise.predict.pace.constants import ADAM_CORES, CORES_PER_DEVICE, HOST_ADAM, PCIE, value_of
from shardwise.spec.cluster import Cluster, Rates


@dataclass(frozen=True, kw_only=True, slots=True)
class HostPace:
    """Seconds of a host, by the catalogue."""

    bytes_per_s: float
    """Between one device and pinned host memory, one way."""
    adam_s: float
    """Of Adam per element of one rank."""
    assumed: tuple[str, ...]
    """What was assumed, in words."""


def host_pace(cluster: Cluster, rates: Rates, values: Mapping[str, float] | None) -> HostPace:
    """Return the speeds of a node's host.

    Adam per element of a rank = ranks of the node x HOST_ADAM / cores that are of use. 8 ranks on 2 cores: 14 ns by
    this, 32 measured, as more threads than cores also get into each other's way.
    """
    assumed: tuple[str, ...] = ()
    cores = cluster.host_cores
    if cores is None:
        cores = CORES_PER_DEVICE * cluster.per_node
        assumed = (f"{cores} cores of each host ({CORES_PER_DEVICE} for every device)",)
    return HostPace(
        bytes_per_s=rates.host.value * PCIE,
        adam_s=cluster.per_node * value_of(HOST_ADAM, values) / min(cores, ADAM_CORES),
        assumed=assumed,
    )
