"""DeepSeek's latent attention: queries, keys and values through projections of low rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from shardwise.predict.blocks import ops, rotary
from shardwise.predict.blocks.attention import attend
from shardwise.predict.blocks.scene import Scene
from shardwise.predict.blocks.tape import Grads, Tape, Tensor

Turn = Callable[[Scene, Tensor, Tensor], tuple[Tensor, Tensor]]
"""Rotary positions on the parts of queries and keys that have them."""


def self_attention(scene: Scene, hidden: Tensor) -> tuple[Tensor, Tensor | None]:
    """`DeepseekV3Attention.forward`."""
    return _attention(scene, hidden, interleaved if scene.layers.config.get("rope_interleave", True) else halved)


def self_attention_v2(scene: Scene, hidden: Tensor) -> tuple[Tensor, Tensor | None]:
    """`DeepseekV2Attention.forward`."""
    return _attention(scene, hidden, as_complex)


def _attention(scene: Scene, hidden: Tensor, turn: Turn) -> tuple[Tensor, Tensor | None]:
    tape, tokens = scene.tape, scene.tokens
    turning = rotary_dim(scene.layers.config)
    heads, _ = scene.own_heads()
    query = ops.view(tape, _queries(scene, hidden), grad_copied=True)
    plain = scene.attention.head_dim - turning
    query_passes, query_turns = ops.split(tape, query, (tokens * heads * plain, tokens * heads * turning))
    compressed = scene.project("self_attn.kv_a_proj_with_mqa", hidden)
    rank = compressed.elements // tokens - turning
    latents, key_turns = ops.split(tape, compressed, (tokens * rank, tokens * turning))
    latents = ops.view(tape, scene.norm("self_attn.kv_a_layernorm", latents))
    key_turns = ops.view(tape, key_turns)
    query_turns, key_turns = turn(scene, query_turns, key_turns)
    queries = ops.cat(tape, query_passes, query_turns)
    keys, values = expand(scene, latents, key_turns)
    rate = scene.rate("attention_dropout", 0.0)
    output, weights = attend(scene, queries, keys, values, dropout=rate, heads_outside=True)
    output = scene.project("self_attn.o_proj", output)
    return output, weights


def rotary_dim(config: Mapping[str, object]) -> int:
    """Return how many elements of a head turn."""
    given = config.get("qk_rope_head_dim")
    return given if isinstance(given, int) else 64


def _queries(scene: Scene, hidden: Tensor) -> Tensor:
    if "self_attn.q_proj" in scene.layers.sites:
        return scene.project("self_attn.q_proj", hidden)
    return scene.project(
        "self_attn.q_b_proj", scene.norm("self_attn.q_a_layernorm", scene.project("self_attn.q_a_proj", hidden))
    )


def expand(scene: Scene, latents: Tensor, key_turns: Tensor) -> tuple[Tensor, Tensor]:
    """`expand_kv`: keys are written into an empty tensor, first the plain part, then the one that turns."""
    tape, tokens, attention = scene.tape, scene.tokens, scene.attention
    heads, _ = scene.own_heads()
    plain = tokens * heads * (attention.head_dim - key_turns.elements // tokens)
    wide = ops.view(tape, scene.project("self_attn.kv_b_proj", latents), grad_copied=True)
    keys, values = ops.split(tape, wide, (plain, tokens * heads * attention.value_dim))
    turns = _expanded(tape, key_turns, heads)
    made = tape.new(plain + turns.elements, wide.item)
    made = _written(tape, made, keys)
    return _written(tape, made, turns), values


def _expanded(tape: Tape, x: Tensor, times: int) -> Tensor:
    """`expand`: a view; its gradient is summed."""
    size, item = x.elements, x.item
    node = tape.node((x,), lambda grad, saved: (tape.new(size, item, reads=times * size * item),))
    return Tensor(x.storage, size * times, item, node)


def _written(tape: Tape, base: Tensor, part: Tensor) -> Tensor:
    """`base[...].copy_(part)`: backward copies the whole gradient and the part of it."""
    (whole, size, item), base_needs = (base.elements, part.elements, base.item), base.needs_grad

    def derivative(_: Tensor, __: list[Tensor]) -> Grads:
        copied = tape.new(whole, item, reads=whole * item)
        cut = tape.new(size, item, reads=size * item)
        zeros = tape.new(size, item, reads=0)
        del zeros
        return copied if base_needs else None, cut

    tape.move(2 * size * item)
    return Tensor(base.storage, whole, item, tape.node((base, part), derivative))


def halved(scene: Scene, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    """`apply_rotary_pos_emb`."""
    table = rotary.tables(scene, rotary_dim(scene.layers.config))
    turned = rotary.turned(scene, query, table)
    return turned, rotary.turned(scene, key, table)


def interleaved(scene: Scene, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    """`apply_rotary_pos_emb_interleave`: even and odd elements turn against each other."""
    tape, table = scene.tape, rotary.tables(scene, rotary_dim(scene.layers.config) // 2)
    query_even, query_odd = _every_second(tape, query), _every_second(tape, query)
    key_even, key_odd = _every_second(tape, key), _every_second(tape, key)
    query_turned = _against(tape, query_even, query_odd, table)
    return query_turned, _against(tape, key_even, key_odd, table)


def _every_second(tape: Tape, x: Tensor) -> Tensor:
    return ops.part(tape, x, x.elements // 2)


def _against(tape: Tape, even: Tensor, odd: Tensor, table: Tensor) -> Tensor:
    return ops.cat(
        tape,
        ops.subtract(tape, ops.mul(tape, even, table), ops.mul(tape, odd, table)),
        ops.add(tape, ops.mul(tape, odd, table), ops.mul(tape, even, table)),
    )


def as_complex(scene: Scene, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    """`apply_rotary_emb` of DeepSeek-V2: pairs as complex numbers in fp32."""
    tape = scene.tape
    table = Tensor(
        scene.shared(1).storage, scene.setting.padded_length * rotary_dim(scene.layers.config) // 2, 2 * ops.FLOAT
    )
    wide_query = _as_pairs(tape, query)
    wide_key = _as_pairs(tape, key)
    turned_query = ops.cast(tape, _times_table(tape, wide_query, table), query.item)
    return turned_query, ops.cast(tape, _times_table(tape, wide_key, table), key.item)


def _as_pairs(tape: Tape, x: Tensor) -> Tensor:
    wide = ops.cast(tape, x, ops.FLOAT)
    return ops.view(tape, wide)


def _times_table(tape: Tape, x: Tensor, table: Tensor) -> Tensor:
    """A product of complex numbers; elements are counted as real ones."""
    size, read = x.elements, x.elements * ops.FLOAT + table.size
    node = tape.node((x,), lambda grad, saved: (tape.new(size, ops.FLOAT, reads=read),))
    tape.save(node, table)
    return tape.new(size, ops.FLOAT, node, reads=read)
