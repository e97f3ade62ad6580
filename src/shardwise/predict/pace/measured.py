"""The pace of a cluster that a probe has measured: its curves take the place of rates and shares."""

from __future__ import annotations

from shardwise.predict.pace.base import ADAM_BYTES, Pace
from shardwise.predict.pace.constants import COMPILED, IN_MODELS, UNIT_OPERATIONS
from shardwise.predict.pace.rated import HALVES
from shardwise.predict.work import AttentionWork, Product
from shardwise.spec.cluster import Cluster
from shardwise.spec.curve import Curve
from shardwise.spec.problems import BadInput, Problem
from shardwise.spec.runtime import Runtime
from shardwise.spec.speeds import Measured

SHORT = {1: ("fp8",), 2: HALVES, 4: ("fp32",)}
"""Dtypes by bytes of an element."""


class MeasuredPace(Pace):
    """By what a probe found. What it could not measure is asked of `host`, the pace by the catalogue."""

    def __init__(
        self,
        cluster: Cluster,
        measured: Measured,
        runtime: Runtime,
        *,
        compiled: bool,
        dtype: str | None,
        host: Pace | None,
    ) -> None:
        device = measured.device
        self._dtype, self._device, self._host, self._rated = dtype, device, measured.host, host
        self._products: dict[int, Curve] = {}
        self._attention: dict[int, Curve] = {}
        on_cpus = cluster.gpu is None
        issue = device.issue_s * IN_MODELS[cluster.device_type]
        hooks = device.unit_s or issue * UNIT_OPERATIONS
        super().__init__(
            peak_flops=max(map(_best, device.products.values())) if host is None else host.peak_flops,
            slowdown=device.slowdown,
            issue_s=0.0 if on_cpus else issue * (COMPILED if compiled else 1),
            unit_issue=hooks if runtime.sharding in ("fsdp2", "fsdp1") else 0.0,
            post=device.post_s if on_cpus else 0.0,
        )
        self._own_s = issue * (COMPILED if compiled else 1) if on_cpus else 0.0
        self.assumed = () if host is None or measured.host is not None else host.assumed

    def product(self, product: Product) -> float:
        """Return the larger of computing by FLOPs and memory traffic by bytes, on CPUs with the issue."""
        curve = self._products.get(product.item)
        if curve is None:
            curve = self._products[product.item] = self._curve(self._device.products, product.item)
        return self._own_s + max(curve.seconds(product.flops), self._memory(product.item).seconds(product.moved))

    def attention(self, call: AttentionWork) -> float:
        """Return the time by FLOPs executed; as a matrix product where no attention was measured."""
        curve = self._attention.get(call.item)
        if curve is None:
            curves = self._device.attention or self._device.products
            curve = self._attention[call.item] = self._curve(curves, call.item)
        return self._own_s + curve.seconds(call.flops)

    def copy(self, moved: float, operations: int = 1) -> float:
        """Return the time of operations of equal size."""
        if operations == 0:
            return 0.0
        return operations * (self._own_s + self._memory(4).seconds(moved / operations))

    def move(self, moved: float) -> float:
        """Return the time of one operation on activations, which are in the dtype of computation."""
        return self._own_s + self._memory(4 if self._dtype == "fp32" else 2).seconds(moved)

    def host_copy(self, size: float) -> float:
        """Return the time of one copy; on CPUs there is no other memory, so 0."""
        if self._host is not None and self._host.link is not None:
            return self._host.link.seconds(size)
        return 0.0 if self._rated is None else self._rated.host_copy(size)

    def host_adam(self, elements: float) -> float:
        """Return the time of Adam on the host; on CPUs without a measurement as memory traffic."""
        if self._host is not None:
            return self._host.adam_s * elements
        return self.copy(ADAM_BYTES * elements) if self._rated is None else self._rated.host_adam(elements)

    def _memory(self, item: int) -> Curve:
        """Return the curve of pointwise operations on a dtype by its bytes; what was not measured goes by fp32's."""
        curves = self._device.memory
        names = (*SHORT[item], "fp32", *curves)
        return next(curves[name] for name in names if name in curves)

    def _curve(self, curves: dict[str, Curve], item: int) -> Curve:
        """Return the curve of a dtype by its bytes: the plan's if it was measured, else another of as many bytes."""
        names = sorted(SHORT[item], key=lambda name: name != self._dtype)
        found = next((curves[name] for name in names if name in curves), None)
        if found is None:
            reason = f"it holds no matrix products in {' or '.join(SHORT[item])}"
            fix = "measure again with `shardwise probe`"
            raise BadInput(Problem(field="cluster.measured", reason=reason, allowed=", ".join(curves), fix=fix))
        return found


def _best(curve: Curve) -> float:
    """Return the best rate of a curve, in sizes per second."""
    return max(size / seconds for size, seconds in curve.points)
