"""Prepare a data set: read, recognise, tokenise, split, and write it where every rank can map it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from shardwise.data.load import Loaded, load
from shardwise.data.rows import Row, Rows
from shardwise.data.split import split_by_prompt
from shardwise.data.summary import DataSummary, count, cut_words, dropped_words
from shardwise.data.tokens import pad_token_id
from shardwise.spec.job import DataChoice
from shardwise.spec.problems import BadInput, Problem

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["DataSummary", "PreparedData", "Row", "Rows", "prepare"]

TRAIN_FILE = "train.arrow"
"""Name of the file of training rows."""
HELD_OUT_FILE = "held_out.arrow"
"""Name of the file of held-out rows."""
SUMMARY_FILE = "summary.json"
"""Name of the file with the counts."""


@dataclass(frozen=True, kw_only=True)
class PreparedData:
    """Rows ready to be trained on."""

    train: Rows
    """Rows trained on, at least one."""
    held_out: Rows | None
    """Rows never trained on, at least one; None when none were asked for."""
    summary: DataSummary
    """What was read, kept, cut and dropped."""

    def write(self, folder: str | Path) -> None:
        """Write `train.arrow`, `held_out.arrow` (when there is one) and `summary.json`; each appears whole or not."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        self.train.write(folder / TRAIN_FILE)
        if self.held_out is None:
            (folder / HELD_OUT_FILE).unlink(missing_ok=True)
        else:
            self.held_out.write(folder / HELD_OUT_FILE)
        part = folder / f"{SUMMARY_FILE}.part"
        part.write_text(self.summary.model_dump_json(indent=2) + "\n", encoding="utf-8")
        part.replace(folder / SUMMARY_FILE)


def prepare(
    choice: DataChoice, tokenizer: PreTrainedTokenizerBase, *, seq_len: int, seed: int, vocab_size: int | None = None
) -> PreparedData:
    """Return the rows of `choice` as token ids and labels, at most `seq_len` tokens each.

    `seed` decides which prompts a held-out fraction takes. `vocab_size` is the number of rows of the model's embedding;
    when given, every id must be below it. Raises BadInput for whatever cannot be read, does not fit, or leaves nothing
    to learn.
    """
    source = load(choice.path, choice.format, tokenizer, seq_len=seq_len)
    train, held_out, notes = source.rows, None, list(source.notes)
    if isinstance(choice.held_out, str):
        other = _held_out_file(choice, choice.held_out, tokenizer, seq_len=seq_len)
        held_out = other.rows
        notes += _second_file_notes(source, other, seq_len)
    elif choice.held_out is not None:
        trained, held = split_by_prompt(source.prompts, fraction=choice.held_out, seed=seed)
        train, held_out = source.rows.take(trained), source.rows.take(held)
    if vocab_size is not None:
        largest = max(rows.largest_id for rows in (source.rows, held_out) if rows is not None)
        notes += _check_ids(tokenizer, largest, vocab_size)
    summary = DataSummary(
        path=choice.path,
        format=source.format,
        why=source.why,
        seq_len=seq_len,
        rows_read=source.rows_read,
        rows_kept=len(source.rows),
        rows_cut=source.rows_cut,
        tokens_cut=source.tokens_cut,
        dropped=source.dropped,
        train_rows=len(train),
        tokens=train.tokens,
        trained_tokens=train.trained_tokens,
        longest_row=train.longest,
        held_out_path=choice.held_out if isinstance(choice.held_out, str) else None,
        held_out_rows=len(held_out) if held_out is not None else 0,
        held_out_tokens=held_out.trained_tokens if held_out is not None else 0,
        notes=tuple(notes),
    )
    return PreparedData(train=train, held_out=held_out, summary=summary)


def _held_out_file(choice: DataChoice, path: str, tokenizer: PreTrainedTokenizerBase, *, seq_len: int) -> Loaded:
    """Load the second file. Raises BadInput when it is the first."""
    first, second = Path(choice.path).expanduser(), Path(path).expanduser()
    if first.exists() and second.exists() and first.samefile(second):
        fix = "name another file, or a fraction such as 0.1"
        raise BadInput(Problem(field="data.held_out", value=path, reason="is the file that is trained on", fix=fix))
    return load(path, choice.format, tokenizer, seq_len=seq_len, field="data.held_out")


def _second_file_notes(source: Loaded, other: Loaded, seq_len: int) -> list[str]:
    """Say how the second file was read, and how far it repeats the first."""
    notes = [f"{other.path}: {count(other.rows_read, 'row')}, {other.why}"]
    if other.rows_cut:
        notes.append(f"{other.path}: {cut_words(other.rows_cut, other.tokens_cut, seq_len)}")
    if other.dropped:
        notes.append(f"{other.path}: dropped {dropped_words(other.dropped, seq_len)}")
    notes += [f"{other.path}: {note}" for note in other.notes if note not in source.notes]
    trained = set(source.prompts)
    if shared := sum(prompt in trained for prompt in other.prompts):
        notes.append(f"{other.path}: {count(shared, 'row')} of {len(other.rows)} have a prompt that is trained on too")
    return notes


def _check_ids(tokenizer: PreTrainedTokenizerBase, largest: int, vocab_size: int) -> list[str]:
    """Refuse ids that the embedding does not have; return a note when only unused ones are beyond it."""
    tokens = len(tokenizer)
    largest = max(largest, pad_token_id(tokenizer))
    if largest >= vocab_size:
        text = tokenizer.convert_ids_to_tokens(largest)
        reason = f"has {tokens} tokens and the model's embedding {vocab_size} rows; token {text!r} needs row {largest}"
        fix = "use the tokenizer that came with the model, or a pad_token that the model has"
        raise BadInput(Problem(field="tokenizer", reason=reason, fix=fix))
    if tokens > vocab_size:
        return [
            f"the tokenizer has {tokens} tokens and the model's embedding {vocab_size} rows; no row needs the others"
        ]
    return []
