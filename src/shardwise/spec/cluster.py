"""The Cluster: devices, the memory a program can really use, their speeds and links, host memory and cores."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from pydantic import Field

from shardwise.spec.speeds import Measured
from shardwise.spec.strict import PositiveInt, Strict

CPU = "cpu"
"""What stands in the place of a card where ranks are CPU processes."""

NETWORKS = ("ib", "roce", "rdma", "efa", "opa", "eth", "net")
"""Kinds of network between machines; `net`: the kind does not matter or is not known."""

NVL72 = "nvl72"
"""A network that is NVLink over the machines of a rack."""

CLUSTER_FILES = (".yaml", ".yml", ".json")
"""Ends of names of files that hold a cluster."""

_COUNT = re.compile(r"\s*([+-]?\d+)\s*[xX\u00d7]\s*(?=\S)")
_RATE = re.compile(r"([a-z]\w*?)-(\d+x)?\d+", re.IGNORECASE)
_CARD = re.compile(r"[a-z0-9][\w .()-]*", re.IGNORECASE)


class Sourced(Strict):
    """A figure in bytes with its source."""

    bytes: PositiveInt
    """The figure."""
    source: str
    """Where it is from: a document, a measurement."""


class Figure(Strict):
    """A figure with its source; what it counts, its owner says."""

    value: float = Field(gt=0)
    """The figure."""
    source: str
    """Where it is from: a document, a measurement."""


class Rates(Strict):
    """What one kind of card could do at best, by its vendor, per second and device as torch sees devices."""

    products: dict[str, Figure]
    """Dtype (`fp32`, `tf32`, `bf16`, `fp16`, `fp8`) -> FLOPs of dense matrix products. A dtype that is missing has no
    units of its own; `fp32` is in full precision, without rounding to tf32."""
    memory: Figure
    """Bytes to and from its own memory."""
    link: Figure
    """Bytes that one device sends to all others of its node together, in one direction; over PCIe as `host`."""
    host: Figure
    """Bytes between device and host memory over PCIe (or what takes its place), in one direction, before headers."""
    peer_to_peer: bool
    """Devices of a node reach each other's memory directly; False: through host memory."""
    achieved: Figure | None = None
    """Share of `products` in bf16 (fp16 where there is none) that the best large matrix product was measured at; above
    1 where cards clock higher than their rated boost."""


class Gpu(Strict):
    """One kind of card."""

    name: str
    """Name in the catalogue, such as `A100-SXM-80GB`."""
    usable: Sourced
    """Memory that a program can allocate, as CUDA reports the total, before context and communicators."""
    link: Literal["nvlink", "xgmi", "pcie"] | None = None
    """Between the cards of one machine; None: not known."""
    rates: Rates | None = None
    """What it can do; None: not known, so memory can be predicted and time cannot."""


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
    host_cores: PositiveInt | None = None
    """Cores of one node; None: not known."""
    network: str | None = None
    """Between machines, as typed: `<kind>-<adapters>x<Gb/s of each>` or `<kind>-<Gb/s of a machine>`; None: unknown."""
    measured: Measured | None = None
    """What a probe found; None: the catalogue's figures hold."""

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self.nodes * self.per_node

    @property
    def device_type(self) -> Literal["cuda", "cpu"]:
        """torch's name of the kind of device."""
        return "cpu" if self.gpu is None else "cuda"


@dataclass(frozen=True, kw_only=True)
class ClusterText:
    """The parts of a cluster's name."""

    counts: tuple[int, ...]
    """The numbers before the card: devices of a machine, or machines and devices of each."""
    card: str
    """The card as typed, or `cpu`."""
    network: str | None
    """The network as typed, in lower case."""

    @property
    def plausible(self) -> bool:
        """Whether the form is right; only the catalogue knows the card."""
        named = _CARD.fullmatch(self.card) is not None and any(char.isdigit() for char in self.card)
        here = len(self.counts) > 0 if self.card.lower() == CPU else named
        return here and len(self.counts) <= 2 and all(count > 0 for count in self.counts)


def is_cluster_file(text: str) -> bool:
    """Tell whether `text` names a file that holds a cluster, and not a card."""
    return text.strip().lower().endswith(CLUSTER_FILES)


def split_cluster(text: str) -> ClusterText:
    """Split `[<machines>x]<devices of each>x<card>[ <network>]`."""
    counts = []
    while found := _COUNT.match(text):
        counts.append(int(found[1]))
        text = text[found.end() :]
    card, _, last = text.strip().rpartition(" ")
    rate = _RATE.fullmatch(last)
    known = last.lower() == NVL72 or (rate is not None and (rate[1].lower() in NETWORKS or rate[2] is not None))
    if not card or not known:
        return ClusterText(counts=tuple(counts), card=text.strip(), network=None)
    return ClusterText(counts=tuple(counts), card=card.strip(), network=last.lower())
