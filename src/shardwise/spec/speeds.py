"""Speeds of devices, links and hosts: what a probe measures, and what takes the catalogue's place where it did."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from shardwise.spec.curve import Curve
from shardwise.spec.strict import PositiveInt, Strict

TimedKind = Literal["all_gather", "reduce_scatter", "all_reduce"]
"""Collectives whose time is known: gathers of weights, reductions of gradients, sums over replicas and tensor ranks.
On CPUs the reduction of gradients is shardwise's exchange."""


class DeviceSpeeds(Strict):
    """How fast one device computes while all devices of its node do the same."""

    products: dict[str, Curve]
    """Dtype -> seconds of one matrix product by its FLOPs."""
    attention: dict[str, Curve] = Field(default_factory=dict)
    """Dtype -> seconds of one attention by the FLOPs that its kernel executes; empty: as matrix products."""
    memory: dict[str, Curve] = Field(min_length=1)
    """Dtype -> seconds of one pointwise operation by the bytes that it reads and writes together: CPUs turn halves into
    fp32 and back, which takes longer per byte. A dtype that is missing goes by fp32's."""
    issue_s: float = Field(ge=0)
    """Seconds of the host for issuing one operation; on CPUs, of one operation on almost nothing."""
    post_s: float = Field(default=0.0, ge=0)
    """Seconds of the host for starting one collective in the background, before it computes on; part of its curve."""
    unit_s: float = Field(default=0.0, ge=0)
    """Seconds of the host that FSDP2 itself takes for one unit in one pass (forward or backward), without starting its
    collectives; 0: not measured."""
    slowdown: float = Field(default=1.0, ge=1)
    """Seconds of a computation while a collective is under way, over its seconds alone."""


class CollectiveSpeed(Strict):
    """One collective over groups of one shape, all groups of that shape at once where there are several."""

    kind: TimedKind
    """What it is."""
    nodes: PositiveInt
    """Machines that the group spans."""
    per_node: PositiveInt
    """Ranks of the group on each of them."""
    curve: Curve
    """Seconds by payload: bytes of the whole buffer (all ranks' shards together), not of one rank's part."""


class HostSpeeds(Strict):
    """What the host of one node does for its devices, all of them at once."""

    link: Curve | None = None
    """Seconds of a copy between device and pinned host memory, by bytes, one way; None: there are no cards."""
    adam_s: float = Field(gt=0)
    """Seconds of Adam on the host per trained element of one rank."""


class Measured(Strict):
    """What a probe found of a cluster."""

    device: DeviceSpeeds
    """Of the slowest device."""
    collectives: tuple[CollectiveSpeed, ...] = ()
    """Of every shape that was measured."""
    host: HostSpeeds | None = None
    """Of the slowest host."""
    source: str
    """When, on what, with which versions."""
