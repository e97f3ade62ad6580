"""Operations of torch as the tape sees them: what they allocate, what autograd saves of them, and their backward.

Sizes are in elements of one rank. Every derivative allocates what torch's does, temporaries included, and in its order.
"""

from __future__ import annotations

from collections.abc import Sequence

from shardwise.predict.blocks.tape import TEMPORARY, Grads, Node, Tape, Tensor

FLOAT = 4
"""Bytes of an element in fp32."""

WORD = 8
"""Bytes of an index."""


def cast(tape: Tape, x: Tensor, item: int) -> Tensor:
    """`x.to(dtype)`: the same tensor where it has that dtype already."""
    if x.item == item:
        return x
    size, before = x.elements, x.item
    node = tape.node((x,), lambda grad, saved: (tape.new(size, before, reads=size * item),))
    return tape.new(size, item, node, reads=size * before)


def add(tape: Tape, a: Tensor, b: Tensor) -> Tensor:
    """`a + b`, the smaller one broadcast."""
    a_needs, b_needs = a.needs_grad, b.needs_grad

    def derivative(grad: Tensor, _: list[Tensor]) -> Grads:
        return grad if a_needs else None, grad if b_needs else None

    node = tape.node((a, b), derivative)
    _fit(node, a, b)
    return tape.new(max(a.elements, b.elements), max(a.item, b.item), node, reads=a.size + b.size)


def _fit(node: Node | None, *inputs: Tensor) -> None:
    """Let gradients be summed over what was broadcast, and cast, to fit what they are the gradients of."""
    if node is not None:
        node.fits = tuple((tensor.elements, tensor.item) for tensor in inputs)


def subtract(tape: Tape, a: Tensor, b: Tensor) -> Tensor:
    """`a - b` of one size: the gradient of b is a new tensor."""
    size, item = a.elements, a.item
    a_needs, b_needs = a.needs_grad, b.needs_grad

    def derivative(grad: Tensor, _: list[Tensor]) -> Grads:
        return grad if a_needs else None, tape.new(size, item, reads=size * item) if b_needs else None

    return tape.new(size, item, tape.node((a, b), derivative), reads=2 * size * item)


def scale(tape: Tape, x: Tensor) -> Tensor:
    """A product with, or a quotient by, a number."""
    return pointwise(tape, x)


def pointwise(tape: Tape, x: Tensor, *, backward_reads: int = 1) -> Tensor:
    """A function of every element that saves nothing of its own; `backward_reads`: tensors of that size."""
    size, item = x.elements, x.item
    read = backward_reads * size * item
    node = tape.node((x,), lambda grad, saved: (tape.new(size, item, reads=read),))
    return tape.new(size, item, node, reads=size * item)


def mul(tape: Tape, a: Tensor, b: Tensor) -> Tensor:
    """`a * b`, the smaller one broadcast."""
    a_needs, b_needs = a.needs_grad, b.needs_grad
    size, item = max(a.elements, b.elements), max(a.item, b.item)
    a_size, b_size, made_size = a.elements * a.item, b.elements * b.item, size * item

    def derivative(_: Tensor, __: list[Tensor]) -> Grads:
        left = tape.new(size, item, reads=made_size + b_size) if a_needs else None
        return left, tape.new(size, item, reads=made_size + a_size) if b_needs else None

    node = tape.node((a, b), derivative)
    _fit(node, a, b)
    if b_needs:
        tape.save(node, a)
    if a_needs:
        tape.save(node, b)
    return tape.new(size, item, node, reads=a_size + b_size)


def view(tape: Tape, x: Tensor, *, grad_copied: bool = False) -> Tensor:
    """Another look at a storage; `grad_copied`: its gradient's memory is laid out otherwise, and is copied."""
    size, item = x.elements, x.item

    def derivative(grad: Tensor, _: list[Tensor]) -> Grads:
        return (tape.new(size, item, reads=size * item) if grad_copied else grad.view(),)

    return Tensor(x.storage, size, item, tape.node((x,), derivative))


def copy(tape: Tape, x: Tensor, *, grad_copied: bool = False) -> Tensor:
    """`contiguous()` or `reshape` of a tensor whose axes lie in another order."""
    size, item = x.elements, x.item

    def derivative(grad: Tensor, _: list[Tensor]) -> Grads:
        return (tape.new(size, item, reads=size * item) if grad_copied else grad,)

    return tape.new(size, item, tape.node((x,), derivative), reads=size * item)


def linear(
    tape: Tape,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    inputs: int,
    flat: bool = False,
    packed: int = 0,
    narrow: bool = False,
) -> Tensor:
    """A linear layer on rows of `inputs` elements; [rows, length, inputs] are looked at as a matrix, which `flat` is.

    `packed`: bytes of the weight where it is quantised. It is unpacked for the product and for that in backward, and
    the input is saved (bitsandbytes does so for a gradient of the weight that nothing asks for). `narrow`: products are
    in fp8, for which every operand is cast.
    """
    rows, outputs, item = x.elements // inputs, weight.elements // inputs, weight.item
    x_needs, weight_needs = x.needs_grad, weight.needs_grad
    bias_needs = bias is not None and bias.needs_grad
    weight_node, bias_node = weight.node, bias.node if bias is not None else None
    width = 1 if narrow else item

    def derivative(grad: Tensor, _: list[Tensor]) -> Grads:
        if narrow:
            _narrow(tape, item, rows * outputs, *(inputs * outputs,) * x_needs, *(rows * inputs,) * weight_needs)
        unpacked = tape.new(inputs * outputs, item, kind=TEMPORARY, reads=packed) if packed else None
        into = tape.new(rows * inputs, item, kind=TEMPORARY) if x_needs else None
        if x_needs:
            tape.product(rows, outputs, inputs, width)
        del unpacked
        into = into.view() if into is not None and not flat else into
        of_weight = tape.gradient(weight_node, inputs * outputs, item).view() if weight_needs else None
        if weight_needs:
            tape.product(outputs, rows, inputs, width)
        of_bias = tape.gradient(bias_node, outputs, item, reads=rows * outputs * item) if bias_needs else None
        return (into, of_weight) if bias is None else (into, of_weight, of_bias)

    node = tape.node((x, weight) if bias is None else (x, weight, bias), derivative)
    if weight_needs or packed:
        tape.save(node, x)
    if x_needs:
        tape.save(node, weight)
    unpacked = tape.new(inputs * outputs, item, reads=packed) if packed else None

    def make() -> tuple[Tensor]:
        if narrow:
            _narrow(tape, item, rows * inputs, inputs * outputs)
        tape.product(rows, inputs, outputs, width)
        return (tape.new(rows * outputs, item),)

    (made,) = tape.keep("matmul", inputs, make)
    del unpacked
    made.node = node
    return made


def _narrow(tape: Tape, item: int, *operands: int) -> None:
    """Count the casts of operands of so many elements to fp8: the largest of each is looked for, then it is cast."""
    for elements in operands:
        tape.move(elements * item)
        tape.move(elements * (item + 1))


def plus_number(tape: Tape, x: Tensor) -> Tensor:
    """A sum with a number."""
    return tape.new(x.elements, x.item, tape.node((x,), lambda grad, saved: (grad,)), reads=x.size)


def power(tape: Tape, x: Tensor) -> Tensor:
    """`x.pow(2)` or `x.pow(3)`."""
    size, item = x.elements, x.item
    read = size * item

    def derivative(_: Tensor, __: list[Tensor]) -> Grads:
        lower, times_exponent = tape.new(size, item, reads=read), tape.new(size, item, reads=read)
        made = tape.new(size, item, reads=2 * read)
        del lower, times_exponent
        return (made,)

    node = tape.node((x,), derivative)
    tape.save(node, x)
    return tape.new(size, item, node, reads=read)


def by_result(tape: Tape, x: Tensor) -> Tensor:
    """A function whose derivative follows from its result, which is saved: ReLU, tanh, sigmoid, softmax."""
    size, item = x.elements, x.item
    node = tape.node((x,), lambda grad, saved: (tape.new(size, item, reads=2 * size * item),))
    made = tape.new(size, item, node, reads=size * item)
    tape.save(node, made)
    return made


def cat(tape: Tape, *parts: Tensor) -> Tensor:
    """Several tensors in one; their gradients are slices of its gradient."""
    item, sizes = parts[0].item, [part.elements for part in parts]

    def derivative(grad: Tensor, _: list[Tensor]) -> Grads:
        return tuple(Tensor(grad.storage, size, item, viewed=True) for size in sizes)

    return tape.new(sum(sizes), item, tape.node(parts, derivative), reads=sum(sizes) * item)


def dropout(tape: Tape, x: Tensor, device: str) -> Tensor:
    """Dropout: a mask of bytes on a GPU; on a CPU a product with noise in the dtype of x."""
    if device == "cuda":
        size, item = x.elements, x.item
        node = tape.node((x,), lambda grad, saved: (tape.new(size, item, reads=size * (item + 1)),))
        made = tape.new(size, item, node, reads=size * (item + 1))
        tape.save(node, tape.new(size, 1))
        return made
    tape.move(2 * x.size)  # noise is divided in place by what remains on average
    return mul(tape, x, tape.new(x.elements, x.item, reads=0))


def lookup(tape: Tape, table: Tensor, rows: int, width: int, *, own_numbers: bool = False) -> Tensor:
    """An embedding; its gradient is as large as the table. `own_numbers`: the numbers of its rows are made for it."""
    size, item, target = table.elements, table.item, table.node
    looked_at = rows * (width * item + WORD)
    node = tape.node((table,), lambda grad, saved: (tape.gradient(target, size, item, reads=looked_at),))
    if own_numbers:
        tape.save(node, tape.new(rows, WORD, reads=0))
    return tape.new(rows * width, item, node, reads=looked_at)


def part(tape: Tape, x: Tensor, elements: int) -> Tensor:
    """A slice of x; its gradient is written into zeros of the whole."""
    size, item = x.elements, x.item

    def derivative(_: Tensor, __: list[Tensor]) -> Grads:
        made = tape.new(size, item, reads=0)
        tape.move(2 * elements * item)
        return (made,)

    return Tensor(x.storage, elements, item, tape.node((x,), derivative))


def split(tape: Tape, x: Tensor, pieces: Sequence[int]) -> list[Tensor]:
    """Slices of so many elements, one after another; their gradients are put together."""
    size, item = x.elements, x.item
    whole = tape.joint((x,), lambda grad, saved: (tape.new(size, item, reads=size * item),))
    return [Tensor(x.storage, piece, item, whole) for piece in pieces]
