"""The compact form of a model's communication units: kinds of units, and what one rank holds of each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from shardwise.spec.strict import Dtype
from shardwise.spec.units import UnitRow


class UnitTensor(NamedTuple):
    """One parameter of a unit."""

    name: str
    """Dotted name within the block, or outside blocks within the model; adapters included
    (`self_attn.q_proj.lora_A.default.weight`)."""
    shape: tuple[int, ...]
    """Its shape on one rank of a tensor group, gathered over the shard axis."""
    trained: bool
    """It has a gradient."""
    dtype: Dtype
    """Dtype in which its shards are stored."""
    rank_elements: int
    """Elements of one rank's shard, rows padded to a multiple of the shard axis (the first rank's are all real, as far
    as there are rows)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class UnitKind:
    """Units that differ in name and number alone; all bytes are of one unit."""

    row: UnitRow
    """The first of them; its figures are those of each."""
    count: int
    """How many."""
    block_kind: int | None
    """Place in `ModelSpec.kinds` of the blocks that they are or lie in; None outside blocks."""
    blocks: tuple[int, ...]
    """Numbers of those blocks; empty outside blocks."""
    tensors: tuple[UnitTensor, ...]
    """Parameters of one unit."""
    rank_frozen_bytes: int
    """Stored shards of frozen parameters on one rank, padded."""
    rank_trained_bytes: int
    """Stored shards of trained parameters on one rank, padded; their sharded gradients have the same size."""
    rank_trained_elements: int
    """Elements of these."""
    trained_gathered_bytes: int
    """Gathered weights that are trained, on one rank of a tensor group, in the dtype of computation, not padded: the
    size of their gradients before reduction."""
