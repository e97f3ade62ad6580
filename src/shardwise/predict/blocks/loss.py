"""From the last hidden states to a loss: whole logits, some at a time, or by a kernel."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Literal

from shardwise.predict.blocks import ops, split_layers
from shardwise.predict.blocks.families import Family
from shardwise.predict.blocks.scene import Scene
from shardwise.predict.blocks.tape import LOGITS, Grads, Tape, Tensor
from shardwise.spec.model_spec import ModelSpec

Loss = Literal["eager", "chunked", "fused", "kernel"]
"""`eager`, `chunked` and `fused` are a Plan's; `kernel`: whole logits, then one kernel of cross entropy."""

End = Callable[[Scene, list[Tensor]], Tensor]
"""From the last block's output, the only entry of a list that gives it up, to the loss."""


def loss_program(loss: Loss, family: Family, model: ModelSpec, chunk: int, output: int) -> End:
    """Return the program of a loss head.

    Args:
        loss: Which.
        family: The model's programs.
        model: The model.
        chunk: Tokens per piece (`chunked`).
        output: Bytes of an element of the logits that leave the model (`eager`).
    """

    def decoded(scene: Scene, inputs: list[Tensor]) -> Tensor:
        hidden = scene.norm(family.last_norm, inputs.pop())
        return split_layers.gathered_sequence(scene, hidden, whole=True) if scene.setting.sequence_parallel else hidden

    def logits(scene: Scene, hidden: Tensor) -> Tensor:
        scene.tape.kind = LOGITS
        return family.logits(scene, scene.project(model.head, split_layers.sums_gradient(scene, model.head, hidden)))

    def eager(scene: Scene, inputs: list[Tensor]) -> Tensor:
        if scene.setting.program.drops_logits:
            return of_others(scene, [logits(scene, decoded(scene, inputs))], own_vocab(scene, model.vocab))
        whole = ops.cast(scene.tape, logits(scene, decoded(scene, inputs)), output)
        return token_loss_sum(scene, whole, model.vocab)

    def kernel(scene: Scene, inputs: list[Tensor]) -> Tensor:
        return by_kernel(scene, [logits(scene, decoded(scene, inputs))], own_vocab(scene, model.vocab))

    def chunked(scene: Scene, inputs: list[Tensor]) -> Tensor:
        hidden = decoded(scene, inputs)
        some = trained(scene, hidden)
        total: Tensor | None = None
        sizes, whole = pieces(scene, some.elements, chunk * model.hidden), chunk * model.hidden
        for place, piece in enumerate(ops.split(scene.tape, some, sizes)):
            scene.tape.times = 1 + (some.elements - sum(sizes)) // whole if place == 1 else 1
            loss = scene.tape.checkpointed(partial(summed, scene, logits, piece, model.vocab), scene.setting.device)
            total = loss if total is None else ops.add(scene.tape, total, loss)
            scene.tape.times = 1
        assert total is not None
        return total

    def fused(scene: Scene, inputs: list[Tensor]) -> Tensor:
        hidden = decoded(scene, inputs)
        return liger(scene, trained(scene, hidden), scene.parameter(f"{model.head}.weight"), model.vocab)

    return {"eager": eager, "chunked": chunked, "fused": fused, "kernel": kernel}[loss]


def pieces(scene: Scene, whole: int, most: int) -> list[int]:
    """Return the elements of the pieces of a chunked loss; of many that are alike on a GPU, where each keeps nothing of
    its own, the first two and the last two stand for all."""
    sizes = [min(most, whole - at) for at in range(0, whole, most)]
    return sizes if scene.setting.device == "cpu" or len(sizes) < 5 else [*sizes[:2], *sizes[-2:]]


def token_loss_sum(scene: Scene, logits: Tensor, vocab: int) -> Tensor:
    """`engine.loss.token_loss_sum`: the last position of every row is cut off, which copies unless there is one row."""
    shifted = without_last(scene, logits, vocab)
    return cross_entropy(scene.tape, shifted, vocab)


def without_last(scene: Scene, logits: Tensor, vocab: int) -> Tensor:
    """`logits[:, :-1].reshape(-1, vocab)`."""
    tape, rows = scene.tape, scene.setting.rows
    sliced = ops.part(tape, logits, rows * (scene.setting.length - 1) * vocab)
    return ops.copy(tape, sliced) if rows > 1 else ops.view(tape, sliced)


def summed(scene: Scene, logits: Callable[[Scene, Tensor], Tensor], hidden: Tensor, vocab: int) -> Tensor:
    """The loss of some tokens."""
    return cross_entropy(scene.tape, logits(scene, hidden), vocab)


def cross_entropy(tape: Tape, logits: Tensor, vocab: int) -> Tensor:
    """`F.cross_entropy(logits.float(), targets)`: log-probabilities are kept for backward."""
    return negative_likelihood(tape, ops.by_result(tape, ops.cast(tape, logits, ops.FLOAT)), logits.elements // vocab)


def negative_likelihood(tape: Tape, likely: Tensor, tokens: int) -> Tensor:
    """`nll_loss`: its gradient is as large as the log-probabilities."""
    size, item = likely.elements, likely.item
    node = tape.node((likely,), lambda grad, saved: (tape.new(size, item, reads=tokens * ops.WORD),))
    tape.save(node, likely, tape.new(tokens, ops.WORD))
    return tape.new(1, item, node, reads=tokens * (ops.WORD + item))


def trained(scene: Scene, hidden: Tensor) -> Tensor:
    """The hidden states from which a label is predicted: all but the last of every row."""
    tape, setting, size = scene.tape, scene.setting, hidden.elements
    width, item = size // setting.tokens, hidden.item
    tokens = setting.rows * max(setting.length - 1, 1)
    picked = tokens * width * item

    def derivative(_: Tensor, __: list[Tensor]) -> Grads:
        made = tape.new(size, item, reads=0)
        tape.move(2 * picked)
        return (made,)

    node = tape.node((hidden,), derivative)
    tape.save(node, tape.new(tokens, ops.WORD, reads=tokens * ops.WORD))
    return tape.new(tokens * width, item, node, reads=picked)


def own_vocab(scene: Scene, vocab: int) -> int:
    """Return how many entries of the vocabulary a rank has logits of in the loss."""
    return vocab // scene.setting.tensor if scene.setting.program.parallel_loss else vocab


def of_others(scene: Scene, inputs: list[Tensor], vocab: int) -> Tensor:
    """The loss of transformers 4.

    Logits, turned into fp32 in place of themselves or as they are, are copied without the last position; autocast takes
    the loss in fp32 in any case.

    Args:
        scene: The stage.
        inputs: The logits, the only entry of a list that gives them up.
        vocab: Rows of the embedding.
    """
    tape, program = scene.tape, scene.setting.program
    whole = inputs.pop()
    if program.upcasts_logits:
        whole = ops.cast(tape, whole, ops.FLOAT)
    shifted = without_last(scene, whole, vocab)
    taken = ops.cast(tape, shifted, ops.FLOAT) if program.autocast else shifted
    tokens = taken.elements // vocab
    likely = ops.by_result(tape, taken)
    del shifted, taken
    loss = negative_likelihood(tape, likely, tokens)
    returned_in_fp32(scene, whole)
    return loss


def returned_in_fp32(scene: Scene, logits: Tensor) -> None:
    """accelerate turns what a model under autocast returns into fp32, once the loss is there."""
    if scene.setting.program.autocast and logits.item != ops.FLOAT:
        scene.tape.new(logits.elements, ops.FLOAT, reads=logits.size)


def by_kernel(scene: Scene, inputs: list[Tensor], vocab: int) -> Tensor:
    """Cross entropy as one kernel on whole logits, given up by a list.

    By hand (Unsloth's, FMS's) behind transformers' fp32 logits, or logits as they are, and their copy without the last
    position: gradients take the place of that copy. Compiled, it reads the logits as they are and writes gradients of
    the same dtype.
    """
    tape = scene.tape
    whole = inputs.pop()
    if scene.setting.program.upcasts_logits and not scene.setting.program.compiled:
        whole = ops.cast(tape, whole, ops.FLOAT)
    logits = whole if scene.setting.program.compiled else without_last(scene, whole, vocab)
    size, item, in_place = logits.elements, logits.item, not scene.setting.program.compiled

    def derivative(_: Tensor, saved: list[Tensor]) -> Grads:
        tape.move(2 * size * item)
        return (saved[0] if in_place else tape.new(size, item),)

    node = tape.node((logits,), derivative)
    tape.save(node, logits, tape.new(size // vocab, ops.FLOAT, reads=size * item))
    returned_in_fp32(scene, whole)
    return tape.new(1, ops.FLOAT, node)


def liger(scene: Scene, hidden: Tensor, weight: Tensor, vocab: int) -> Tensor:
    """Liger's linear layer and cross entropy in one: gradients are made in forward, some tokens at a time."""
    tape, size, item, width = scene.tape, hidden.elements, hidden.item, weight.elements // vocab
    tokens = size // width
    pieces = -(-vocab // width)
    piece = 1 << (max(-(-tokens // pieces), 1) - 1).bit_length()

    def derivative(_: Tensor, saved: list[Tensor]) -> Grads:
        for made in saved:
            tape.move(2 * made.size)
        return saved[0], saved[1] if len(saved) > 1 else None

    node = tape.node((hidden, weight), derivative)
    tape.save(node, tape.new(size, item))
    if weight.needs_grad:
        tape.save(node, tape.new(weight.elements, item))
    logits = tape.new(min(piece, tokens) * vocab, item, kind=LOGITS)
    if weight.needs_grad:
        product = tape.new(weight.elements, item)
        wide = tape.new(weight.elements, ops.FLOAT)
        del product, wide
    del logits
    for rows, tape.times in ((piece, tokens // piece), (tokens % piece, 1)):
        if rows and tape.times:
            _liger_piece(tape, rows, width, vocab, item, trains=weight.needs_grad)
    tape.times = 1
    return tape.new(1, ops.FLOAT, node)


def _liger_piece(tape: Tape, rows: int, width: int, vocab: int, item: int, *, trains: bool) -> None:
    """Count what is done for some tokens: logits, their gradient in place of them, what both halves of it give."""
    tape.product(rows, width, vocab, item)
    tape.move(3 * rows * vocab * item)
    tape.product(rows, vocab, width, item)
    if trains:
        tape.product(vocab, rows, width, item)
        tape.move(vocab * width * (item + 2 * ops.FLOAT))
