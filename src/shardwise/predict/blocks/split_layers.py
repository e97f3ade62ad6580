"""Linear layers whose weights are split over the tensor axis, and what goes in and out of the parts that hold them.

What DTensor does, as `engine.tensor_parallel` asks it to: a sum over the ranks is a new tensor; gathering along the
sequence or the last dim is a gather along the first and a copy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardwise.predict.blocks import ops
from shardwise.predict.blocks.graph import Node
from shardwise.predict.blocks.tape import Grads, Tape, Tensor
from shardwise.predict.unit_split import COLUMN

if TYPE_CHECKING:
    from shardwise.predict.blocks.scene import Scene


def enter(scene: Scene, part: str, x: Tensor) -> Tensor:
    """What a part of a block works on: all of the sequence; its gradient is summed over the ranks."""
    inside = [site.word for name, site in scene.layers.sites.items() if name.startswith(f"{part}.")]
    if not any(word in COLUMN for word in inside):
        return x
    if scene.setting.sequence_parallel:
        return gathered_sequence(scene, x)
    return x if None in inside else summed_back(scene.tape, x)


def project(scene: Scene, name: str, x: Tensor) -> Tensor:
    """A split linear layer, with its adapter."""
    word = scene.layers.sites[name].word
    if word in COLUMN:
        return _column(scene, name, x)
    if word == "rowwise_split_input":
        x = own_part(scene, x)
    return _row(scene, name, x)


def _column(scene: Scene, name: str, x: Tensor) -> Tensor:
    """This rank's outputs; of an adapter, B is split as the layer is, and gradients of A's output are summed."""
    tape, ranks, site = scene.tape, scene.setting.tensor, scene.layers.sites[name]
    bias = scene.parameter(f"{name}.bias", ranks) if site.bias else None
    weight = scene.parameter(f"{name}.weight", ranks)
    narrow = scene.narrow(f"{name}.weight")
    result = given(scene, name, ops.linear(tape, x, weight, bias, inputs=site.inputs, flat=True, narrow=narrow))
    if not site.rank:
        return result
    a = scene.adapter(f"{name}.A", site.inputs * site.rank)
    b = scene.adapter(f"{name}.B", site.outputs // ranks * site.rank)
    dropped = divided_back(tape, scene.drop(x, scene.layers.dropout))
    low = summed_back(tape, ops.linear(tape, dropped, a, inputs=site.inputs, flat=True))
    del dropped
    high = given(scene, name, ops.linear(tape, low, b, inputs=site.rank, flat=True))
    del low
    high = ops.scale(tape, high)
    return ops.add(tape, result, high)


def given(scene: Scene, name: str, x: Tensor) -> Tensor:
    """What a column of a layer gives: its part of the outputs, or all of them."""
    gathers = scene.layers.sites[name].word == "colwise_gather_output" and not scene.setting.program.parallel_loss
    return _gathered_last(scene, x) if gathers else x


def _row(scene: Scene, name: str, x: Tensor) -> Tensor:
    """A sum over the ranks of what each makes of its inputs; of an adapter, A is split as the layer is."""
    tape, ranks, site = scene.tape, scene.setting.tensor, scene.layers.sites[name]
    bias = scene.parameter(f"{name}.bias") if site.bias else None
    inputs = site.inputs // ranks
    weight = scene.parameter(f"{name}.weight", ranks)
    narrow = scene.narrow(f"{name}.weight")
    result = summed(scene, ops.linear(tape, x, weight, bias, inputs=inputs, flat=True, narrow=narrow))
    if not site.rank:
        return result
    a = scene.adapter(f"{name}.A", inputs * site.rank)
    b = scene.adapter(f"{name}.B", site.outputs * site.rank)
    dropped = scene.drop(x, scene.layers.dropout)
    low = summed(scene, ops.linear(tape, dropped, a, inputs=inputs, flat=True))
    del dropped
    return ops.add(tape, result, ops.scale(tape, ops.linear(tape, low, b, inputs=site.rank, flat=True)))


def summed(scene: Scene, x: Tensor) -> Tensor:
    """The sum over the ranks; under sequence parallelism, each rank's part of it."""
    if scene.setting.sequence_parallel:
        return _scattered_sum(scene, x)
    return tape_sum(scene.tape, x)


def tape_sum(tape: Tape, x: Tensor) -> Tensor:
    """An all-reduce: a new tensor; gradients are whole already."""
    tape.exchange("all_reduce", x.size)
    return tape.new(x.elements, x.item, tape.node((x,), lambda grad, saved: (grad,)))


def summed_back(tape: Tape, x: Tensor) -> Tensor:
    """x, whose gradient is all-reduced."""
    size, item = x.elements, x.item

    def derivative(_: Tensor, __: list[Tensor]) -> Grads:
        tape.exchange("all_reduce", size * item)
        return (tape.new(size, item),)

    return Tensor(x.storage, size, item, tape.node((x,), derivative))


def divided_back(tape: Tape, x: Tensor) -> Tensor:
    """x, whose gradient, whole on every rank, is made a part of a sum."""
    size, item = x.elements, x.item
    node = tape.node((x,), lambda grad, saved: (tape.new(size, item, reads=size * item),))
    return Tensor(x.storage, size, item, node)


def sums_gradient(scene: Scene, name: str, x: Tensor) -> Tensor:
    """What the head is given: where a column of it gives this rank's logits, its gradient is summed over the ranks."""
    tape, site = scene.tape, scene.layers.sites[name]
    if site.word not in COLUMN:
        return x

    def derivative(grad: Tensor, _: list[Tensor]) -> Grads:
        tape.exchange("all_reduce", grad.size)
        return (grad,)

    return Tensor(x.storage, x.elements, x.item, tape.node((x,), derivative))


def gathered_sequence(scene: Scene, x: Tensor, *, whole: bool = False) -> Tensor:
    """All parts of the sequence; the gradient is summed and scattered, or, `whole` on every rank, cut."""
    tape, size, item, ranks = scene.tape, x.elements, x.item, scene.setting.tensor

    def derivative(grad: Tensor, _: list[Tensor]) -> Grads:
        pieces = tape.new(grad.elements, grad.item, reads=None if whole else grad.size)
        made = tape.new(size, item, reads=size * item if whole else None)
        if not whole:
            tape.exchange("reduce_scatter", size * ranks * item)
        del pieces
        return (made,)

    node = tape.node((x,), derivative)
    pieces = tape.new(size * ranks, item)
    tape.exchange("all_gather", size * ranks * item)
    made = tape.new(size * ranks, item, node, reads=size * ranks * item)
    del pieces
    return made


def own_part(scene: Scene, x: Tensor) -> Tensor:
    """This rank's part of a whole tensor; the gradient is gathered."""
    size = x.elements // scene.setting.tensor
    return scene.tape.new(size, x.item, _gathered_back(scene.tape, x), reads=size * x.item)


def _scattered_sum(scene: Scene, x: Tensor) -> Tensor:
    tape, size, item = scene.tape, x.elements, x.item
    node = _gathered_back(tape, x)
    pieces = tape.new(size, item, reads=size * item)
    tape.exchange("reduce_scatter", size * item)
    made = tape.new(size // scene.setting.tensor, item, node)
    del pieces
    return made


def _gathered_back(tape: Tape, x: Tensor) -> Node | None:
    """The backward of an operation on x whose gradient is gathered from all ranks, and put together in a copy."""
    size, item = x.elements, x.item

    def derivative(_: Tensor, __: list[Tensor]) -> Grads:
        pieces = tape.new(size, item)
        tape.exchange("all_gather", size * item)
        made = tape.new(size, item, reads=size * item)
        del pieces
        return (made,)

    return tape.node((x,), derivative)


def _gathered_last(scene: Scene, x: Tensor) -> Tensor:
    """All outputs; the gradient is cut to this rank's."""
    tape, size, item, ranks = scene.tape, x.elements, x.item, scene.setting.tensor
    node = tape.node((x,), lambda grad, saved: (tape.new(size, item, reads=size * item),))
    pieces = tape.new(size * ranks, item)
    tape.exchange("all_gather", size * ranks * item)
    made = tape.new(size * ranks, item, node, reads=size * ranks * item)
    del pieces
    return made
