"""Attention over queries, keys and values [rows, heads, length, dim], by each implementation."""

from __future__ import annotations

from dataclasses import dataclass

from shardwise.predict.blocks import ops
from shardwise.predict.blocks.kernels import ALIGNED, Kernel, kernel_of, scratch, statistics
from shardwise.predict.blocks.scene import Scene
from shardwise.predict.blocks.tape import Grads, Tape, Tensor
from shardwise.predict.work import AttentionWork


@dataclass(frozen=True, slots=True)
class Sizes:
    """Elements of the tensors around attention on one rank."""

    heads: int
    kv_heads: int
    output: int
    scores: int

    @property
    def repeats(self) -> int:
        """Query heads for each key."""
        return self.heads // self.kv_heads


def sizes_of(scene: Scene) -> Sizes:
    """Return the sizes for a scene's block."""
    heads, kv_heads = scene.own_heads()
    per_head = scene.tokens * heads
    return Sizes(
        heads=heads,
        kv_heads=kv_heads,
        output=per_head * scene.attention.value_dim,
        scores=per_head * scene.setting.padded_length,
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
    broadcast: bool = False,
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
        broadcast: Keys that several queries share are not repeated: matrix products broadcast them.
    """
    dropout = dropout if scene.setting.training else 0.0
    if scene.setting.attention == "eager":
        return eager(scene, query, key, value, dropout, upcast, heads_outside, broadcast)
    return fused(scene, query, key, value, dropout, heads_outside), None


def repeat(tape: Tape, x: Tensor, times: int) -> Tensor:
    """`repeat_kv`: keys or values once for each query head."""
    if times == 1:
        return x
    size, item = x.elements, x.item
    node = tape.node((x,), lambda grad, saved: (tape.new(size, item, reads=times * size * item),))
    return tape.new(size * times, item, node, reads=size * item)


def fused(scene: Scene, query: Tensor, key: Tensor, value: Tensor, dropout: float, heads_outside: bool) -> Tensor:
    """`sdpa_attention_forward`. Keys and values are repeated only beside a mask, or for heads too wide to share."""
    attention, repeats = scene.attention, sizes_of(scene).repeats
    shares = not scene.masked and attention.head_dim == attention.value_dim <= 256
    if not shares:
        key, value = repeat(scene.tape, key, repeats), repeat(scene.tape, value, repeats)
    return operation(scene, query, key, value, dropout, heads_outside, grouped=shares)


def operation(
    scene: Scene, query: Tensor, key: Tensor, value: Tensor, dropout: float, heads_outside: bool, *, grouped: bool
) -> Tensor:
    """`scaled_dot_product_attention`; `grouped`: keys that several queries share are allowed."""
    setting, attention = scene.setting, scene.attention
    same_heads = query.elements == key.elements
    chosen = kernel_of(
        setting.device,
        setting.generation,
        item=query.item,
        widths=(attention.head_dim, attention.value_dim),
        same_heads=same_heads,
        grouped=grouped,
        masked=scene.masked,
        dropout=dropout > 0,
    )
    if chosen == "math":
        repeats = sizes_of(scene).repeats if grouped else 1
        return by_formula(scene, query, key, value, dropout, repeats, heads_outside)
    output = by_kernel(scene, chosen, query, key, value, scene.masked)
    return ops.copy(scene.tape, output) if heads_outside and chosen != "efficient" else output


def by_kernel(scene: Scene, kernel: Kernel, query: Tensor, key: Tensor, value: Tensor, masked: bool) -> Tensor:
    """Attention as one operation."""
    tape, setting, attention, sizes, item = scene.tape, scene.setting, scene.attention, sizes_of(scene), query.item
    needs = [tensor.needs_grad for tensor in (query, key, value)]
    shapes = (query.elements, key.elements, value.elements)
    flops, moved = executed(scene, kernel, masked), (sum(shapes) + sizes.output) * item
    taken = scratch(
        kernel,
        rows=setting.rows,
        heads=sizes.heads,
        kv_heads=sizes.heads * key.elements // query.elements,
        length=setting.padded_length,
        widths=(attention.head_dim, attention.value_dim),
        item=item,
    )

    def derivative(_: Tensor, __: list[Tensor]) -> Grads:
        made = [tape.new(size, item) for size in shapes]
        own = tape.new(taken, 1)
        tape.attend(AttentionWork(flops * 5 // 2, kernel, True, item, 2 * (moved + taken)))
        del own
        return tuple(grad if wanted else None for grad, wanted in zip(made, needs, strict=True))

    node = tape.node((query, key, value), derivative)
    tape.save(node, query, key, value)
    if masked:
        tape.save(node, own_mask(scene, kernel, item))

    def make() -> tuple[Tensor, ...]:
        numbers = statistics(kernel, setting.rows, sizes.heads, setting.padded_length)
        tape.attend(AttentionWork(flops, kernel, False, item, moved))
        return tape.new(sizes.output, item), tape.new(numbers, ops.FLOAT)

    made, numbers = tape.keep("attention", 0, make)
    made.node = node
    tape.save(node, made, numbers)
    return ops.view(tape, made)


def executed(scene: Scene, kernel: Kernel, masked: bool) -> int:
    """Return the FLOPs of a kernel's forward: two products for every pair of a query and a key that it looks at.

    Beside a mask it looks at all of them; else at those that causality leaves. FlashAttention called as itself is
    told of windows and lengths, and needs no mask for them.
    """
    setting, attention = scene.setting, scene.attention
    length, window = setting.padded_length, setting.padded_length
    if setting.attention == "flash_attention_2":
        masked, window = False, min(length, attention.window or length)
    pairs = length**2 if masked else window * (window + 1) // 2 + (length - window) * window
    return 2 * setting.rows * sizes_of(scene).heads * pairs * (attention.head_dim + attention.value_dim)


def own_mask(scene: Scene, kernel: Kernel, item: int) -> Tensor:
    """A block's own additive mask, made of the boolean one that all are given."""
    rows, length = scene.setting.rows, scene.setting.padded_length
    wide = -(-length // ALIGNED) * ALIGNED if kernel == "efficient" else length
    return scene.tape.new(rows * length * wide, item, reads=rows * length**2)


def eager(
    scene: Scene,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout: float,
    upcast: bool,
    heads_outside: bool,
    broadcast: bool,
) -> tuple[Tensor, Tensor]:
    """Attention as single operations on scores of length x length per head."""
    tape, sizes = scene.tape, sizes_of(scene)
    keys = key if broadcast else repeat(tape, key, sizes.repeats)
    values = value if broadcast else repeat(tape, value, sizes.repeats)
    repeated = sizes.repeats > 1 and not broadcast
    weights = scores(scene, query, keys, sizes, in_order=(heads_outside, heads_outside or repeated))
    weights = ops.scale(tape, weights)
    if scene.layers.config.get("attn_logit_softcapping", scene.layers.cap) is not None:
        weights = ops.scale(tape, weights)
        weights = ops.by_result(tape, weights)
        weights = ops.scale(tape, weights)
    weights = ops.add(tape, weights, scene.shared(1))
    item = ops.FLOAT if upcast else query.item
    weights = ops.cast(tape, ops.by_result(tape, ops.cast(tape, weights, item)), query.item)
    weights = scene.drop(weights, dropout)
    output = weighted(scene, weights, values, sizes, in_order=repeated)
    output = ops.copy(tape, output, grad_copied=True)
    return output, weights


def scores(scene: Scene, query: Tensor, keys: Tensor, sizes: Sizes, *, in_order: tuple[bool, bool]) -> Tensor:
    """`query @ keys.T`: operands whose heads are not outermost in memory, or are fewer, are copied first."""
    query = query if in_order[0] else ops.copy(scene.tape, query)
    keys = keys if in_order[1] else as_many(scene, keys, sizes, scene.attention.head_dim)
    return batched(scene.tape, query, keys, sizes.scores, scene.attention.head_dim)


def weighted(scene: Scene, weights: Tensor, values: Tensor, sizes: Sizes, *, in_order: bool) -> Tensor:
    """`weights @ values`."""
    values = values if in_order else as_many(scene, values, sizes, scene.attention.value_dim)
    return batched(scene.tape, weights, values, sizes.output, scene.setting.padded_length)


def as_many(scene: Scene, x: Tensor, sizes: Sizes, width: int) -> Tensor:
    """A copy with as many heads as there are queries."""
    times = sizes.heads * width * scene.tokens // x.elements
    return ops.copy(scene.tape, x) if times == 1 else repeat(scene.tape, x, times)


def batched(tape: Tape, a: Tensor, b: Tensor, elements: int, inner: int) -> Tensor:
    """`bmm`."""
    (m, n), item = (a.elements, b.elements), a.item
    a_needs, b_needs = a.needs_grad, b.needs_grad
    columns = elements * inner // m
    batch = n // (inner * columns)
    rows = m // (inner * batch)

    def derivative(_: Tensor, __: list[Tensor]) -> Grads:
        left = tape.new(m, item) if a_needs else None
        if a_needs:
            tape.product(rows, columns, inner, item, batch)
        if b_needs:
            tape.product(inner, rows, columns, item, batch)
        return left, tape.new(n, item) if b_needs else None

    node = tape.node((a, b), derivative)
    if b_needs:
        tape.save(node, a)
    if a_needs:
        tape.save(node, b)

    def make() -> tuple[Tensor]:
        tape.product(rows, inner, columns, item, batch)
        return (tape.new(elements, item),)

    (made,) = tape.keep("matmul", inner, make)
    made.node = node
    return made


def by_formula(
    scene: Scene,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout: float,
    repeats: int,
    heads_outside: bool,
) -> Tensor:
    """`_scaled_dot_product_attention_math`: what torch does where no kernel takes the inputs; fp32 inside."""
    tape, sizes, item, length = scene.tape, sizes_of(scene), query.item, scene.setting.padded_length
    wide_query, wide_key = ops.cast(tape, query, ops.FLOAT), ops.cast(tape, key, ops.FLOAT)
    wide_value = ops.cast(tape, value, ops.FLOAT)
    scaled = ops.scale(tape, wide_query)
    mask = own_mask(scene, "math", item) if scene.masked else tape.new(length**2, ops.FLOAT, reads=0)
    keys, values = repeat(tape, wide_key, repeats), repeat(tape, wide_value, repeats)
    found = batched(
        tape,
        scaled if heads_outside else ops.copy(tape, scaled),
        _scaled_keys(scene, keys, sizes, heads_outside),
        sizes.scores,
        scene.attention.head_dim,
    )
    found = safe_softmax(tape, found)
    found = scene.drop(found, dropout)
    weights = ops.cast(tape, found, item)
    output = weighted(scene, found, values, sizes, in_order=False)
    output = ops.cast(tape, output, item)
    del weights, mask
    return ops.copy(tape, output, grad_copied=True)


def _scaled_keys(scene: Scene, keys: Tensor, sizes: Sizes, heads_outside: bool) -> Tensor:
    scaled = ops.scale(scene.tape, keys)
    fewer = scaled.elements < scene.tokens * sizes.heads * scene.attention.head_dim
    return scaled if heads_outside and not fewer else as_many(scene, scaled, sizes, scene.attention.head_dim)


def safe_softmax(tape: Tape, x: Tensor) -> Tensor:
    """`_safe_softmax`: it looks for rows that are masked altogether."""
    made = ops.by_result(tape, x)
    masked = tape.new(x.elements, 1, reads=x.size)
    del masked
    return made


def eager_in_place(scene: Scene, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Falcon's eager attention: scores are scaled in place, and softmax is in the dtype of the computation."""
    tape, sizes = scene.tape, sizes_of(scene)
    weights = scores(scene, query, key, sizes, in_order=(False, False))
    weights = ops.by_result(tape, ops.add(tape, weights, scene.shared(1)))
    output = weighted(scene, weights, value, sizes, in_order=False)
    return ops.copy(tape, output, grad_copied=True), weights
