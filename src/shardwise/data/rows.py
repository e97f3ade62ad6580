"""Tokenised rows in an Arrow file that is memory-mapped, so that a large set costs no memory."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from shardwise.spec.problems import BadInput, Problem

IGNORED = -100
"""Label of a token that is not trained."""

_SCHEMA = pa.schema([("input_ids", pa.list_(pa.int32())), ("labels", pa.list_(pa.int32()))])
_CHUNK = 1024


@dataclass(frozen=True, kw_only=True)
class Row:
    """One tokenised row."""

    input_ids: list[int]
    """Token ids."""
    labels: list[int]
    """As long as `input_ids` and aligned with it (not shifted): the token's own id, or `IGNORED`."""

    @property
    def trained_tokens(self) -> int:
        """Labels that the loss uses; the first never is, as the loss shifts by one."""
        return sum(label != IGNORED for label in self.labels[1:])


class Rows:
    """Rows by index, in memory or mapped from a file."""

    def __init__(self, table: pa.Table) -> None:
        self._table = table
        self._ids = table.column("input_ids")
        self._labels = table.column("labels")

    @classmethod
    def from_rows(cls, rows: Iterator[Row] | Sequence[Row]) -> Rows:
        """Return `rows` (none of them empty) as a compact table."""
        builder = RowsBuilder()
        for row in rows:
            builder.add(row)
        return builder.rows()

    @classmethod
    def open(cls, path: str | Path) -> Rows:
        """Map the file that `write` wrote. Raises BadInput when it is missing, damaged or something else."""
        try:
            table = pa.ipc.open_file(pa.memory_map(str(path))).read_all()
        except (OSError, pa.ArrowInvalid) as error:
            reason = f"cannot be read as prepared rows: {str(error).splitlines()[0]}"
            raise BadInput(Problem(field=str(path), reason=reason, fix="prepare the data again")) from error
        if table.schema != _SCHEMA:
            reason = f"has columns {', '.join(table.schema.names)}, not those of prepared rows"
            raise BadInput(Problem(field=str(path), reason=reason, fix="prepare the data again"))
        return cls(table)

    def write(self, path: str | Path) -> None:
        """Write an Arrow IPC file; `path` changes only when the whole file is on disk."""
        part = Path(f"{path}.part")
        with part.open("wb") as sink:
            with pa.ipc.new_file(sink, _SCHEMA) as writer:
                writer.write_table(self._table, max_chunksize=_CHUNK)
            sink.flush()
            os.fsync(sink.fileno())
        part.replace(path)

    def digest(self) -> str:
        """Return a hash of all rows, ids and labels."""
        found = hashlib.sha256()
        for column in (self._ids, self._labels):
            for chunk in column.chunks:
                found.update(chunk.flatten().to_numpy(zero_copy_only=False).tobytes())
                found.update(chunk.value_lengths().to_numpy(zero_copy_only=False).tobytes())
        return found.hexdigest()

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def __getitem__(self, index: int) -> Row:
        return Row(input_ids=self._ids[index].as_py(), labels=self._labels[index].as_py())

    def __iter__(self) -> Iterator[Row]:
        return (self[index] for index in range(len(self)))

    def take(self, indices: Sequence[int]) -> Rows:
        """Return the rows at `indices`, in that order."""
        return Rows(self._table.take(pa.array(indices, pa.int64())))

    @cached_property
    def trained_tokens(self) -> int:
        """Labels that the loss uses, over all rows (a row's first label is never used)."""
        count = 0
        for chunk in self._labels.chunks:
            count += _sum(pc.not_equal(chunk.flatten(), IGNORED))
            count -= _sum(pc.not_equal(pc.list_element(chunk, 0), IGNORED))
        return count

    @cached_property
    def tokens(self) -> int:
        """Tokens of all rows."""
        return _sum(pc.list_value_length(self._ids))

    @cached_property
    def longest(self) -> int:
        """Tokens of the longest row; 0 without rows."""
        return int(pc.max(pc.list_value_length(self._ids)).as_py() or 0)

    @cached_property
    def largest_id(self) -> int:
        """Largest token id; -1 without rows."""
        return max((pc.max(chunk.flatten()).as_py() for chunk in self._ids.chunks if len(chunk)), default=-1)


class RowsBuilder:
    """Packs rows into compact chunks while they are made."""

    def __init__(self) -> None:
        self._batches: list[pa.RecordBatch] = []
        self._pending: list[Row] = []

    def add(self, row: Row) -> None:
        """Append `row`, which must have a token."""
        if not row.input_ids or len(row.input_ids) != len(row.labels):
            raise ValueError(f"a row of {len(row.input_ids)} tokens and {len(row.labels)} labels")
        self._pending.append(row)
        if len(self._pending) >= _CHUNK:
            self._flush()

    def rows(self) -> Rows:
        """Return what was added."""
        self._flush()
        return Rows(pa.Table.from_batches(self._batches, _SCHEMA))

    def _flush(self) -> None:
        if self._pending:
            columns = [[row.input_ids for row in self._pending], [row.labels for row in self._pending]]
            arrays = [pa.array(column, pa.list_(pa.int32())) for column in columns]
            self._batches.append(pa.RecordBatch.from_arrays(arrays, schema=_SCHEMA))
            self._pending = []


def _sum(values: pa.Array) -> int:
    return int(pc.sum(values).as_py() or 0)
