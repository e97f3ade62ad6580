"""Blocks of Falcon: attention and MLP side by side, keys that all queries or groups of them share."""

from __future__ import annotations

from shardwise.predict.blocks import ops, rotary
from shardwise.predict.blocks.attention import eager_in_place, operation, repeat
from shardwise.predict.blocks.gpt_like import two_layers
from shardwise.predict.blocks.scene import Scene
from shardwise.predict.blocks.tape import Tape, Tensor


def block(scene: Scene, x: Tensor) -> Tensor:
    """`FalconDecoderLayer.forward`."""
    tape, config = scene.tape, scene.layers.config
    new, parallel = bool(config.get("new_decoder_architecture")), config.get("parallel_attn", True)
    residual, rate = x, scene.rate("hidden_dropout", 0.0)
    two_norms = "ln_attn.weight" in scene.layers.sizes
    if two_norms:
        normed = scene.norm("ln_attn", x)
        for_mlp = scene.norm("ln_mlp", x)
    else:
        normed = for_mlp = scene.norm("input_layernorm", x)
    attended, _ = self_attention(scene, normed, new)
    if not new and not parallel:
        residual = ops.add(tape, residual, scene.drop(attended, scene.rate("attention_dropout", 0.0)))
        for_mlp = scene.norm("post_attention_layernorm", residual)
    fed = two_layers(scene, for_mlp, "mlp.dense_h_to_4h", "mlp.dense_4h_to_h")
    if new or parallel:
        fed = added_in_place(tape, fed, attended)
    return ops.add(tape, residual, scene.drop(fed, rate))


def added_in_place(tape: Tape, x: Tensor, other: Tensor) -> Tensor:
    """`x += other`."""
    node = tape.node((x, other), lambda grad, saved: (grad, grad))
    tape.move(2 * x.size + other.size)
    return Tensor(x.storage, x.elements, x.item, node)


def self_attention(scene: Scene, hidden: Tensor, new: bool) -> tuple[Tensor, Tensor | None]:
    """`FalconAttention.forward` with rotary positions."""
    weights: Tensor | None = None
    hidden = scene.enter("self_attention", hidden)
    qkv = scene.project("self_attention.query_key_value", hidden)
    query, key, value = heads_of(scene, qkv, new)
    query, key = rotary.both(scene, query, key)
    if scene.setting.attention != "eager":
        output = operation(scene, query, key, value, 0.0, heads_outside=False, grouped=False)
    else:
        output, weights = eager_in_place(scene, query, key, value)
    output = scene.project("self_attention.dense", output)
    return output, weights


def heads_of(scene: Scene, qkv: Tensor, new: bool) -> tuple[Tensor, Tensor, Tensor]:
    """`_split_heads`: keys and values are picked by a list of numbers, which copies; new models repeat them."""
    tape, attention, tokens = scene.tape, scene.attention, scene.tokens
    heads, kv_heads = attention.heads, attention.kv_heads
    size, shared = tokens * heads * attention.head_dim, tokens * kv_heads * attention.head_dim
    query = ops.part(tape, qkv, size)
    if not new and kv_heads == heads:
        return query, ops.part(tape, qkv, size), ops.part(tape, qkv, size)
    key, value = ops.copy(tape, ops.part(tape, qkv, shared)), ops.copy(tape, ops.part(tape, qkv, shared))
    if not new:
        return query, key, value
    wide = [repeat(tape, x, heads // kv_heads) for x in (key, value)]
    return ops.copy(tape, query), wide[0], wide[1]
