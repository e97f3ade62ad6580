"""What was read, kept, cut and dropped, for a person to read before a run and for the run folder."""

from __future__ import annotations

from shardwise.data.formats import FormatName
from shardwise.spec.strict import Strict


class DataSummary(Strict):
    """Counts of one preparation. Tokens that are learned are labels that the loss uses."""

    path: str
    """The data file."""
    format: FormatName
    """How its rows were read."""
    why: str
    """Why so, in words."""
    seq_len: int
    """Longest row allowed, in tokens."""
    rows_read: int
    """Rows of the file."""
    rows_kept: int
    """Rows of the file that are trained on or held out."""
    rows_cut: int
    """Rows that were longer than `seq_len` and lost their end; those that lost all they had to learn are in `dropped`
    too."""
    tokens_cut: int
    """Tokens that those rows lost."""
    dropped: dict[str, int]
    """Why rows had nothing to learn -> how many."""
    train_rows: int
    """Rows trained on."""
    tokens: int
    """Tokens of the training rows."""
    trained_tokens: int
    """Tokens of the training rows that are learned."""
    longest_row: int
    """Tokens of the longest training row."""
    held_out_path: str | None = None
    """The second file, when held-out rows come from one."""
    held_out_rows: int = 0
    """Rows held out."""
    held_out_tokens: int = 0
    """Tokens of the held-out rows that the loss uses."""
    notes: tuple[str, ...] = ()
    """What else a person should know."""

    def lines(self) -> list[str]:
        """Return plain sentences with the counts, most important first."""
        lines = [f"{self.path}: {count(self.rows_read, 'row')}, {self.why}"]
        lines.append(
            f"train: {count(self.train_rows, 'row')}, {count(self.tokens, 'token')}, of which "
            f"{self.trained_tokens:,} are learned; longest row {count(self.longest_row, 'token')}"
        )
        if self.held_out_rows:
            source = self.held_out_path or "split off by prompt"
            held = f"{count(self.held_out_rows, 'row')}, {count(self.held_out_tokens, 'token')} to predict"
            lines.append(f"held out: {held} ({source})")
        else:
            lines.append("held out: no rows")
        if self.rows_cut:
            lines.append(f"cut: {cut_words(self.rows_cut, self.tokens_cut, self.seq_len)}")
        if self.dropped:
            lines.append(f"dropped: {dropped_words(self.dropped, self.seq_len)}")
        return lines + [f"note: {note}" for note in self.notes]


def count(number: int, noun: str) -> str:
    """Return "1 row" or "1,503 rows"."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def cut_words(rows: int, tokens: int, seq_len: int) -> str:
    """Return how much was cut, in words."""
    return f"{count(rows, 'row')} longer than seq_len {seq_len} lost {count(tokens, 'token')} at the end"


def dropped_words(dropped: dict[str, int], seq_len: int) -> str:
    """Return "9 cut before the answer at seq_len 32, 3 with empty answer"."""
    at = {"cut before the answer": f" at seq_len {seq_len}"}
    return ", ".join(f"{number:,} {why}{at.get(why, '')}" for why, number in sorted(dropped.items()))
