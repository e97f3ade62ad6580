"""The instants of each phase at which memory may be highest, read from top to bottom as a step runs.

Between the ends of a run of like blocks live bytes are linear in the number of the block, so its highest instant is at
one of the ends, or where gathers ahead and held reductions set in.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from shardwise.predict.blocks import Live as Computed
from shardwise.predict.terms.instants import ROOT, At, Moment
from shardwise.predict.terms.step import Step
from shardwise.spec.footprint import Phase


class Candidate(NamedTuple):
    """One instant, with what the computation holds."""

    phase: Phase
    """Phase of the step."""
    at: At
    """For the terms of sharding."""
    kept: int
    """Bytes that parts before this one keep, and tables for all."""
    computed: Computed
    """What the part at work holds."""
    waiting: int = 0
    """Bytes of its input or of a gradient that wait, where it is not at work yet, or no more."""


NOTHING = Computed()

NORMED = 4
"""Hidden states that are there when the last norm is done: its input, the same in fp32, and its output; one less where
it is frozen."""


def candidates(step: Step) -> Iterator[Candidate]:
    """Yield the instants of training, and of evaluation where there is one; loading and saving hold shards alone."""
    yield from forward(step)
    yield from loss(step)
    yield from backward(step)
    yield from end_of_backward(step)
    yield Candidate("optimizer_step", At("step"), 0, NOTHING)
    if step.held_out:
        yield from evaluation(step)


def forward(step: Step) -> Iterator[Candidate]:
    """Weights arrive while the part's input waits; then it computes."""
    sharding, parts = step.sharding, step.parts
    yield Candidate("forward", At("arrival", ROOT), 0, NOTHING)
    embeds = 0 if sharding.first_block else ROOT
    if sharding.first_block:
        yield Candidate("forward", At("arrival", embeds), 0, NOTHING)
    yield Candidate("forward", At("forward", embeds), 0, parts.ends.embedding.forward)
    for_all = parts.ends.shared + parts.ends.in_forward
    for block in _last_of_each(step):
        place = sharding.first_block + block
        kept = for_all + parts.kept[block] + parts.travelling(block) + parts.carried(block)
        yield Candidate("forward", At("arrival", place), kept, NOTHING, parts.entering(block))
        yield Candidate("forward", At("forward", place), kept, parts.blocks[block].forward)
    if sharding.facts.own_head:
        place = len(sharding.facts.units) - 1
        kept = parts.ends.shared + parts.kept[-1] + parts.travelling(len(parts.blocks))
        normed = NORMED if sharding.facts.head_gradient else NORMED - 1
        yield Candidate("forward", At("arrival", place), kept, NOTHING, normed * parts.entering(len(parts.blocks)))


def loss(step: Step) -> Iterator[Candidate]:
    """Whole logits become a loss outside the root's forward; a loss in pieces is made inside it."""
    parts, head = step.parts, step.parts.ends.head
    kept = parts.ends.shared + parts.kept[-1] + parts.travelling(len(parts.blocks))
    if step.plan.loss_head != "eager":
        yield Candidate("forward", At("head"), kept, head.forward)
        yield Candidate("backward", At("head_backward"), kept, head.backward)
        return
    yield from _whole_logits(step, kept)
    yield Candidate("forward", At("loss"), kept, head.forward)
    # Before the gradient of whole logits is there, FSDP2 does not know of a backward and gathers nothing ahead.
    moment: Moment = "head_backward" if head.backward.gradients else "loss"
    yield Candidate("backward", At(moment), kept, head.backward)


def _whole_logits(step: Step, kept: int) -> Iterator[Candidate]:
    """Logits, or their gradient, while the buffers of gathers are there, which they are not around the loss.

    The last one in forward is held by a local variable of `_post_forward` until logits have been cast.
    """
    parts = step.parts
    entering = parts.entering(len(parts.blocks))
    made = Computed(activations=NORMED * entering, logits=parts.logits)
    yield Candidate("forward", At("head"), kept, made)
    gradient = step.sharding.facts.head_gradient
    undone = Computed(activations=2 * entering, temporaries=entering, logits=parts.logits_gradient, gradients=gradient)
    yield Candidate("backward", At("head_backward"), kept, undone)


def backward(step: Step) -> Iterator[Candidate]:
    """Weights return while the gradient of the block's output waits; it computes; its gradients are reduced."""
    sharding, parts = step.sharding, step.parts
    shared = parts.ends.shared
    if sharding.facts.own_head:
        place, gradient = len(sharding.facts.units) - 1, parts.ends.head.input_gradient
        yield from _reduced(place, shared + parts.kept[-1] + parts.travelling(len(parts.blocks)), gradient)
    for block in _ends_of_each(step):
        part, place = parts.blocks[block], sharding.first_block + block
        kept = shared + parts.kept[block] + parts.travelling(block)
        whole = shared + parts.kept[block] + part.kept + part.travelling
        yield Candidate("backward", At("return", place), whole, NOTHING, part.output)
        yield Candidate("backward", At("backward", place), kept, part.backward)
        if place != sharding.facts.late:
            yield from _reduced(place, kept, part.input_gradient)


def _reduced(place: int, kept: int, gradient: int) -> Iterator[Candidate]:
    """The gradients of a unit are reduced while the gradient that it hands down waits."""
    yield Candidate("backward", At("reduction", place), kept, NOTHING, gradient)
    yield Candidate("backward", At("reduced", place), kept, NOTHING, gradient)


def end_of_backward(step: Step) -> Iterator[Candidate]:
    """The embedding's gradient; then the root's reduction, and that of a unit whose end FSDP2 learns last."""
    sharding, late = step.sharding, step.sharding.facts.late
    embeds = 0 if sharding.first_block else ROOT
    if embeds == ROOT or sharding.facts.units[embeds].has_backward:
        yield from _embedding_backward(step, embeds)
    yield from _reduced(ROOT, 0, 0)
    if late is not None:
        yield from _reduced(late, 0, 0)


def _embedding_backward(step: Step, place: int) -> Iterator[Candidate]:
    """The embedding's gradient, and where the head's waits for it their sum, unless that of several pieces of the loss
    is a sum already, to which autograd adds."""
    facts, plan = step.sharding.facts, step.plan
    computed = step.parts.ends.embedding.backward
    if facts.tied_gradient and plan.mesh.tensor > 1:  # the sum of a part and a whole is not yet this rank's part
        passing = computed.gradients - facts.embedding_gradient
        computed = replace(computed, temporaries=computed.temporaries + passing, gradients=facts.embedding_gradient)
    elif facts.tied_gradient and step.parts.pieces > 1:
        computed = replace(computed, gradients=0)
    yield Candidate("backward", At("backward", place), 0, computed)
    if facts.whole_embedding and plan.accumulation_mode != "defer_all":  # FSDP2 takes this rank's part of it
        taken = Computed(gradients=facts.whole_embedding + 2 * facts.embedding_gradient)
        yield Candidate("backward", At("backward", place), 0, taken)
    if plan.accumulation_mode == "defer_all" and plan.accumulation_steps > 2:
        yield Candidate("backward", At("deferred", place), 0, computed)


def evaluation(step: Step) -> Iterator[Candidate]:
    """A forward that keeps nothing, of more rows, after a step whose gradients are still there."""
    sharding, blocks, ends = step.sharding, step.parts.evaluated, step.parts.evaluated_ends
    kept = ends.in_evaluation
    yield Candidate("evaluation", At("arrival", ROOT, True), 0, NOTHING)
    if sharding.first_block:
        yield Candidate("evaluation", At("arrival", 0, True), 0, NOTHING)
    yield Candidate(
        "evaluation", At("forward", 0 if sharding.first_block else ROOT, True), 0, ends.embedding.evaluation
    )
    for block in _last_of_each(step):
        place = sharding.first_block + block
        held = kept + (ends.carried if block else 0)
        entering = blocks[block - 1].output if block else ends.embedding.output
        yield Candidate("evaluation", At("arrival", place, True), held, NOTHING, entering)
        yield Candidate("evaluation", At("forward", place, True), held, blocks[block].evaluation)
    if sharding.facts.own_head:
        place = len(sharding.facts.units) - 1
        yield Candidate("evaluation", At("arrival", place, True), kept, NOTHING, blocks[-1].output)
    whole = step.plan.loss_head == "eager"
    # The decoder has returned: tables, masks and what its variables held are gone.
    yield Candidate("evaluation", At("loss" if whole else "head", ROOT, True), 0, ends.head.evaluation)
    if whole:
        made = Computed(logits=step.parts.evaluated_logits)
        yield Candidate("evaluation", At("head", ROOT, True), 0, made, 2 * blocks[-1].output)


def _last_of_each(step: Step) -> Iterator[int]:
    """Yield the last block of each kind, and the last from which as many units as may be are gathered ahead; and the
    first of all, at whose arrival the buffer of the unit before, perhaps the root's, is still held."""
    ahead, count = step.plan.prefetch.forward, len(step.parts.blocks)
    yield 0
    for blocks in step.sharding.alike:
        if blocks[-1]:
            yield blocks[-1]
        if ahead:
            before = [block for block in blocks if block + ahead < count]
            if before and before[-1]:
                yield before[-1]


def _ends_of_each(step: Step) -> Iterator[int]:
    """Yield, of each kind of block, those where its run begins in backward, is in full swing, and ends.

    In full swing are the first with as many of its kind behind it as reductions are held, and the last with as many
    before it as are gathered ahead.
    """
    held, ahead = step.plan.reduce_scatter.buffers, step.plan.prefetch.backward
    for blocks in step.sharding.alike:
        last = len(blocks) - 1
        yield from {blocks[place] for place in (last, max(0, last - held), min(last, ahead), 0)}
