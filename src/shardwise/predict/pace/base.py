"""Pace: the seconds that a device and its host take for work, whatever the source of their speeds."""

from __future__ import annotations

from abc import ABC, abstractmethod

from shardwise.predict.work import AttentionWork, Product, Work

REMEMBERED = 8192
"""Works whose seconds are remembered; at more, all are forgotten."""

ADAM_BYTES = 28
"""Bytes of one AdamW update per element in fp32: weight, gradient and two states read, all but the gradient written."""


class Pace(ABC):
    """How fast one device of a cluster, and the host beside it, does what a model asks for. All times in seconds."""

    def __init__(
        self, *, peak_flops: float, slowdown: float, issue_s: float, unit_issue: float, post: float = 0.0
    ) -> None:
        self.peak_flops = peak_flops
        """Dense matrix products of the dtype of computation per second, by the vendor; on CPUs the best measured."""
        self.slowdown = slowdown
        """Factor on computing while a collective is under way."""
        self.issue_s = issue_s
        """Host time for one operation; 0 on CPUs, where the thread that issues also computes."""
        self.unit_issue = unit_issue
        """Host time of FSDP's hooks around one unit in forward, and again in backward; on CPUs of that same thread."""
        self.post = post
        """Time of the main thread for starting a collective in the background, on CPUs; on GPUs hooks hold it."""
        self.assumed: tuple[str, ...] = ()
        """What the cluster does not say and was assumed, in words."""
        self._seconds: dict[int, tuple[Work, float]] = {}

    def seconds(self, work: Work) -> float:
        """Return the time of the device for products, attention and moves; exchanges are not counted.

        It is remembered by the object, which is kept alive.
        """
        found = self._seconds.get(id(work))
        if found is None:
            if len(self._seconds) >= REMEMBERED:
                self._seconds.clear()
            found = self._seconds[id(work)] = (work, self._sum(work))
        return found[1]

    def issue(self, work: Work) -> float:
        """Return the time of the host for issuing it; 0 on CPUs, where it is part of `seconds`."""
        return self.issue_s * work.operations

    def _sum(self, work: Work) -> float:
        total = sum(count * self.product(product) for product, count in work.products)
        total += sum(count * self.attention(call) for call, count in work.attention)
        return total + sum(count * self.move(size) for size, count in work.moves)

    @abstractmethod
    def product(self, product: Product) -> float:
        """Return the time of one matrix product."""

    @abstractmethod
    def attention(self, call: AttentionWork) -> float:
        """Return the time of one call of an attention kernel."""

    @abstractmethod
    def copy(self, moved: float, operations: int = 1) -> float:
        """Return the time of pointwise operations or copies on the device that read and write `moved` bytes in all."""

    def move(self, moved: float) -> float:
        """Return the time of one pointwise operation on activations that reads and writes `moved` bytes in all."""
        return self.copy(moved)

    @abstractmethod
    def host_copy(self, size: float) -> float:
        """Return the time of a copy of `size` bytes between device and pinned host memory, one way."""

    @abstractmethod
    def host_adam(self, elements: float) -> float:
        """Return the time of Adam on the host for one rank's elements while all ranks of the node do the same."""
