"""Rotary positions, as the families apply them to queries and keys."""

from __future__ import annotations

from collections.abc import Mapping

from shardwise.predict.blocks import ops
from shardwise.predict.blocks.scene import Scene
from shardwise.predict.blocks.tape import Tape, Tensor


def tables(scene: Scene, width: int) -> Tensor:
    """Return a table of cosines (or sines) for `width` elements of a head; all blocks share it."""
    return scene.shared(scene.setting.padded_length * width)


def turned(scene: Scene, x: Tensor, table: Tensor) -> Tensor:
    """`x * cos + rotate_half(x) * sin`; compiled, one kernel."""
    tape = scene.tape
    if scene.setting.compiled:
        return ops.scale(tape, x)
    return ops.add(tape, ops.mul(tape, x, table), ops.mul(tape, rotate_half(tape, x), table))


def rotate_half(tape: Tape, x: Tensor) -> Tensor:
    """`rotate_half`: the two halves change places, the second one negated."""
    first = ops.part(tape, x, x.elements // 2)
    second = ops.part(tape, x, x.elements // 2)
    return ops.cat(tape, ops.scale(tape, second), first)


def both(scene: Scene, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    """`apply_rotary_pos_emb` over whole heads."""
    table = tables(scene, scene.attention.head_dim)
    query_turned = turned(scene, query, table)
    return query_turned, turned(scene, key, table)


def both_in_fp32(scene: Scene, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    """Olmo 2's `apply_rotary_pos_emb`: with tables in fp32."""
    tape, item = scene.tape, query.item
    table = Tensor(scene.shared(1).storage, scene.setting.padded_length * scene.attention.head_dim, ops.FLOAT)
    query_turned = turned(scene, query, table)
    key_turned = turned(scene, key, table)
    return ops.cast(tape, query_turned, item), ops.cast(tape, key_turned, item)


def share(config: Mapping[str, object], default: float) -> float:
    """Return which share of a head turns."""
    given = config.get("rope_parameters")
    inside = given.get("partial_rotary_factor") if isinstance(given, dict) else None
    for found in (inside, config.get("partial_rotary_factor"), config.get("rotary_pct")):
        if isinstance(found, int | float):
            return float(found)
    return default


def partly(scene: Scene, query: Tensor, key: Tensor, default: float) -> tuple[Tensor, Tensor]:
    """`apply_rotary_pos_emb` over a share of each head; the rest is put beside it."""
    tape, head = scene.tape, scene.attention.head_dim
    width = int(head * share(scene.layers.config, default))
    table = tables(scene, width)
    query_turns, query_passes = halves(tape, query, width, head)
    key_turns, key_passes = halves(tape, key, width, head)
    query_turned, key_turned = turned(scene, query_turns, table), turned(scene, key_turns, table)
    query_turned = ops.cat(tape, query_turned, query_passes)
    return query_turned, ops.cat(tape, key_turned, key_passes)


def halves(tape: Tape, x: Tensor, width: int, head: int) -> tuple[Tensor, Tensor]:
    """Return the first `width` elements of each head, and the rest."""
    turning = x.elements // head * width
    return ops.part(tape, x, turning), ops.part(tape, x, x.elements - turning)
