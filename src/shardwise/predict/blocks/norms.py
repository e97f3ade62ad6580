"""Norms: transformers' own code in fp32, and those that are one operation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from shardwise.predict.blocks import ops
from shardwise.predict.blocks.tape import Grads, Tape, Tensor

Norm = Literal["rms", "rms_after", "gemma", "layer", "layer_plus_one"]
"""`rms`: Llama's, cast back before the weight; `rms_after`: OLMo's, cast back after it; `gemma`: 1 + weight in fp32;
`layer`: LayerNorm; `layer_plus_one`: Nemotron's, with 1 + weight."""


def rms(tape: Tape, x: Tensor, weight: Tensor) -> Tensor:
    """`LlamaRMSNorm.forward`: fp32 inside, every step an operation of its own."""
    hidden = ops.cast(tape, x, ops.FLOAT)
    variance = mean(tape, ops.power(tape, hidden), hidden.elements // weight.elements)
    hidden = ops.mul(tape, hidden, rsqrt(tape, variance))
    return ops.mul(tape, weight, ops.cast(tape, hidden, x.item))


def rms_after(tape: Tape, x: Tensor, weight: Tensor) -> Tensor:
    """`Olmo2RMSNorm.forward`."""
    item = x.item
    hidden = ops.cast(tape, x, ops.FLOAT)
    variance = mean(tape, ops.power(tape, hidden), hidden.elements // weight.elements)
    hidden = ops.mul(tape, hidden, rsqrt(tape, variance))
    return ops.cast(tape, ops.mul(tape, weight, hidden), item)


def gemma(tape: Tape, x: Tensor, weight: Tensor) -> Tensor:
    """`GemmaRMSNorm.forward`."""

    def normed(x: Tensor) -> Tensor:
        return ops.mul(tape, x, rsqrt(tape, mean(tape, ops.power(tape, x), x.elements // weight.elements)))

    output = normed(ops.cast(tape, x, ops.FLOAT))
    output = ops.mul(tape, output, ops.plus_number(tape, ops.cast(tape, weight, ops.FLOAT)))
    return ops.cast(tape, output, x.item)


def fused_rms(tape: Tape, x: Tensor, weight: Tensor) -> Tensor:
    """`F.rms_norm` on a GPU: it saves its input and one fp32 number per row."""
    return _one_operation(tape, x, (weight,), statistics=1, item=ops.FLOAT)


def layer(tape: Tape, x: Tensor, weight: Tensor, bias: Tensor | None, device: str) -> Tensor:
    """`F.layer_norm`: it saves its input and two numbers per row, in fp32 on GPUs."""
    parameters = (weight,) if bias is None else (weight, bias)
    return _one_operation(tape, x, parameters, statistics=2, item=ops.FLOAT if device == "cuda" else x.item)


def layer_plus_one(tape: Tape, x: Tensor, weight: Tensor, bias: Tensor | None, device: str) -> Tensor:
    """`NemotronLayerNorm1P.forward`."""
    return layer(tape, x, ops.plus_number(tape, weight), bias, device)


def _one_operation(tape: Tape, x: Tensor, parameters: tuple[Tensor, ...], *, statistics: int, item: int) -> Tensor:
    size, x_item, x_needs, weight = x.elements, x.item, x.needs_grad, parameters[0]
    moved = 2 * x.size + sum(parameter.size for parameter in parameters)
    sizes = [(parameter.node, parameter.elements, parameter.item) for parameter in parameters]

    def derivative(_: Tensor, __: list[Tensor]) -> Grads:
        of_x = tape.new(size, x_item) if x_needs else None
        tape.move(moved + (size * x_item if x_needs else 0))
        return (of_x, *(tape.gradient(to, size, item) if to is not None else None for to, size, item in sizes))

    node = tape.node((x, *parameters), derivative)
    tape.save(node, x, weight)
    made = tape.new(size, x_item, node)
    tape.move(moved)
    tape.save(node, tape.new(statistics * (size // weight.elements), item))
    return made


def mean(tape: Tape, x: Tensor, rows: int) -> Tensor:
    """The mean of every row."""
    size, item = x.elements, x.item
    node = tape.node((x,), lambda grad, saved: (tape.new(size, item, reads=rows * item),))
    return tape.new(rows, item, node, reads=size * item)


def rsqrt(tape: Tape, x: Tensor) -> Tensor:
    """`torch.rsqrt(x + epsilon)`."""
    shifted = ops.plus_number(tape, x)
    size, item = x.elements, x.item

    def derivative(_: Tensor, __: list[Tensor]) -> Grads:
        for _step in ("third power", "its product with a number"):
            tape.move(2 * size * item)
        return (tape.new(size, item, reads=2 * size * item),)

    node = tape.node((shifted,), derivative)
    made = tape.new(size, item, node, reads=size * item)
    tape.save(node, made)
    return made


PLAIN: dict[str, Callable[[Tape, Tensor, Tensor], Tensor]] = {"rms": rms, "rms_after": rms_after, "gemma": gemma}
"""Norms of a weight alone."""
