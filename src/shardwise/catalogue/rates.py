"""What a card can do at best: the compact form of `gpus.yaml` and the Rates that it stands for."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from shardwise.spec.cluster import Figure, Rates
from shardwise.spec.strict import Strict


class CardRates(Strict):
    """The `rates` of one entry of `gpus.yaml`, whose head says what each figure counts."""

    tflops: dict[Literal["fp32", "tf32", "bf16", "fp16", "fp8"], float]
    """Dtype -> 10^12 FLOPs a second of dense matrix products."""
    gigabytes: dict[Literal["memory", "link", "host"], float]
    """10^9 bytes a second in one direction; without `link` devices of a node are linked over PCIe."""
    peer_to_peer: bool
    """Whether devices of a node reach each other's memory directly."""
    achieved: float | None = Field(None, gt=0)
    """Share of the bf16 (else fp16) figure that was measured."""
    source: str
    """Of every figure that is not in `sources`."""
    sources: dict[str, str] = Field(default_factory=dict)
    """Figure -> its own source."""

    @model_validator(mode="after")
    def _sources_fit(self) -> CardRates:
        given = {*self.tflops, *self.gigabytes, "peer_to_peer"} | ({"achieved"} if self.achieved is not None else set())
        if not set(self.sources) <= given:
            raise ValueError("a source without its figure")
        if self.achieved is not None and "achieved" not in self.sources:
            raise ValueError("a measured share needs its own source")
        if not {"memory", "host"} <= set(self.gigabytes):
            raise ValueError("memory and host are needed")
        return self

    def rates(self) -> Rates:
        """Return them in FLOPs and bytes per second."""
        over_pcie = Figure(value=_giga(self.gigabytes["host"]), source=f"over PCIe: {self._source('host')}")
        return Rates(
            products={dtype: self._figure(dtype, 1e12 * value) for dtype, value in self.tflops.items()},
            memory=self._figure("memory", _giga(self.gigabytes["memory"])),
            link=self._figure("link", _giga(self.gigabytes["link"])) if "link" in self.gigabytes else over_pcie,
            host=self._figure("host", _giga(self.gigabytes["host"])),
            peer_to_peer=self.peer_to_peer,
            achieved=None if self.achieved is None else self._figure("achieved", self.achieved),
        )

    def _figure(self, name: str, value: float) -> Figure:
        return Figure(value=value, source=self._source(name))

    def _source(self, name: str) -> str:
        return self.sources.get(name, self.source)


def _giga(value: float) -> float:
    return 1e9 * value
