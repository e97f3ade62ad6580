"""Activation functions, by transformers' words for them."""

from __future__ import annotations

from collections.abc import Callable

from shardwise.predict.blocks import ops
from shardwise.predict.blocks.tape import Grads, Tape, Tensor


def one_operation(tape: Tape, x: Tensor) -> Tensor:
    """SiLU, or GELU in one of its forms: the input is saved."""
    size, item = x.elements, x.item
    node = tape.node((x,), lambda grad, saved: (tape.new(size, item, reads=2 * size * item),))
    tape.save(node, x)
    return tape.new(size, item, node, reads=size * item)


def relu(tape: Tape, x: Tensor) -> Tensor:
    """ReLU: its result is saved."""
    return ops.by_result(tape, x)


def squared_relu(tape: Tape, x: Tensor) -> Tensor:
    """`ReLUSquaredActivation.forward`."""
    applied = relu(tape, x)
    return ops.power(tape, applied)


def new_gelu(tape: Tape, x: Tensor) -> Tensor:
    """`NewGELUActivation.forward`."""
    return ops.mul(
        tape,
        ops.scale(tape, x),
        ops.plus_number(
            tape,
            ops.by_result(tape, ops.scale(tape, ops.add(tape, x, ops.scale(tape, ops.power(tape, x))))),
        ),
    )


FUNCTIONS: dict[str, Callable[[Tape, Tensor], Tensor]] = {
    "relu": relu,
    "relu2": squared_relu,
    "gelu_new": new_gelu,
}
"""Words for what is not one operation that saves its input."""


def apply(tape: Tape, x: Tensor, word: str) -> Tensor:
    """Apply an activation function."""
    return FUNCTIONS.get(word, one_operation)(tape, x)


def gated(tape: Tape, first: Tensor, second: Tensor) -> Tensor:
    """An activation function and the product with what it lets through, in one kernel."""
    size, item = first.elements, first.item
    needs = first.needs_grad, second.needs_grad

    def derivative(_: Tensor, __: list[Tensor]) -> Grads:
        tape.move((3 + sum(needs)) * size * item)
        return tape.new(size, item) if needs[0] else None, tape.new(size, item) if needs[1] else None

    node = tape.node((first, second), derivative)
    tape.save(node, first, second)
    return tape.new(size, item, node, reads=2 * size * item)
