"""Attention over queries, keys and values [rows, heads, length, dim], by each implementation."""

from __future__ import annotations

from dataclasses import dataclass

from shardwise.predict.blocks import ops
from shardwise.predict.blocks.scene import Scene
from shardwise.predict.blocks.tape import Grads, Tape, Tensor

_FLASH_BLOCK = 128
"""Rows that FlashAttention's backward rounds a length up to."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Elements of the tensors around attention on one rank."""

    query: int
    key: int
    value: int
    output: int
    scores: int
    statistics: int
    repeats: int
    scratch: int
    expanded: int


def sizes_of(scene: Scene) -> Sizes:
    """Return the sizes for a scene's block."""
    setting, attention = scene.setting, scene.attention
    heads, kv_heads = scene.own_heads()
    tokens, dim, value = scene.tokens, attention.head_dim, attention.value_dim
    rounded = -(-setting.padded_length // _FLASH_BLOCK) * _FLASH_BLOCK * setting.rows * heads
    return Sizes(
        query=tokens * heads * dim,
        key=tokens * kv_heads * dim,
        value=tokens * kv_heads * value,
        output=tokens * heads * value,
        scores=tokens * heads * setting.padded_length,
        statistics=tokens * heads,
        repeats=heads // kv_heads,
        scratch=rounded * (-(-dim // 32) * 32 + 1),
        expanded=tokens * heads * (dim + value) if heads != kv_heads else 0,
    )


def attend(
    scene: Scene,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    dropout: float = 0.0,
    heads_outside: bool = False,
    upcast: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """Attention, its output laid out as [rows, length, heads x dim]; with eager attention also its weights, which the
    caller's variables keep.

    Args:
        scene: The block.
        query: Queries [rows, heads, length, dim].
        key: Keys.
        value: Values.
        dropout: Rate of dropout on the weights.
        heads_outside: Queries lie in memory by heads, not by tokens: so does then what a fused kernel makes of them.
        upcast: Eager softmax is in fp32.
    """
    dropout = dropout if scene.setting.training else 0.0
    if scene.setting.attention == "eager":
        return eager(scene, query, key, value, dropout, upcast, heads_outside)
    if scene.setting.device == "cpu" and (dropout or scene.attention.head_dim != scene.attention.value_dim):
        return by_formula(scene, query, key, value, dropout), None
    output = fused(scene, query, key, value)
    return ops.copy(scene.tape, output) if heads_outside else output, None


def repeat(tape: Tape, x: Tensor, times: int) -> Tensor:
    """`repeat_kv`: keys or values once for each query head."""
    if times == 1:
        return x
    size, item = x.elements, x.item
    return tape.new(size * times, item, tape.node((x,), lambda grad, saved: (tape.new(size, item),)))


def fused(scene: Scene, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """`scaled_dot_product_attention` as one operation, keys and values not repeated."""
    tape, sizes, item, cuda = scene.tape, sizes_of(scene), query.item, scene.setting.device == "cuda"
    needs = [tensor.needs_grad for tensor in (query, key, value)]
    shapes = (query.elements, key.elements, value.elements)

    def derivative(_: Tensor, __: list[Tensor]) -> Grads:
        made = [tape.new(size, item) for size in shapes]
        scratch = tape.new(sizes.scratch, ops.FLOAT) if cuda else None
        wide = tape.new(sizes.expanded, item) if cuda else None
        del scratch, wide
        return tuple(grad if wanted else None for grad, wanted in zip(made, needs, strict=True))

    node = tape.node((query, key, value), derivative)
    tape.save(node, query, key, value)

    def make() -> tuple[Tensor, ...]:
        return tape.new(sizes.output, item), tape.new(sizes.statistics, ops.FLOAT)

    made, statistics = tape.keep("attention", 0, make)
    made.node = node
    tape.save(node, made, statistics)
    return ops.view(tape, made)


def eager(
    scene: Scene, query: Tensor, key: Tensor, value: Tensor, dropout: float, upcast: bool, heads_outside: bool
) -> tuple[Tensor, Tensor]:
    """Attention as single operations on scores of length x length per head."""
    tape, sizes = scene.tape, sizes_of(scene)
    keys = repeat(tape, key, sizes.repeats)
    values = repeat(tape, value, sizes.repeats)
    weights = scores(tape, query, keys, sizes, scene.attention.head_dim, heads_outside)
    weights = ops.scale(tape, weights)
    if scene.layers.config.get("attn_logit_softcapping", scene.layers.cap) is not None:
        weights = ops.scale(tape, weights)
        weights = ops.by_result(tape, weights)
        weights = ops.scale(tape, weights)
    weights = ops.add(tape, weights, scene.shared(1))
    item = ops.FLOAT if upcast else query.item
    weights = ops.cast(tape, ops.by_result(tape, ops.cast(tape, weights, item)), query.item)
    weights = scene.drop(weights, dropout)
    output = weighted(tape, weights, values, sizes, scene.setting.padded_length)
    output = ops.copy(tape, output, grad_copied=True)
    return output, weights


def scores(tape: Tape, query: Tensor, keys: Tensor, sizes: Sizes, inner: int, heads_outside: bool) -> Tensor:
    """`query @ keys.T`: operands whose heads are not outermost in memory are copied first."""
    if not heads_outside:
        query = ops.copy(tape, query)
        if sizes.repeats == 1:
            keys = ops.copy(tape, keys)
    return batched(tape, query, keys, sizes.scores, inner)


def weighted(tape: Tape, weights: Tensor, values: Tensor, sizes: Sizes, length: int) -> Tensor:
    """`weights @ values`."""
    if sizes.repeats == 1:
        values = ops.copy(tape, values)
    return batched(tape, weights, values, sizes.output, length)


def batched(tape: Tape, a: Tensor, b: Tensor, elements: int, inner: int) -> Tensor:
    """`bmm`."""
    (m, n), item = (a.elements, b.elements), a.item
    a_needs, b_needs = a.needs_grad, b.needs_grad

    def derivative(_: Tensor, __: list[Tensor]) -> Grads:
        left = tape.new(m, item) if a_needs else None
        return left, tape.new(n, item) if b_needs else None

    node = tape.node((a, b), derivative)
    if b_needs:
        tape.save(node, a)
    if a_needs:
        tape.save(node, b)
    (made,) = tape.keep("matmul", inner, lambda: (tape.new(elements, item),))
    made.node = node
    return made


def by_formula(scene: Scene, query: Tensor, key: Tensor, value: Tensor, dropout: float) -> Tensor:
    """`_scaled_dot_product_attention_math`: what torch does where no kernel takes the inputs; fp32 inside."""
    tape, sizes, item = scene.tape, sizes_of(scene), query.item
    wide_query, wide_key = ops.cast(tape, query, ops.FLOAT), ops.cast(tape, key, ops.FLOAT)
    wide_value = ops.cast(tape, value, ops.FLOAT)
    scaled = ops.scale(tape, wide_query)
    mask = tape.new(scene.setting.padded_length**2, ops.FLOAT)
    keys, values = repeat(tape, wide_key, sizes.repeats), repeat(tape, wide_value, sizes.repeats)
    found = batched(
        tape,
        ops.copy(tape, scaled),
        ops.copy(tape, ops.scale(tape, keys)),
        sizes.scores,
        scene.attention.head_dim,
    )
    found = ops.by_result(tape, found)
    found = scene.drop(found, dropout)
    output = batched(tape, found, ops.copy(tape, values), sizes.output, scene.setting.padded_length)
    weights = ops.cast(tape, found, item)
    output = ops.cast(tape, output, item)
    del weights, mask
    return ops.copy(tape, output, grad_copied=True)
