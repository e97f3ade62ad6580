"""The Cluster: devices, the memory a program can really use, host memory. Links follow with the time model."""

from __future__ import annotations

from typing import Literal

from shardwise.spec.strict import PositiveInt, Strict


class Sourced(Strict):
    """A figure in bytes with its source."""

    bytes: PositiveInt
    """The figure."""
    source: str
    """Where it is from: a document, a measurement."""


class Gpu(Strict):
    """One kind of card."""

    name: str
    """Name in the catalogue, such as `A100-SXM-80GB`."""
    usable: Sourced
    """Memory that a program can allocate, as CUDA reports the total, before context and communicators."""


class Cluster(Strict):
    """The machines of a run, all alike."""

    name: str
    """As typed, such as `2x8xH100-SXM-80GB`."""
    nodes: PositiveInt
    """Machines."""
    per_node: PositiveInt
    """Devices of each."""
    gpu: Gpu | None
    """The card; None: CPU processes."""
    host_bytes: PositiveInt | None = None
    """Memory of one node; None: not known."""

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self.nodes * self.per_node

    @property
    def device_type(self) -> Literal["cuda", "cpu"]:
        """torch's name of the kind of device."""
        return "cpu" if self.gpu is None else "cuda"
