"""Blocks of BLOOM and MPT: positions as biases of scores, attention written out by the class."""

from __future__ import annotations

from shardwise.predict.blocks import ops
from shardwise.predict.blocks.attention import batched
from shardwise.predict.blocks.scene import Scene
from shardwise.predict.blocks.tape import Grads, Tape, Tensor


def bloom(scene: Scene, x: Tensor) -> Tensor:
    """`BloomBlock.forward`."""
    normed = scene.norm("input_layernorm", x)
    residual = normed if scene.layers.config.get("apply_residual_connection_post_layernorm") else x
    attended, _ = bloom_attention(scene, normed, residual)
    normed = scene.norm("post_attention_layernorm", attended)
    residual = normed if scene.layers.config.get("apply_residual_connection_post_layernorm") else attended
    return bloom_mlp(scene, normed, residual)


def bloom_mlp(scene: Scene, hidden: Tensor, residual: Tensor) -> Tensor:
    """`BloomMLP.forward`."""
    hidden = scene.enter("mlp", hidden)
    hidden = bloom_gelu(scene.tape, scene.project("mlp.dense_h_to_4h", hidden))
    made = scene.project("mlp.dense_4h_to_h", hidden)
    made = scene.drop(made, scene.rate("hidden_dropout", 0.0))
    return ops.add(scene.tape, residual, made)


def bloom_gelu(tape: Tape, x: Tensor) -> Tensor:
    """`GeLUFunction`: in torch's own operations, of which autograd sees none; the names are those of its code."""
    size, item = x.elements, x.item

    def new(*read: Tensor) -> Tensor:
        return tape.new(size, item, reads=max(1, len(read)) * size * item)

    def inner() -> Tensor:
        return new(new(), new(new(new())))

    def derivative(_: Tensor, __: list[Tensor]) -> Grads:
        tanh_out = new(inner())
        ff = new(new(new(), new(new(new(tanh_out)), new(new(new())))), new(new(tanh_out)))
        return (new(ff),)

    node = tape.node((x,), derivative)
    tape.save(node, x)
    made = new(new(), new(new(inner())))
    made.node = node
    return made


def bloom_attention(scene: Scene, hidden: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
    """`BloomAttention.forward`: scores stay variables until it returns."""
    tape, length, attention = scene.tape, scene.setting.padded_length, scene.attention
    hidden = scene.enter("self_attention", hidden)
    fused = scene.project("self_attention.query_key_value", hidden)
    third = fused.elements // 3
    query, key, value = ops.part(tape, fused, third), ops.part(tape, fused, third), ops.part(tape, fused, third)
    query, key, value = ops.copy(tape, query), ops.copy(tape, key), ops.copy(tape, value)
    scores = batched(tape, query, key, scene.tokens * attention.heads * length, attention.head_dim)
    weights = ops.add(tape, scores, scene.shared(1))
    chosen = ops.cast(tape, ops.by_result(tape, ops.cast(tape, weights, ops.FLOAT)), query.item)
    chosen = scene.drop(chosen, scene.rate("attention_dropout", 0.0))
    context = batched(tape, chosen, value, third, length)
    context = ops.copy(tape, context, grad_copied=True)
    output = scene.project("self_attention.dense", context)
    output = scene.drop(output, scene.rate("hidden_dropout", 0.0))
    return ops.add(tape, residual, output), chosen


def mpt(scene: Scene, x: Tensor) -> Tensor:
    """`MptBlock.forward`."""
    tape = scene.tape
    normed = scene.norm("norm_1", x)
    attended, _ = mpt_attention(scene, normed)
    hidden = ops.add(tape, scene.drop(attended, _mpt_rate(scene)), x)
    normed = scene.norm("norm_2", hidden)
    return mpt_mlp(scene, normed, hidden)


def _mpt_rate(scene: Scene) -> float:
    given = scene.layers.config.get("attn_config")
    rate = given.get("attn_pdrop") if isinstance(given, dict) else None
    return float(rate) if isinstance(rate, int | float) else 0.0


def mpt_mlp(scene: Scene, hidden: Tensor, residual: Tensor) -> Tensor:
    """`MptMLP.forward`."""
    hidden = scene.enter("ffn", hidden)
    hidden = scene.act(scene.project("ffn.up_proj", hidden))
    made = scene.project("ffn.down_proj", hidden)
    output = scene.drop(made, _mpt_rate(scene))
    return ops.add(scene.tape, output, residual)


def mpt_attention(scene: Scene, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """`MptAttention.forward`: the bias of positions is in fp32, and so are scores from there on."""
    tape, length, attention = scene.tape, scene.setting.padded_length, scene.attention
    hidden = scene.enter("attn", hidden)
    fused = scene.project("attn.Wqkv", hidden)
    third = fused.elements // 3
    query, key, value = ops.split(tape, fused, (third, third, third))
    item = query.item
    product = batched(
        tape,
        ops.copy(tape, query),
        ops.copy(tape, key),
        scene.tokens * attention.heads * length,
        attention.head_dim,
    )
    scores = ops.scale(tape, product)
    del product
    scores = ops.add(tape, scores, Tensor(scene.shared(1).storage, 1, ops.FLOAT))
    scores = filled(tape, scores)
    weights = ops.cast(tape, ops.by_result(tape, scores), item)
    weights = scene.drop(weights, _mpt_rate(scene))
    context = batched(tape, weights, ops.copy(tape, value), third, length)
    context = ops.copy(tape, context, grad_copied=True)
    return scene.project("attn.out_proj", context), weights


def filled(tape: Tape, x: Tensor) -> Tensor:
    """`masked_fill` with a mask that all blocks share."""
    size, item = x.elements, x.item
    read = size * (item + 1)
    node = tape.node((x,), lambda grad, saved: (tape.new(size, item, reads=read),))
    return tape.new(size, item, node, reads=read)
