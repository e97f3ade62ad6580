"""The unit table: which parts of a model are gathered and stored together."""

from __future__ import annotations

import re
from dataclasses import dataclass

from shardwise.spec.strict import Strict


class UnitRow(Strict):
    """One communication unit: the parameters of one `fully_shard` group."""

    name: str
    """Module name, such as `model.layers.0`; empty for the root unit."""
    kind: str
    """Class of the module, such as `LlamaDecoderLayer`."""
    parameters: int
    """Elements of all its parameters."""
    trainable: int
    """Elements of those that are trained."""
    gathered_bytes: int
    """Bytes of the whole unit in the dtype in which it is gathered, on one rank of a tensor group."""
    stored_bytes: int
    """Bytes of all its shards together."""
    stored_by_dtype: dict[str, int]
    """The same by storage dtype."""
    all_gather_bytes: int
    """Bytes of the buffer that an all-gather over the shard axis fills: rows padded to a multiple of its ranks."""
    reduce_scatter_bytes: int
    """Bytes of the buffer of gradients that a reduce-scatter takes, padded in the same way; 0: nothing is trained."""
    reshard_after_forward: bool | int
    """Its gathered weights are freed after forward and gathered again in backward; a number: kept sharded over so many
    ranks."""
    checkpointed: bool
    """Its activations are recomputed in backward."""
    block: int | None = None
    """Number of the decoder block that it is or lies in; None outside."""
    has_backward: bool = True
    """Whether backward needs its weights: not those of frozen modules before the first trained one, unless their block
    is recomputed."""

    @property
    def largest_buffer_bytes(self) -> int:
        """Bytes of the largest contiguous buffer that it needs."""
        return max(self.all_gather_bytes, self.reduce_scatter_bytes)


@dataclass(frozen=True)
class UnitGroup:
    """Consecutive units that differ in their number alone."""

    name: str
    """Name of the unit, or `model.layers.0 .. 29`."""
    count: int
    """How many units."""
    row: UnitRow
    """The first of them; the figures are those of each."""


class UnitTable(Strict):
    """All units of a model, in the order in which they run."""

    rows: tuple[UnitRow, ...]
    """One row per unit."""

    @property
    def parameters(self) -> int:
        """Elements of all parameters."""
        return sum(row.parameters for row in self.rows)

    @property
    def trainable(self) -> int:
        """Elements of all trained parameters."""
        return sum(row.trainable for row in self.rows)

    @property
    def stored_bytes(self) -> int:
        """Bytes of all shards of all units."""
        return sum(row.stored_bytes for row in self.rows)

    @property
    def gathered_bytes(self) -> int:
        """Bytes of all units gathered at once."""
        return sum(row.gathered_bytes for row in self.rows)

    @property
    def largest(self) -> UnitRow | None:
        """The unit that is biggest when gathered."""
        return max(self.rows, key=lambda row: row.gathered_bytes, default=None)

    def grouped(self) -> list[UnitGroup]:
        """Join consecutive units with equal figures and consecutive numbers."""
        groups: list[list[UnitRow]] = []
        for row in self.rows:
            if groups and _follows(groups[-1][-1], row):
                groups[-1].append(row)
            else:
                groups.append([row])
        return [UnitGroup(_joined(group), len(group), group[0]) for group in groups]


def _numbered(name: str) -> tuple[str, int] | None:
    """Split `model.layers.3` or `layers.3.mlp` at its last number; None when there is none."""
    match = re.fullmatch(r"(.*\.|)(\d+)(|\.\D*)", name)
    return (f"{match[1]}*{match[3]}", int(match[2])) if match else None


def _follows(before: UnitRow, row: UnitRow) -> bool:
    """Tell whether `row` is the same as `before` but for a number that is one higher."""
    one, other = _numbered(before.name), _numbered(row.name)
    same = before.model_copy(update={"name": row.name, "block": row.block}) == row
    return same and one is not None and other is not None and other == (one[0], one[1] + 1)


def _joined(group: list[UnitRow]) -> str:
    first, last = group[0].name, _numbered(group[-1].name)
    return first if len(group) == 1 or last is None else f"{first} .. {last[1]}"
