"""Work: what a device has to do for one part of a model, operation by operation, whatever the device. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from shardwise.spec.speeds import TimedKind


class Product(NamedTuple):
    """A matrix product [rows, inner] x [inner, columns]."""

    rows: int
    """Rows of the result."""
    inner: int
    """Dimension that is summed over."""
    columns: int
    """Columns of the result."""
    item: int
    """Bytes of an element."""
    batch: int = 1
    """How many of them one operation does (grouped products of experts)."""

    @property
    def flops(self) -> int:
        """Two for every element that is multiplied and added."""
        return 2 * self.batch * self.rows * self.inner * self.columns

    @property
    def moved(self) -> int:
        """Bytes read and written at least."""
        sides = self.rows * self.inner + self.inner * self.columns + self.rows * self.columns
        return self.batch * self.item * sides


class AttentionWork(NamedTuple):
    """One call of an attention kernel."""

    flops: int
    """FLOPs that it executes: half of the square where it skips what causality hides, the window where there is one."""
    kernel: str
    """As `predict.blocks.kernels.Kernel`."""
    backward: bool
    """Its backward: five products where forward has two."""
    item: int
    """Bytes of an element."""
    moved: int
    """Bytes that it reads and writes at least."""


class Exchange(NamedTuple):
    """A collective over the tensor axis that computing waits for."""

    kind: TimedKind
    """What it is."""
    bytes: int
    """Whole payload, as `spec.collectives` counts it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """What one device does: every entry with how often."""

    products: tuple[tuple[Product, int], ...] = ()
    """Matrix products."""
    attention: tuple[tuple[AttentionWork, int], ...] = ()
    """Calls of attention kernels."""
    moves: tuple[tuple[int, int], ...] = ()
    """Pointwise operations, reductions, copies, lookups: (bytes read and written, how often)."""
    exchanges: tuple[tuple[Exchange, int], ...] = ()
    """Collectives over the tensor axis."""

    @property
    def flops(self) -> int:
        """FLOPs of products and attention."""
        products = sum(product.flops * count for product, count in self.products)
        return products + sum(call.flops * count for call, count in self.attention)

    @property
    def moved(self) -> int:
        """Bytes of pointwise operations."""
        return sum(size * count for size, count in self.moves)

    @property
    def operations(self) -> int:
        """How many operations the host issues."""
        rows = (self.products, self.attention, self.moves, self.exchanges)
        return sum(count for row in rows for _, count in row)


@dataclass(frozen=True, kw_only=True, slots=True)
class PartWork:
    """The work of one part of a model for one micro-batch."""

    forward: Work
    """Its forward."""
    backward: Work
    """Its backward, what it computes again included."""
    again: Work
    """What of `backward` is computed again."""
