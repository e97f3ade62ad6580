"""Blocks of GPT-2 and what came between it and Llama: fused projections, LayerNorm, two-layer MLPs."""

from __future__ import annotations

from shardwise.predict.blocks import ops, rotary
from shardwise.predict.blocks.attention import attend
from shardwise.predict.blocks.scene import Scene
from shardwise.predict.blocks.tape import Tensor


def gpt2(scene: Scene, x: Tensor) -> Tensor:
    """`GPT2Block.forward`, and `GPTBigCodeBlock.forward`."""
    tape, rate = scene.tape, scene.rate("resid_pdrop", 0.1)
    hidden = scene.norm("ln_1", x)
    attended, _ = gpt2_attention(scene, hidden)
    hidden = ops.add(tape, attended, x)
    residual = hidden
    hidden = scene.norm("ln_2", hidden)
    fed = two_layers(scene, hidden, "mlp.c_fc", "mlp.c_proj", rate)
    return ops.add(tape, residual, fed)


def gpt2_attention(scene: Scene, hidden: Tensor) -> tuple[Tensor, Tensor | None]:
    """`GPT2Attention.forward`."""
    tape, hidden = scene.tape, scene.enter("attn", hidden)
    query, key, value = split_qkv(scene, scene.project("attn.c_attn", hidden))
    query, key, value = (ops.view(tape, part) for part in (query, key, value))
    rate, upcast = scene.rate("attn_pdrop", 0.1), scene.layers.config.get("model_type") != "gpt2"
    output, weights = attend(scene, query, key, value, dropout=rate, upcast=upcast, broadcast=True)
    output = scene.project("attn.c_proj", output)
    return scene.drop(output, scene.rate("resid_pdrop", 0.1)), weights


def split_qkv(scene: Scene, fused: Tensor) -> list[Tensor]:
    """Return queries, keys and values of a fused projection."""
    attention, tokens = scene.attention, scene.tokens
    heads, kv_heads = scene.own_heads()
    key = tokens * kv_heads * attention.head_dim
    return ops.split(scene.tape, fused, (tokens * heads * attention.head_dim, key, key))


def two_layers(scene: Scene, hidden: Tensor, up: str, down: str, rate: float = 0.0) -> Tensor:
    """Two layers around an activation function, each result in the same variable."""
    hidden = scene.enter("mlp", hidden)
    hidden = scene.project(up, hidden)
    hidden = scene.act(hidden)
    hidden = scene.project(down, hidden)
    return scene.drop(hidden, rate)


def neox(scene: Scene, x: Tensor) -> Tensor:
    """`GPTNeoXLayer.forward`."""
    tape, rate = scene.tape, scene.rate("hidden_dropout", 0.0)
    attended, _ = neox_attention(scene, scene.norm("input_layernorm", x))
    attended = scene.drop(attended, rate)
    if scene.layers.config.get("use_parallel_residual", True):
        fed = neox_mlp(scene, scene.norm("post_attention_layernorm", x))
        fed = scene.drop(fed, rate)
        return ops.add(tape, ops.add(tape, fed, attended), x)
    attended = ops.add(tape, attended, x)
    fed = neox_mlp(scene, scene.norm("post_attention_layernorm", attended))
    fed = scene.drop(fed, rate)
    return ops.add(tape, fed, attended)


def neox_mlp(scene: Scene, hidden: Tensor) -> Tensor:
    """`GPTNeoXMLP.forward`."""
    return two_layers(scene, hidden, "mlp.dense_h_to_4h", "mlp.dense_4h_to_h")


def neox_attention(scene: Scene, hidden: Tensor) -> tuple[Tensor, Tensor | None]:
    """`GPTNeoXAttention.forward`: queries, keys and values of a head lie side by side."""
    hidden = scene.enter("attention", hidden)
    qkv = ops.view(scene.tape, scene.project("attention.query_key_value", hidden), grad_copied=True)
    query, key, value = ops.split(scene.tape, qkv, (qkv.elements // 3,) * 3)
    query, key = rotary.partly(scene, query, key, 0.25)
    rate = scene.rate("attention_dropout", 0.0)
    output, weights = attend(scene, query, key, value, dropout=rate, heads_outside=True)
    output = scene.project("attention.dense", output)
    return output, weights


def opt(scene: Scene, x: Tensor) -> Tensor:
    """`OPTDecoderLayer.forward`."""
    tape, rate = scene.tape, scene.rate("dropout", 0.1)
    before = scene.layers.config.get("do_layer_norm_before", True)
    hidden = scene.norm("self_attn_layer_norm", x) if before else x
    hidden, _ = opt_attention(scene, hidden)
    hidden = scene.drop(hidden, rate)
    hidden = ops.add(tape, x, hidden)
    if not before:
        hidden = scene.norm("self_attn_layer_norm", hidden)
    residual = hidden
    if before:
        hidden = scene.norm("final_layer_norm", hidden)
    hidden = scene.project("fc1", hidden, flat=True)
    hidden = scene.act(hidden)
    hidden = scene.project("fc2", hidden, flat=True)
    hidden = scene.drop(hidden, rate)
    hidden = ops.view(tape, ops.add(tape, residual, hidden))
    return hidden if before else scene.norm("final_layer_norm", hidden)


def opt_attention(scene: Scene, hidden: Tensor) -> tuple[Tensor, Tensor | None]:
    """`OPTAttention.forward`: queries are scaled before the scores."""
    tape, hidden = scene.tape, scene.enter("self_attn", hidden)
    query = ops.scale(tape, scene.project("self_attn.q_proj", hidden))
    query = ops.view(tape, query)
    key = scene.project("self_attn.k_proj", hidden)
    value = scene.project("self_attn.v_proj", hidden)
    key, value = ops.view(tape, key), ops.view(tape, value)
    output, weights = attend(scene, query, key, value, dropout=scene.rate("attention_dropout", 0.0))
    output = scene.project("self_attn.out_proj", output)
    return output, weights
