"""Blocks of Llama and its relatives: norms around attention and MLP, rotary positions, queries in groups."""

from __future__ import annotations

from collections.abc import Callable

from shardwise.predict.blocks import ops, rotary
from shardwise.predict.blocks.attention import attend
from shardwise.predict.blocks.scene import Scene
from shardwise.predict.blocks.tape import Tensor

Turn = Callable[[Scene, Tensor, Tensor], tuple[Tensor, Tensor]]
"""Rotary positions on queries and keys."""

BEFORE, AFTER = "input_layernorm", "post_attention_layernorm"


def block(scene: Scene, x: Tensor) -> Tensor:
    """`LlamaDecoderLayer.forward`."""
    hidden = scene.norm(BEFORE, x)
    hidden, _ = self_attention(scene, hidden)
    hidden = ops.add(scene.tape, x, hidden)
    residual = hidden
    hidden = scene.norm(AFTER, hidden)
    hidden = mlp(scene, hidden)
    return ops.add(scene.tape, residual, hidden)


def scaled_block(scene: Scene, x: Tensor) -> Tensor:
    """`GraniteDecoderLayer.forward`: what is added to the residual is multiplied by a number."""
    tape = scene.tape
    hidden = scene.norm(BEFORE, x)
    hidden, _ = self_attention(scene, hidden)
    hidden = ops.add(tape, x, ops.scale(tape, hidden))
    residual = hidden
    hidden = scene.norm(AFTER, hidden)
    hidden = mlp(scene, hidden)
    return ops.add(tape, residual, ops.scale(tape, hidden))


def normed_after(scene: Scene, x: Tensor) -> Tensor:
    """`Olmo2DecoderLayer.forward`: norms behind attention and MLP."""
    hidden, _ = self_attention(scene, x, turn=rotary.both_in_fp32)
    hidden = scene.norm(AFTER, hidden)
    hidden = ops.add(scene.tape, x, hidden)
    residual = hidden
    hidden = mlp(scene, hidden)
    hidden = scene.norm("post_feedforward_layernorm", hidden)
    return ops.add(scene.tape, residual, hidden)


def dropping(scene: Scene, x: Tensor) -> Tensor:
    """`Starcoder2DecoderLayer.forward`: dropout behind attention and MLP."""
    rate = scene.rate("residual_dropout", 0.0)
    hidden = scene.norm(BEFORE, x)
    hidden, _ = self_attention(scene, hidden, drops=rate)
    hidden = ops.add(scene.tape, x, hidden)
    residual = hidden
    hidden = scene.norm(AFTER, hidden)
    hidden = scene.drop(mlp(scene, hidden), rate)
    return ops.add(scene.tape, residual, hidden)


def partly_turned(scene: Scene, x: Tensor) -> Tensor:
    """`NemotronDecoderLayer.forward`: rotary positions on a share of each head."""
    hidden = scene.norm(BEFORE, x)
    hidden, _ = self_attention(scene, hidden, turn=turn_half)
    hidden = ops.add(scene.tape, x, hidden)
    residual = hidden
    hidden = scene.norm(AFTER, hidden)
    hidden = mlp(scene, hidden)
    return ops.add(scene.tape, residual, hidden)


def parallel(scene: Scene, x: Tensor) -> Tensor:
    """`PhiDecoderLayer.forward`: attention and MLP side by side behind one norm."""
    tape, rate = scene.tape, scene.rate("resid_pdrop", 0.0)
    hidden = scene.norm(BEFORE, x)
    attended, _ = phi_attention(scene, hidden)
    attended = scene.drop(attended, rate)
    inside = scene.enter("mlp", hidden)
    fed = scene.drop(scene.project("mlp.fc2", scene.act(scene.project("mlp.fc1", inside))), rate)
    del inside
    return ops.add(tape, ops.add(tape, attended, fed), x)


def turn_half(scene: Scene, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    """Rotary positions on half of each head."""
    return rotary.partly(scene, query, key, 0.5)


def phi_attention(scene: Scene, hidden: Tensor) -> tuple[Tensor, Tensor | None]:
    """`PhiAttention.forward`: the parts of queries and keys are variables of its own, and live until it returns."""
    tape, head = scene.tape, scene.attention.head_dim
    hidden = scene.enter("self_attn", hidden)
    query, key = scene.heads("self_attn.q_proj", hidden), scene.heads("self_attn.k_proj", hidden)
    value = ops.view(tape, scene.project("self_attn.v_proj", hidden))
    width = int(head * rotary.share(scene.layers.config, 0.5))
    table = rotary.tables(scene, width)
    query_turns, query_passes = rotary.halves(tape, query, width, head)
    key_turns, key_passes = rotary.halves(tape, key, width, head)
    query_turns, key_turns = rotary.turned(scene, query_turns, table), rotary.turned(scene, key_turns, table)
    query = ops.cat(tape, query_turns, query_passes)
    key = ops.cat(tape, key_turns, key_passes)
    rate = scene.rate("attention_dropout", 0.0)
    output, weights = attend(scene, query, key, value, dropout=rate, heads_outside=True)
    output = scene.project("self_attn.dense", output)
    return output, weights


def self_attention(
    scene: Scene, hidden: Tensor, *, turn: Turn = rotary.both, drops: float = 0.0
) -> tuple[Tensor, Tensor | None]:
    """`LlamaAttention.forward`; queries and keys are normed where the block has norms for them."""
    hidden = scene.enter("self_attn", hidden)
    query = normed_heads(scene, "q", hidden)
    key = normed_heads(scene, "k", hidden)
    value = ops.view(scene.tape, scene.project("self_attn.v_proj", hidden))
    query, key = turn(scene, query, key)
    rate, moved = scene.rate("attention_dropout", 0.0), turn is turn_half
    output, weights = attend(scene, query, key, value, dropout=rate, heads_outside=moved)
    output = scene.project("self_attn.o_proj", output)
    return scene.drop(output, drops), weights


def normed_heads(scene: Scene, name: str, hidden: Tensor) -> Tensor:
    """A projection seen as heads, through its norm where there is one."""
    if f"self_attn.{name}_norm.weight" not in scene.layers.sizes:
        return scene.heads(f"self_attn.{name}_proj", hidden)
    projected = scene.norm(f"self_attn.{name}_norm", scene.project(f"self_attn.{name}_proj", hidden))
    return ops.view(scene.tape, projected, grad_copied=True)


def mlp(scene: Scene, x: Tensor) -> Tensor:
    """`LlamaMLP.forward` where there is a gate, else two layers around an activation function."""
    x = scene.enter("mlp", x)
    if "mlp.gate_proj" in scene.layers.sites:
        return gated(scene, x, "mlp")
    up, down = ("c_fc", "c_proj") if "mlp.c_fc" in scene.layers.sites else ("up_proj", "down_proj")
    return scene.project(f"mlp.{down}", scene.act(scene.project(f"mlp.{up}", x)))


def gated(scene: Scene, x: Tensor, name: str) -> Tensor:
    """`LlamaMLP.forward`."""
    if scene.setting.compiled:
        first, second = scene.project(f"{name}.gate_proj", x), scene.project(f"{name}.up_proj", x)
        return scene.project(f"{name}.down_proj", scene.gate(first, second))
    return scene.project(
        f"{name}.down_proj",
        ops.mul(scene.tape, scene.act(scene.project(f"{name}.gate_proj", x)), scene.project(f"{name}.up_proj", x)),
    )
