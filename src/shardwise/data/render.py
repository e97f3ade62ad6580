"""From a conversation to text, with the places in it that the assistant says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from jinja2 import TemplateError

from shardwise.data.formats import Example, Turn
from shardwise.spec.problems import BadInput, Problem

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, kw_only=True)
class Rendered:
    """The text of one row before it is tokenised."""

    text: str
    """All of it."""
    trained: tuple[tuple[int, int], ...]
    """Half-open ranges of characters that are trained, in order, not overlapping."""
    complete: bool
    """The text holds its own BOS and end-of-turn tokens (a chat template wrote them), so none are added."""


def render_plain(example: Example) -> Rendered:
    """Return plain text (all trained), or prompt and completion one after the other (the completion trained)."""
    if example.text is not None:
        return Rendered(text=example.text, trained=((0, len(example.text)),), complete=False)
    asked, answer = (turn.content for turn in example.turns)
    return Rendered(text=asked + answer, trained=((len(asked), len(asked + answer)),), complete=False)


def render_chat(example: Example, tokenizer: PreTrainedTokenizerBase) -> Rendered:
    """Return the conversation as the tokenizer's chat template writes it, with the ranges of its trained turns.

    A template does not say which characters belong to which turn, so each trained turn is found by rendering the
    conversation up to before it (with the generation prompt, as a server would) and up to after it: what lies between
    is what the model has to say, end-of-turn token included. That holds only while each rendering begins with the one
    before it. Raises BadInput naming the row when it does not, when a turn is not written whole, or when the template
    refuses the conversation.
    """
    turns, place, text, ranges, done = example.turns, example.place, "", [], 0
    for number, turn in enumerate(turns, 1):
        if not turn.trained:
            continue
        before = _apply(turns[: number - 1], tokenizer, place, answer_next=True)
        _check(before.startswith(text), place, f"what it wrote up to turn {done} changes when more turns follow")
        text = _apply(turns[:number], tokenizer, place)
        _check(text.startswith(before), place, f"it does not write turn {number} after its own generation prompt")
        whole = turn.content.strip() in text[len(before) :]
        _check(whole, place, f"it does not write the whole answer in turn {number}")
        ranges.append((len(before), len(text)))
        done = number
    everything = text if done == len(turns) else _apply(turns, tokenizer, place)
    _check(everything.startswith(text), place, f"what it wrote up to turn {done} changes when more turns follow")
    return Rendered(text=everything, trained=tuple(ranges), complete=True)


def _apply(turns: Sequence[Turn], tokenizer: PreTrainedTokenizerBase, place: str, *, answer_next: bool = False) -> str:
    """Return `turns` as text; with `answer_next`, up to where the assistant's answer begins."""
    messages = [{"role": turn.role, "content": turn.content} for turn in turns]
    try:
        return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=answer_next))
    except (TemplateError, TypeError, ValueError) as error:
        raise BadInput(Problem(field=place, reason=f"the chat template refuses this conversation: {error}")) from error


class UnstableTemplate(BadInput):
    """The chat template cannot be split into turns; true of the template rather than of one row."""


def _check(holds: bool, place: str, reason: str) -> None:
    if not holds:
        reason = f"the chat template cannot be used for training: {reason}"
        fix = "use a chat template that writes every turn the same way wherever it stands, or rows with one answer"
        raise UnstableTemplate(Problem(field=place, reason=reason, fix=fix))
