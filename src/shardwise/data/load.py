"""Read and tokenise one file, and count what happened to its rows."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardwise.data.formats import Example, FormatName, read_examples, recognise, unused_keys
from shardwise.data.read import ProblemList, read_records
from shardwise.data.render import UnstableTemplate
from shardwise.data.rows import Rows, RowsBuilder
from shardwise.data.summary import count, dropped_words
from shardwise.data.tokens import Encoded, Encoder
from shardwise.spec.problems import BadInput, Problem

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """One file, tokenised."""

    path: str
    """The file."""
    format: FormatName
    """How its rows were read."""
    why: str
    """Why so, in words."""
    rows_read: int
    """Rows of the file."""
    rows: Rows
    """Rows that have a token to learn, in file order; at least one."""
    prompts: tuple[str, ...]
    """What `split_by_prompt` tells the rows apart by; as many as `rows`."""
    rows_cut: int
    """Rows that were longer than allowed."""
    tokens_cut: int
    """Tokens that they lost."""
    dropped: dict[str, int]
    """Why rows had nothing to learn -> how many."""
    notes: tuple[str, ...]
    """What else a person should know."""


def load(
    path: str,
    chosen: FormatName | None,
    tokenizer: PreTrainedTokenizerBase,
    *,
    seq_len: int,
    field: str = "data.path",
) -> Loaded:
    """Return the rows of `path`, which the configuration key `field` names, cut to `seq_len` tokens.

    Raises BadInput for whatever cannot be read or does not fit, and when no row has a token to learn.
    """
    records = read_records(path, field=field)
    name, why = recognise(records[0], chosen)
    encoder = Encoder(tokenizer, name, seq_len=seq_len)
    builder, prompts, seen = RowsBuilder(), [], _Seen()
    problems = ProblemList()
    for example in read_examples(records, name):
        encoded = _encode(encoder, example, problems)
        if encoded is None:
            continue
        seen.add(encoded)
        if encoded.row is not None:
            builder.add(encoded.row)
            prompts.append(example.prompt)
    problems.raise_if_any()
    if not prompts:
        why_not = dropped_words(seen.dropped, seq_len)
        reason = f"0 of {count(len(records), 'row')} have a token to learn: {why_not}"
        raise BadInput(Problem(field=field, value=path, reason=reason, fix=_fix(seen.dropped)))
    unused = ", ".join(f"{key} ({count(rows, 'row')})" for key, rows in unused_keys(records, name).items())
    notes = [f"keys not used: {unused}"] if unused else []
    return Loaded(
        path=path,
        format=name,
        why=why,
        rows_read=len(records),
        rows=builder.rows(),
        prompts=tuple(prompts),
        rows_cut=seen.rows_cut,
        tokens_cut=seen.tokens_cut,
        dropped=dict(seen.dropped),
        notes=(*notes, *seen.notes(encoder)),
    )


def _encode(encoder: Encoder, example: Example, problems: ProblemList) -> Encoded | None:
    """Return the encoded example, or None when its problem was added to `problems`."""
    try:
        return encoder.encode(example)
    except UnstableTemplate:
        raise
    except BadInput as error:
        for problem in error.problems:
            problems.add(problem)
    return None


class _Seen:
    """Counts over the rows of one file."""

    def __init__(self) -> None:
        self.dropped: Counter[str] = Counter()
        self.rows_cut = self.tokens_cut = 0
        self.joined = self.unended = self.controls = 0

    def add(self, encoded: Encoded) -> None:
        if encoded.drop is not None:
            self.dropped[encoded.drop] += 1
        self.rows_cut += encoded.cut > 0
        self.tokens_cut += encoded.cut
        self.joined += encoded.joined
        self.unended += encoded.unended
        self.controls += encoded.controls

    def notes(self, encoder: Encoder) -> list[str]:
        """Return what the tokenizer and its template did to the rows, where that is not what one expects."""
        notes = []
        if encoder.bare_prompts:
            notes.append(
                "the tokenizer has no chat template: rows are plain prompt + completion + end-of-sequence token"
            )
        if self.joined:
            notes.append(
                f"in {count(self.joined, 'row')} the tokenizer joins an edge of an answer with what stands beside it; "
                "such a token is learned only when it adds nothing but white space in front"
            )
        if self.unended:
            notes.append(
                f"in {count(self.unended, 'row')} the chat template writes no end-of-turn token after an answer: "
                "the model does not learn where to stop"
            )
        if self.controls:
            notes.append(f"{count(self.controls, 'row')} spell out a special token, which is read as that token")
        return notes


def _fix(dropped: Counter[str]) -> str:
    return "raise seq_len" if dropped["cut before the answer"] else ""
