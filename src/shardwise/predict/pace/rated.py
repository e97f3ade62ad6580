"""The pace of a GPU by its catalogue rates: a roofline with what kernels reach of it."""

from __future__ import annotations

from collections.abc import Mapping
from math import log, sqrt

from shardwise.predict.pace.base import Pace
from shardwise.predict.pace.constants import (
    ACHIEVED,
    ATTENTION,
    ATTENTION_KERNELS,
    BACKWARD,
    COMPILED,
    HALF_FULL,
    ISSUE,
    JITTER,
    KERNEL,
    MEMORY_SHARE,
    OVERLAP,
    SPLIT,
    SUSTAINED,
    UNHIDDEN,
    UNIT_OPERATIONS,
    value_of,
)
from shardwise.predict.pace.host import host_pace
from shardwise.predict.work import AttentionWork, Product
from shardwise.predict.workspace import generation
from shardwise.spec.cluster import Cluster, Gpu, Rates
from shardwise.spec.problems import BadInput, Problem
from shardwise.spec.runtime import Runtime

HALVES = ("bf16", "fp16")
"""Dtypes of two bytes."""


class RatedPace(Pace):
    """By the vendor's rates and the shares of them that were measured."""

    def __init__(
        self,
        cluster: Cluster,
        gpu: Gpu,
        rates: Rates,
        runtime: Runtime,
        *,
        compiled: bool,
        dtype: str | None,
        values: Mapping[str, float] | None,
    ) -> None:
        self._peaks = peaks(gpu, rates, dtype)
        eager = value_of(ISSUE, values)
        super().__init__(
            peak_flops=self._peaks[4 if dtype == "fp32" else 2],
            slowdown=1 + overlap(gpu, values),
            issue_s=eager * (COMPILED if compiled else 1),
            unit_issue=eager * UNIT_OPERATIONS if runtime.sharding in ("fsdp2", "fsdp1") else 0.0,
        )
        best = ACHIEVED if rates.achieved is None else rates.achieved.value
        self._share = best * value_of(SUSTAINED, values)
        self._half_full = value_of(HALF_FULL, values)
        self._unhidden = value_of(UNHIDDEN, values)
        self._attention = best * value_of(ATTENTION, values)
        self._kernel, self._generation = runtime.attention_kernel, generation(gpu)
        self._memory = rates.memory.value * value_of(MEMORY_SHARE, values)
        self._slowest = slowest(cluster.nodes, values)
        host = host_pace(cluster, rates, values)
        self._host_bytes_per_s, self._adam_s, self.assumed = host.bytes_per_s, host.adam_s, host.assumed

    def product(self, product: Product) -> float:
        """Return KERNEL + computing + the part of memory traffic that hides behind nothing; at least all traffic.

        computing = FLOPs / (peak x achieved x SUSTAINED x results / (results + HALF_FULL)); where the results do not
        fill the card, parts of a long sum count as results of their own.
        """
        half = self._half_full
        results = float(product.batch * product.rows * product.columns)
        if results < 2 * half:
            results = min(2 * half, results * max(1.0, product.inner / SPLIT))
        rate = self._peak(product.item) * self._share * results / (results + half)
        computing, traffic = product.flops / rate, product.moved / self._memory
        return self._slowest * (KERNEL + max(computing + self._unhidden * traffic, traffic))

    def attention(self, call: AttentionWork) -> float:
        """Return KERNEL + computing + memory traffic: the first and the last tiles hide behind nothing."""
        kernel = self._kernel or call.kernel
        made_for = ATTENTION_KERNELS.get((kernel, self._generation)) or ATTENTION_KERNELS.get(
            (kernel, "any"), (1.0, 1.0)
        )
        rate = self._peak(call.item) * self._attention * made_for[call.backward] * (BACKWARD if call.backward else 1.0)
        return self._slowest * (KERNEL + call.flops / rate + call.moved / self._memory)

    def copy(self, moved: float, operations: int = 1) -> float:
        """Return KERNEL for every operation + memory traffic."""
        return self._slowest * (operations * KERNEL + moved / self._memory)

    def host_copy(self, size: float) -> float:
        """Return the time of a copy over PCIe, all devices at once having lanes of their own."""
        return size / self._host_bytes_per_s

    def host_adam(self, elements: float) -> float:
        """Return the time of Adam on the host's cores, which the ranks of the node share."""
        return elements * self._adam_s

    def _peak(self, item: int) -> float:
        found = self._peaks.get(item)
        if found is None:
            reason = f"the card has no units for matrix products of {item} bytes per element"
            raise BadInput(Problem(field="cluster", reason=reason, fix="compute in bf16, fp16 or fp32"))
        return found


def peaks(gpu: Gpu, rates: Rates, dtype: str | None) -> dict[int, float]:
    """Return FLOPs of dense products per second by bytes of an element.

    Two bytes are `dtype` where that is bf16 or fp16, else the one that the card has units for. A card without units for
    bf16 (V100, T4) computes it in fp32. fp32 is without tensor cores, as torch does it unless told otherwise.

    Raises:
        BadInput: the catalogue has no rate for fp32.
    """
    products = {name: figure.value for name, figure in rates.products.items()}
    if "fp32" not in products:
        raise BadInput(unknown(gpu.name, "its rate of fp32 products is not known", "give rates.products.fp32, or "))
    half = dtype if dtype in HALVES else next((name for name in HALVES if name in products), "fp32")
    found = {4: products["fp32"], 2: products.get(half, products["fp32"])}
    if "fp8" in products:
        found[1] = products["fp8"]
    return found


def overlap(gpu: Gpu, values: Mapping[str, float] | None) -> float:
    """Return how much longer computing takes while a collective runs, as a share of itself.

    OVERLAP on NVLink or xGMI, between machines too, where as many channels hold multiprocessors. Over PCIe a sixth of
    that: NCCL has 2 to 4 channels there where it has 24 on NVLink (`predict.constants.NCCL_CHANNELS`).
    """
    return value_of(OVERLAP, values) / (1 if gpu.link in ("nvlink", "xgmi") else 6)


def slowest(nodes: int, values: Mapping[str, float] | None) -> float:
    """Return how much longer the slowest of some machines takes than the middle one, on average, as a factor.

    Every collective waits for it. 1 + JITTER x sqrt(2 ln nodes): the highest of so many normal deviations.
    """
    return 1 + value_of(JITTER, values) * sqrt(2 * log(nodes))


def unknown(name: str, reason: str, fix: str = "") -> Problem:
    """Return the problem of a cluster, or its card, whose speeds are not known; `fix` stands before the usual one."""
    return Problem(
        field="cluster",
        value=name,
        reason=reason,
        fix=f"{fix}measure the machines with `shardwise probe` and give the file that it writes as the cluster",
    )
