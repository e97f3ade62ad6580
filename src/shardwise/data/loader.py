"""From prepared rows to the micro-batches of one rank, in an order that only seed and epoch decide."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch

from shardwise.data.rows import IGNORED, Row, Rows
from shardwise.data.tokens import pad_token_id

__all__ = ["Batch", "HeldOutBatches", "TrainBatches", "collate", "pad_token_id"]


@dataclass(frozen=True, kw_only=True)
class Batch:
    """One micro-batch, right-padded to its longest row; int64 tensors of shape [rows, length]."""

    input_ids: torch.Tensor
    """Token ids; the pad id behind a row's end."""
    attention_mask: torch.Tensor
    """1 for a row's tokens, 0 behind its end; every row has a 1 (attention over nothing is NaN)."""
    labels: torch.Tensor
    """Aligned with `input_ids`, not shifted; -100 where nothing is learned."""

    @property
    def trained_tokens(self) -> int:
        """Labels that the loss uses; the first of a row never is. Waits for the device when that is a GPU."""
        return int((self.labels[:, 1:] != IGNORED).sum().item())

    @property
    def tokens(self) -> int:
        """Tokens of rows; neither padding nor rows of padding count."""
        lengths = self.attention_mask.sum(dim=1)
        return int(lengths[lengths > 1].sum().item())

    def to(self, device: torch.device | str) -> Batch:
        """Return the batch on `device`."""
        return Batch(
            input_ids=self.input_ids.to(device),
            attention_mask=self.attention_mask.to(device),
            labels=self.labels.to(device),
        )


def collate(rows: Sequence[Row | None], pad_id: int) -> Batch:
    """Return `rows` as one batch; None makes a row of one pad token that is attended to and teaches nothing."""
    length = max(len(row.input_ids) if row is not None else 1 for row in rows)
    input_ids = torch.full((len(rows), length), pad_id, dtype=torch.int64)
    attention_mask = torch.zeros((len(rows), length), dtype=torch.int64)
    labels = torch.full((len(rows), length), IGNORED, dtype=torch.int64)
    for index, row in enumerate(rows):
        size = len(row.input_ids) if row is not None else 1
        attention_mask[index, :size] = 1
        if row is not None:
            input_ids[index, :size] = torch.tensor(row.input_ids, dtype=torch.int64)
            labels[index, :size] = torch.tensor(row.labels, dtype=torch.int64)
    return Batch(input_ids=input_ids, attention_mask=attention_mask, labels=labels)


class TrainBatches:
    """The micro-batches of one rank.

    Position: the number of rows taken by all ranks since the start, `epoch * len(rows) + index`. It does not depend on
    how many ranks or micro-batches there are, so a run that resumes with another layout repeats and skips nothing.

    Order: each epoch is a permutation of the rows made from `seed` and the epoch's number alone. A global batch is the
    next `global_batch` rows of it, laid out as [micro-batch m][rank r][row i]: row i of micro-batch m on rank r is row
    `(m * data_ranks + r) * micro_batch + i` of the global batch, which therefore holds the same rows in every layout.
    The last global batch of an epoch is filled up with rows that teach nothing, so every rank has the same number of
    micro-batches in every step. The mean loss must be taken over trained tokens, never over rows or micro-batches.
    """

    def __init__(
        self,
        rows: Rows | Sequence[Row],
        *,
        seed: int,
        global_batch: int,
        micro_batch: int,
        rank: int,
        data_ranks: int,
        pad_id: int,
    ) -> None:
        """Raises ValueError without rows, or when `global_batch` is no multiple of what all ranks take at once."""
        _check_layout(micro_batch, rank, data_ranks)
        if not len(rows):
            raise ValueError("there are no rows to train on")
        if global_batch < 1 or global_batch % (micro_batch * data_ranks):
            raise ValueError(
                f"global_batch {global_batch} is not a multiple of {micro_batch} rows x {data_ranks} ranks"
            )
        self.rows, self.seed, self.pad_id = rows, seed, pad_id
        self.global_batch, self.micro_batch = global_batch, micro_batch
        self.rank, self.data_ranks = rank, data_ranks

    @property
    def steps_per_epoch(self) -> int:
        """Global batches in one epoch, the last one perhaps filled up."""
        return -(-len(self.rows) // self.global_batch)

    @property
    def accumulation_steps(self) -> int:
        """Micro-batches of each rank in one global batch."""
        return self.global_batch // (self.micro_batch * self.data_ranks)

    def micro_batches(self, samples_seen: int) -> list[Batch]:
        """Return this rank's micro-batches of the global batch that starts at position `samples_seen`."""
        epoch, start = divmod(samples_seen, len(self.rows))
        chosen = _order(self.seed, epoch, len(self.rows))[start : start + self.global_batch]
        return [
            collate(_part(self.rows, chosen, m, self.micro_batch, self.rank, self.data_ranks), self.pad_id)
            for m in range(self.accumulation_steps)
        ]

    def row_numbers(self, samples_seen: int, micro_batch: int, rank: int) -> list[int]:
        """Return which training rows (from 0) a data rank's micro-batch holds in the global batch at a position."""
        epoch, start = divmod(samples_seen, len(self.rows))
        chosen = _order(self.seed, epoch, len(self.rows))[start : start + self.global_batch]
        first = (micro_batch * self.data_ranks + rank) * self.micro_batch
        return list(chosen[first : first + self.micro_batch])

    def next_position(self, samples_seen: int) -> int:
        """Return the position after the global batch that starts at `samples_seen`; never beyond its epoch's end."""
        epoch, start = divmod(samples_seen, len(self.rows))
        return epoch * len(self.rows) + min(start + self.global_batch, len(self.rows))


class HeldOutBatches:
    """This rank's micro-batches of the held-out rows, in file order.

    Row i of this rank's micro-batch m is row `(m * data_ranks + rank) * micro_batch + i` of the file. Rows that teach
    nothing fill the end, so every rank has the same number of micro-batches, and every row is in exactly one.
    """

    def __init__(
        self, rows: Rows | Sequence[Row], *, micro_batch: int, rank: int, data_ranks: int, pad_id: int
    ) -> None:
        """Raises ValueError for a rank or micro-batch that cannot be."""
        _check_layout(micro_batch, rank, data_ranks)
        self.rows, self.pad_id = rows, pad_id
        self.micro_batch, self.rank, self.data_ranks = micro_batch, rank, data_ranks

    def __len__(self) -> int:
        return -(-len(self.rows) // (self.micro_batch * self.data_ranks))

    def __iter__(self) -> Iterator[Batch]:
        everything = range(len(self.rows))
        for m in range(len(self)):
            yield collate(_part(self.rows, everything, m, self.micro_batch, self.rank, self.data_ranks), self.pad_id)


def _part(
    rows: Rows | Sequence[Row], chosen: Sequence[int], m: int, micro_batch: int, rank: int, data_ranks: int
) -> list[Row | None]:
    """Return the rows of micro-batch `m` on `rank`; None beyond the end of `chosen`."""
    first = (m * data_ranks + rank) * micro_batch
    return [rows[chosen[at]] if at < len(chosen) else None for at in range(first, first + micro_batch)]


@lru_cache(maxsize=2)
def _order(seed: int, epoch: int, count: int) -> tuple[int, ...]:
    """Return the row numbers of one epoch. The generator keeps 32 bits of its seed, so those are hashed."""
    digest = hashlib.sha256(f"{seed}:{epoch}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:4], "big"))
    return tuple(torch.randperm(count, generator=generator).tolist())


def _check_layout(micro_batch: int, rank: int, data_ranks: int) -> None:
    if micro_batch < 1 or not 0 <= rank < data_ranks:
        raise ValueError(f"micro_batch {micro_batch}, rank {rank} of {data_ranks}")
