"""From a row in neutral form to token ids and labels."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Literal

from shardwise.data.formats import Example, FormatName
from shardwise.data.render import Rendered, render_chat, render_plain
from shardwise.data.rows import IGNORED, Row
from shardwise.spec.problems import BadInput, Problem

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Drop = Literal[
    "cut before the answer",
    "with empty answer",
    "with empty text",
    "without an assistant turn",
    "with no token to learn",
]
"""Why a row has no token to learn."""


@dataclass(frozen=True, kw_only=True)
class Encoded:
    """What became of one example."""

    row: Row | None
    """The row, at most `seq_len` tokens; None when it was dropped."""
    drop: Drop | None = None
    """Why it was dropped; None when it was kept."""
    cut: int = 0
    """Tokens lost at the end because the row was longer than `seq_len`."""
    joined: bool = False
    """The tokenizer put characters of an answer and of its surroundings into one token."""
    unended: bool = False
    """The chat template wrote no special token after an answer, so the model does not learn to stop there."""
    controls: bool = False
    """What was said holds the spelling of a special token, which the tokenizer reads as that token."""


class Encoder:
    """Turns the examples of one format into rows, with one tokenizer.

    The whole text of a row is tokenised once, and the offsets of the tokens say which of them lie in a trained range.
    The other way, tokenising each range by itself, gives other ids than a server computes for the same conversation
    wherever a tokenizer looks across the boundary (SentencePiece puts a space in front of every piece of text).

    A token is trained when all its characters are; one that joins white space before an answer with the answer's first
    characters is trained too, any other token across a boundary is not. White space that the template writes after an
    end-of-turn token is not trained either: generation has stopped there.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, name: FormatName, *, seq_len: int) -> None:
        """Raises BadInput when rows of format `name` cannot be tokenised: no offsets, chat template or EOS token."""
        self.tokenizer, self.seq_len = tokenizer, seq_len
        self.plain = name == "text" or (name == "prompt_completion" and not tokenizer.chat_template)
        self.bare_prompts = self.plain and name == "prompt_completion"
        self._check(name)
        special = sorted(str(token) for token in tokenizer.added_tokens_decoder.values() if token.special)
        self._special = tuple(special)
        self._any_special = re.compile("|".join(map(re.escape, special))) if special else None

    def _check(self, name: FormatName) -> None:
        if not self.tokenizer.is_fast:
            reason = "has no offsets (it is not a fast tokenizer), so answers cannot be told from prompts"
            raise BadInput(Problem(field="tokenizer", reason=reason, fix="use a model folder with tokenizer.json"))
        if not self.plain and not self.tokenizer.chat_template:
            reason = f"has no chat template, which {name} rows are written with"
            fix = "use a model with a chat template, or rows of the format prompt_completion or text"
            raise BadInput(Problem(field="tokenizer", reason=reason, fix=fix))
        if self.plain and self.tokenizer.eos_token_id is None:
            reason = f"names no end-of-sequence token, which ends {name} rows"
            raise BadInput(Problem(field="tokenizer", reason=reason, fix="set eos_token in tokenizer_config.json"))

    def encode(self, example: Example) -> Encoded:
        """Return the row of `example`, cut to `seq_len` tokens, or why it has nothing to learn.

        Raises BadInput for a conversation that the chat template refuses or cannot split into turns.
        """
        empty = _nothing_said(example)
        if empty is not None:
            return Encoded(row=None, drop=empty)
        rendered = render_plain(example) if self.plain else render_chat(example, self.tokenizer)
        trained, ended = self._without_tail(rendered)
        ids, labels, joined = self._label(rendered, trained)
        cut = max(0, len(ids) - self.seq_len)
        row = Row(input_ids=ids[: self.seq_len], labels=labels[: self.seq_len])
        drop: Drop | None = None
        if not row.trained_tokens:
            lost = any(label != IGNORED for label in labels[1:])
            drop = "cut before the answer" if lost else "with no token to learn"
        return Encoded(
            row=row if drop is None else None,
            drop=drop,
            cut=cut,
            joined=joined,
            unended=rendered.complete and not ended,
            controls=rendered.complete and self._says_special(example),
        )

    def _without_tail(self, rendered: Rendered) -> tuple[list[tuple[int, int]], bool]:
        """Return the trained ranges without white space after an end-of-turn token, and whether all have that token."""
        ranges, ended = [], True
        for start, stop in rendered.trained:
            said = rendered.text[start:stop].rstrip()
            has_end = rendered.complete and said.endswith(self._special) if self._special else False
            ranges.append((start, start + len(said) if has_end else stop))
            ended = ended and has_end
        return ranges, ended

    def _label(self, rendered: Rendered, trained: Sequence[tuple[int, int]]) -> tuple[list[int], list[int], bool]:
        """Return ids, labels, and whether a token lies across the edge of a trained range."""
        text, eos, bos = rendered.text, self.tokenizer.eos_token_id, self.tokenizer.bos_token
        starts_itself = rendered.complete or bool(bos and text.startswith(bos))
        encoded = self.tokenizer(
            text, add_special_tokens=not starts_itself, return_offsets_mapping=True, truncation=False, verbose=False
        )
        ids: list[int] = list(encoded["input_ids"])
        inside = bytearray(len(text))
        for start, stop in trained:
            inside[start:stop] = b"\1" * (stop - start)
        judged = [_judge(text, inside, *span) for span in _untrimmed(text, encoded["offset_mapping"])]
        labels = [token if trains else IGNORED for token, (trains, _) in zip(ids, judged, strict=True)]
        if not rendered.complete:
            if ids[-1:] != [eos]:
                ids, labels = [*ids, eos], [*labels, IGNORED]
            labels[-1] = eos
        return ids, labels, any(across for _, across in judged)

    def _says_special(self, example: Example) -> bool:
        return self._any_special is not None and any(self._any_special.search(turn.content) for turn in example.turns)


def _untrimmed(text: str, offsets: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the offsets with the spaces in front of a token that byte-level tokenizers leave out of them."""
    spans, end = [], 0
    for start, stop in offsets:
        gap = text[end:start]
        spans.append((end if gap and not gap.strip(" ") else start, stop))
        end = max(end, stop)
    return spans


def _judge(text: str, inside: bytearray, start: int, stop: int) -> tuple[bool, bool]:
    """Return whether the token of characters [start, stop) is trained, and whether it lies across an edge.

    `inside` has a 1 for each trained character. A token that stands for no character (an added BOS) is not trained.
    """
    marks = inside[start:stop]
    if len(set(marks)) < 2:
        return any(marks), False
    core = text[start:stop].lstrip()
    return bool(core) and all(inside[stop - len(core) : stop]), True


def _nothing_said(example: Example) -> Drop | None:
    """Return why `example` has no words to learn, or None when it has."""
    if example.text is not None:
        return None if example.text.strip() else "with empty text"
    if any(turn.trained for turn in example.turns):
        return None
    answered = any(turn.role == "assistant" for turn in example.turns)
    return "with empty answer" if answered else "without an assistant turn"


def trained_text(row: Row, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Return the text of each run of trained tokens, special tokens included, for a person to check."""
    runs = groupby(zip(row.input_ids, row.labels, strict=True), key=lambda pair: pair[1] != IGNORED)
    return [str(tokenizer.decode([token for token, _ in run])) for trains, run in runs if trains]


def pad_token_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the id that fills rows up: the tokenizer's pad token, else its end-of-sequence token.

    Which one does not matter to the loss: labels come with the row and are never found by comparing with this id.
    Raises BadInput when the tokenizer names neither.
    """
    for token in (tokenizer.pad_token_id, tokenizer.eos_token_id):
        if token is not None:
            return int(token)
    fix = "set pad_token in tokenizer_config.json"
    raise BadInput(Problem(field="tokenizer", reason="names neither a pad nor an end-of-sequence token", fix=fix))
