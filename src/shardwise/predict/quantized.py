"""Bytes of a frozen base whose linear layers are quantised: packed weights, and constants that stay whole."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from shardwise.predict.terms.facts import Facts, PlacedUnit
from shardwise.predict.terms.unit_bytes import UnitBytes
from shardwise.predict.unit_rows import UnitKind, UnitTensor
from shardwise.spec.runtime import Quantization
from shardwise.spec.strict import DTYPE_BYTES

PACKED = {"nf4": 0.5, "nf4-dq": 0.5, "int8": 1.0, "gptq4": 0.5}
"""Bytes of a quantised weight."""

BLOCK = 64
"""Weights that share a constant in bitsandbytes' NF4."""
OUTER_BLOCK = 256
"""Constants that share one, when they are quantised once more."""
GROUP = 128
"""Weights of a column that share a scale (fp16) and a zero (4 bits) in GPTQ."""


def constants(rows: int, columns: int, kind: Quantization) -> float:
    """Return the bytes of the constants of a matrix.

    bitsandbytes: NF4 has an fp32 maximum per 64 weights; with double quantisation one byte, and an fp32 per 256 of
    these. int8 has an fp32 per row. GPTQ: scale and zero per group, and an int32 per input that says its group.
    """
    weights = rows * columns
    if kind == "nf4":
        return 4 * weights / BLOCK
    if kind == "nf4-dq":
        return weights / BLOCK + 4 * weights / (BLOCK * OUTER_BLOCK)
    if kind == "int8":
        return 4 * rows
    return (2 + 0.5) * weights / GROUP + 4 * columns


def packed_bytes(rows: int, columns: int, kind: Quantization) -> int:
    """Return the bytes of a quantised matrix: packed weights and their constants."""
    return round(rows * columns * PACKED[kind] + constants(rows, columns, kind))


def is_quantized(tensor: UnitTensor) -> bool:
    """Whether a parameter of a block is a matrix that the quantisation packs: frozen, and no adapter's."""
    return not tensor.trained and len(tensor.shape) == 2


def quantized_facts(facts: Facts, kinds: Sequence[UnitKind], kind: Quantization | None) -> Facts:
    """Return the facts with the linear layers of the blocks packed; unchanged where `kind` is None.

    What a rank keeps of a unit is its part of the packed weights and, whole, their constants; what is gathered are
    packed weights. Embedding, norms and head stay in the plan's dtype.
    """
    if kind is None:
        return facts
    by_name = {unit.row.name: unit for unit in kinds}
    made: dict[str, PlacedUnit] = {}
    for unit in facts.units:
        if unit.name not in made:
            made[unit.name] = replace(unit, bytes=_packed(unit.bytes, by_name[unit.name].tensors, facts, kind))
    return replace(facts, units=tuple(made[unit.name] for unit in facts.units))


def _packed(unit: UnitBytes, tensors: Sequence[UnitTensor], facts: Facts, kind: Quantization) -> UnitBytes:
    param = DTYPE_BYTES[facts.plan.dtypes.param]
    shards = gathered = cast = 0.0
    for tensor in tensors:
        if not is_quantized(tensor):
            continue
        mine, (rows, columns), packed = tensor.rank_elements, tensor.shape, PACKED[kind]
        shards += mine * (packed - DTYPE_BYTES[tensor.dtype]) + constants(rows, columns, kind)
        gathered += rows * columns * (packed - param)
        if tensor.dtype != facts.plan.dtypes.param:
            cast -= mine * param
    return replace(
        unit, shards=unit.shards + round(shards), gathered=unit.gathered + round(gathered), cast=unit.cast + round(cast)
    )
