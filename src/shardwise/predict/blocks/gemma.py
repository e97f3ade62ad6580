"""Blocks of Gemma 2 and 3: four norms, soft caps on scores and logits. Gemma's own is Llama's with its norms."""

from __future__ import annotations

from shardwise.predict.blocks import ops
from shardwise.predict.blocks.llama_like import mlp, self_attention
from shardwise.predict.blocks.scene import Scene
from shardwise.predict.blocks.tape import Tensor


def block(scene: Scene, x: Tensor) -> Tensor:
    """`Gemma2DecoderLayer.forward` and `Gemma3DecoderLayer.forward`."""
    hidden = scene.norm("input_layernorm", x)
    hidden, _ = self_attention(scene, hidden)
    hidden = scene.norm("post_attention_layernorm", hidden)
    hidden = ops.add(scene.tape, x, hidden)
    residual = hidden
    hidden = scene.norm("pre_feedforward_layernorm", hidden)
    hidden = mlp(scene, hidden)
    hidden = scene.norm("post_feedforward_layernorm", hidden)
    return ops.add(scene.tape, residual, hidden)


def capped(scene: Scene, logits: Tensor) -> Tensor:
    """The soft cap of the logits, where the configuration has one."""
    if scene.layers.config.get("final_logit_softcapping", scene.layers.cap) is None:
        return logits
    tape = scene.tape
    logits = ops.scale(tape, logits)
    logits = ops.by_result(tape, logits)
    return ops.scale(tape, logits)
