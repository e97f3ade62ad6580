"""Blocks with experts: transformers' grouped matrix products over tokens sorted by expert."""

from __future__ import annotations

from collections.abc import Callable

from shardwise.predict.blocks import latent, llama_like, ops
from shardwise.predict.blocks.scene import Scene
from shardwise.predict.blocks.tape import Grads, Tape, Tensor

_SHORT = 4
"""Bytes of an int32."""


def block(scene: Scene, x: Tensor) -> Tensor:
    """`MixtralDecoderLayer.forward`; dense blocks have Llama's MLP."""
    return _around(scene, x, llama_like.self_attention, _routed)


def shared_block(scene: Scene, x: Tensor) -> Tensor:
    """`Qwen2MoeDecoderLayer.forward`: a shared expert beside the others."""
    return _around(scene, x, llama_like.self_attention, _routed_beside_gated)


def deepseek(scene: Scene, x: Tensor) -> Tensor:
    """`DeepseekV3DecoderLayer.forward`: latent attention, and shared experts in blocks that have experts."""
    return _around(scene, x, latent.self_attention, _routed_beside_shared)


def deepseek_v2(scene: Scene, x: Tensor) -> Tensor:
    """`DeepseekV2DecoderLayer.forward`."""
    return _around(scene, x, latent.self_attention_v2, _routed_beside_shared)


Part = Callable[[Scene, Tensor], Tensor]


def _around(
    scene: Scene, x: Tensor, attend: Callable[[Scene, Tensor], tuple[Tensor, Tensor | None]], experts: Part
) -> Tensor:
    hidden = scene.norm("input_layernorm", x)
    hidden, _ = attend(scene, hidden)
    hidden = ops.add(scene.tape, x, hidden)
    residual = hidden
    hidden = scene.norm("post_attention_layernorm", hidden)
    hidden = experts(scene, hidden) if scene.mlp.experts else llama_like.mlp(scene, hidden)
    return ops.add(scene.tape, residual, hidden)


def _routed(scene: Scene, hidden: Tensor) -> Tensor:
    """`MixtralSparseMoeBlock.forward`."""
    hidden = ops.view(scene.tape, hidden)
    _, weights, chosen = router(scene, hidden)
    hidden = experts(scene, hidden, chosen, weights)
    return ops.view(scene.tape, hidden)


def _routed_beside_gated(scene: Scene, hidden: Tensor) -> Tensor:
    """`Qwen2MoeSparseMoeBlock.forward`."""
    tape = scene.tape
    flat = ops.view(tape, hidden)
    shared = flat_gated(scene, flat, "mlp.shared_expert")
    _, weights, chosen = router(scene, flat)
    output = experts(scene, flat, chosen, weights)
    shared = ops.mul(tape, ops.by_result(tape, scene.project("mlp.shared_expert_gate", flat, flat=True)), shared)
    output = ops.add(tape, output, shared)
    return ops.view(tape, output)


def _routed_beside_shared(scene: Scene, hidden: Tensor) -> Tensor:
    """`DeepseekV3MoE.forward`."""
    tape = scene.tape
    residuals = hidden
    _, weights, chosen = router(scene, ops.view(tape, hidden))
    hidden = ops.view(tape, hidden)
    hidden = ops.view(tape, experts(scene, hidden, chosen, weights))
    return ops.add(tape, hidden, llama_like.gated(scene, residuals, "mlp.shared_experts"))


def flat_gated(scene: Scene, x: Tensor, name: str) -> Tensor:
    """A gated MLP on [tokens, width]."""
    return scene.project(
        f"{name}.down_proj",
        ops.mul(
            scene.tape,
            scene.act(scene.project(f"{name}.gate_proj", x, flat=True)),
            scene.project(f"{name}.up_proj", x, flat=True),
        ),
        flat=True,
    )


def router(scene: Scene, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Scores of all experts per token, and weights and numbers of those that are chosen."""
    tape, tokens, model_type = scene.tape, scene.tokens, str(scene.layers.config.get("model_type"))
    item, weight = hidden.item, scene.parameter("mlp.gate.weight")
    if model_type.startswith("deepseek"):
        hidden, weight = ops.cast(tape, hidden, ops.FLOAT), ops.cast(tape, weight, ops.FLOAT)
    logits = ops.linear(tape, hidden, weight, inputs=scene.layers.hidden, flat=True)
    scores = ops.by_result(tape, ops.cast(tape, logits, ops.FLOAT))
    weights, chosen = top(tape, scores, tokens * scene.mlp.active)
    if model_type not in ("mixtral", "deepseek_v3", "deepseek_v2"):
        weights = ops.cast(tape, weights, item)
    return logits, weights, chosen


def top(tape: Tape, scores: Tensor, elements: int) -> tuple[Tensor, Tensor]:
    """`topk`, and the quotients of its values by their sum."""
    size, item = scores.elements, scores.item
    picked_bytes = elements * (item + ops.WORD)

    def derivative(_: Tensor, __: list[Tensor]) -> Grads:
        made = tape.new(size, item, reads=0)
        tape.move(2 * picked_bytes)
        return (made,)

    node = tape.node((scores,), derivative)
    values, chosen = tape.new(elements, item, node, reads=size * item + elements * ops.WORD), _numbers(tape, elements)
    tape.save(node, chosen)
    return values, chosen


def _numbers(tape: Tape, elements: int) -> Tensor:
    """Numbers that an operation gives beside its values."""
    return tape.new(elements, ops.WORD)


def experts(scene: Scene, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """`grouped_mm_experts_forward`."""
    tape, mlp = scene.tape, scene.mlp
    pairs, width = chosen.elements, hidden.elements // scene.tokens
    word, experts_there = pairs * ops.WORD, mlp.experts
    numbers, order = tape.new(pairs, ops.WORD, reads=2 * word), _numbers(tape, pairs)
    selected = picked(tape, hidden, pairs * width, tape.new(pairs, ops.WORD, reads=word))
    sorted_weights = picked(tape, weights, pairs, order)
    counted = tape.new(pairs, ops.FLOAT if scene.setting.device == "cpu" else _SHORT, reads=word)
    tape.move(counted.size + experts_there * ops.FLOAT)
    tape.move(2 * experts_there * ops.FLOAT)
    up = scene.parameter("mlp.experts.gate_up_proj")
    made = grouped(tape, selected, up, pairs * 2 * mlp.width, width, experts_there)
    made = gate(scene, made)
    made = grouped(tape, made, scene.parameter("mlp.experts.down_proj"), pairs * width, mlp.width, experts_there)
    weighted = ops.mul(tape, made, sorted_weights)
    back = tape.new(pairs, ops.WORD, reads=word)
    for _step in ("empty order", "numbers in order"):
        tape.move(word)
    weighted = picked(tape, weighted, weighted.elements, back)
    final = summed(tape, weighted, hidden.elements)
    del numbers, order, counted
    return ops.cast(tape, final, hidden.item)


def gate(scene: Scene, both: Tensor) -> Tensor:
    """`_default_apply_gate`."""
    part = both.elements // 2
    first, second = ops.split(scene.tape, both, (part, part))
    return scene.gate(first, second) if scene.setting.compiled else ops.mul(scene.tape, scene.act(first), second)


def picked(tape: Tape, x: Tensor, elements: int, index: Tensor) -> Tensor:
    """`x[index]`: the index is saved; gradients are added up in zeros."""
    size, item = x.elements, x.item
    moved = 2 * elements * item + index.size

    def derivative(_: Tensor, __: list[Tensor]) -> Grads:
        made = tape.new(size, item, reads=0)
        tape.move(moved)
        return (made,)

    node = tape.node((x,), derivative)
    tape.save(node, index)
    return tape.new(elements, item, node, reads=moved - elements * item)


def grouped(tape: Tape, x: Tensor, weight: Tensor, elements: int, inner: int, experts: int) -> Tensor:
    """`grouped_mm`: each token with the weight of its expert.

    As work, experts get equal numbers of tokens, rounded up.
    """
    (size, item), weight_size, target = (x.elements, x.item), weight.elements, weight.node
    x_needs, weight_needs = x.needs_grad, weight.needs_grad
    pairs = size // inner
    columns, busy = elements // pairs, min(experts, pairs)
    rows = -(-pairs // busy)

    def derivative(_: Tensor, __: list[Tensor]) -> Grads:
        into = tape.new(size, item) if x_needs else None
        if x_needs:
            tape.product(rows, columns, inner, item, busy)
        if weight_needs:
            tape.product(inner, rows, columns, item, busy)
        return into, tape.gradient(target, weight_size, item).view() if weight_needs else None

    node = tape.node((x, weight), derivative)
    if weight_needs:
        tape.save(node, x)
    if x_needs:
        tape.save(node, weight)

    def make() -> tuple[Tensor]:
        tape.product(rows, inner, columns, item, busy)
        return (tape.new(elements, item),)

    (made,) = tape.keep("matmul", inner, make)
    made.node = node
    return made


def summed(tape: Tape, x: Tensor, elements: int) -> Tensor:
    """The sum over the experts of each token; its gradient is copied for each of them."""
    size, item = x.elements, x.item
    node = tape.node((x,), lambda grad, saved: (tape.new(size, item, reads=elements * item),))
    return tape.new(elements, item, node, reads=size * item)
