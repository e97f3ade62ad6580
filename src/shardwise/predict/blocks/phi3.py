"""Blocks of Phi-3 and Phi-4: Llama's with fused projections."""

from __future__ import annotations

from shardwise.predict.blocks import ops, rotary
from shardwise.predict.blocks.attention import attend
from shardwise.predict.blocks.scene import Scene
from shardwise.predict.blocks.tape import Tensor


def block(scene: Scene, x: Tensor) -> Tensor:
    """`Phi3DecoderLayer.forward`."""
    rate = scene.rate("resid_pdrop", 0.0)
    hidden = scene.norm("input_layernorm", x)
    hidden, _ = self_attention(scene, hidden)
    hidden = ops.add(scene.tape, x, scene.drop(hidden, rate))
    residual = hidden
    hidden = scene.norm("post_attention_layernorm", hidden)
    hidden = mlp(scene, hidden)
    return ops.add(scene.tape, residual, scene.drop(hidden, rate))


def self_attention(scene: Scene, hidden: Tensor) -> tuple[Tensor, Tensor | None]:
    """`Phi3Attention.forward`: `qkv` stays a variable."""
    hidden = scene.enter("self_attn", hidden)
    tape, attention, tokens = scene.tape, scene.attention, scene.tokens
    heads, kv_heads = scene.own_heads()
    qkv = scene.project("self_attn.qkv_proj", hidden)
    query = ops.part(tape, qkv, tokens * heads * attention.head_dim)
    key = ops.part(tape, qkv, tokens * kv_heads * attention.head_dim)
    value = ops.part(tape, qkv, tokens * kv_heads * attention.value_dim)
    query, key = ops.view(tape, query, grad_copied=True), ops.view(tape, key, grad_copied=True)
    query, key = turn(scene, query, key)
    output, weights = attend(scene, query, key, value, dropout=scene.rate("attention_dropout", 0.0), heads_outside=True)
    output = scene.project("self_attn.o_proj", output)
    return output, weights


def turn(scene: Scene, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    """`apply_rotary_pos_emb`: what turns is a slice, even where it is all of a head."""
    tape, head = scene.tape, scene.attention.head_dim
    width = int(head * rotary.share(scene.layers.config, 1.0))
    table = rotary.tables(scene, width)
    query_turns, query_passes = rotary.halves(tape, query, width, head)
    key_turns, key_passes = rotary.halves(tape, key, width, head)
    query_turned = ops.cat(tape, rotary.turned(scene, query_turns, table), query_passes)
    return query_turned, ops.cat(tape, rotary.turned(scene, key_turns, table), key_passes)


def mlp(scene: Scene, x: Tensor) -> Tensor:
    """`Phi3MLP.forward`."""
    tape, x = scene.tape, scene.enter("mlp", x)
    up = scene.project("mlp.gate_up_proj", x)
    gate, up = ops.split(tape, up, (up.elements // 2, up.elements // 2))
    up = scene.gate(gate, up) if scene.setting.compiled else ops.mul(tape, up, scene.act(gate))
    return scene.project("mlp.down_proj", up)
