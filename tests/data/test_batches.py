"""Every layout trains on the same rows in the same order."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.data.loader import Batch, HeldOutBatches, TrainBatches, collate
from shardwise.data.rows import Row, Rows

PAD = 99
LAYOUTS = [(ranks, micro) for ranks in (1, 2, 4) for micro in (1, 2)]


def make_rows(count):
    """Row n has n % 3 + 2 tokens and says n."""
    return [Row(input_ids=[n] * (n % 3 + 2), labels=[-100] + [n] * (n % 3 + 1)) for n in range(count)]


def train(count, *, ranks=1, micro=1, rank=0, global_batch=8, seed=0):
    return TrainBatches(
        make_rows(count),
        seed=seed,
        global_batch=global_batch,
        micro_batch=micro,
        rank=rank,
        data_ranks=ranks,
        pad_id=PAD,
    )


def taken(batch):
    """The row numbers of a batch; None for rows that teach nothing."""
    said = zip(batch.input_ids[:, 0].tolist(), batch.labels, strict=True)
    return [first if (labels != -100).any() else None for first, labels in said]


def global_batch_at(position, count, ranks, micro, *, global_batch=8, seed=0):
    """All ranks' rows of one global batch, put back into its order."""
    sides = [
        train(count, ranks=ranks, micro=micro, rank=rank, global_batch=global_batch, seed=seed).micro_batches(position)
        for rank in range(ranks)
    ]
    assert len({len(side) for side in sides}) == 1
    return [row for step in zip(*sides, strict=True) for batch in step for row in taken(batch)]


def test_collate_pads_on_the_right():
    batch = collate([Row(input_ids=[5, 6, 7], labels=[-100, 6, 7]), None, Row(input_ids=[PAD], labels=[PAD])], PAD)
    assert batch.input_ids.tolist() == [[5, 6, 7], [PAD, PAD, PAD], [PAD, PAD, PAD]]
    assert batch.attention_mask.tolist() == [[1, 1, 1], [1, 0, 0], [1, 0, 0]]
    assert batch.labels.tolist() == [[-100, 6, 7], [-100, -100, -100], [PAD, -100, -100]]
    assert batch.trained_tokens == 2
    assert {t.dtype for t in (batch.input_ids, batch.attention_mask, batch.labels)} == {torch.int64}


def test_a_trained_end_token_that_is_also_the_pad_token_stays_trained():
    batch = collate([Row(input_ids=[1, 2, PAD], labels=[-100, 2, PAD]), Row(input_ids=[1, 2], labels=[-100, 2])], PAD)
    assert batch.labels[0].tolist() == [-100, 2, PAD]
    assert batch.trained_tokens == 3


def test_batch_without_rows_and_moving():
    batch = collate([None, None], PAD).to("cpu")
    assert isinstance(batch, Batch)
    assert batch.input_ids.shape == (2, 1)
    assert batch.attention_mask.tolist() == [[1], [1]]
    assert batch.trained_tokens == 0
    assert collate([None], PAD).to(torch.device("meta")).labels.device.type == "meta"


@pytest.mark.parametrize("count", [1, 3, 7, 8, 20])
def test_the_global_batch_is_the_same_in_every_layout(count):
    alone = train(count)
    position = 0
    while position < 2 * count:
        expected = global_batch_at(position, count, 1, 1)
        for ranks, micro in LAYOUTS:
            assert global_batch_at(position, count, ranks, micro) == expected
        position = alone.next_position(position)


@pytest.mark.parametrize("count", [1, 3, 8, 21])
def test_an_epoch_takes_each_row_once(count):
    batches = train(count)
    for epoch in range(3):
        position, seen, steps = epoch * count, [], 0
        while position < (epoch + 1) * count:
            seen += global_batch_at(position, count, 2, 2)
            position = batches.next_position(position)
            steps += 1
        assert position == (epoch + 1) * count
        assert steps == batches.steps_per_epoch
        assert sorted(row for row in seen if row is not None) == list(range(count))
        assert seen.count(None) == steps * 8 - count
        assert None not in seen[:count]


def test_order_comes_from_seed_and_epoch_alone():
    orders = {
        (seed, epoch): tuple(global_batch_at(epoch * 50, 50, 1, 1, global_batch=50, seed=seed))
        for seed in range(3)
        for epoch in range(3)
    }
    assert len(set(orders.values())) == 9
    torch.manual_seed(1)
    before = torch.get_rng_state()
    random.seed(1)
    assert tuple(global_batch_at(50, 50, 2, 1, global_batch=50, seed=1)) == orders[1, 1]
    assert torch.equal(before, torch.get_rng_state())


@settings(max_examples=60, deadline=None)
@given(
    count=st.integers(1, 30),
    layouts=st.lists(
        st.tuples(st.sampled_from([1, 2, 3]), st.integers(1, 3), st.integers(1, 3)), min_size=1, max_size=4
    ),
    steps=st.integers(1, 6),
)
def test_resuming_with_another_layout_repeats_and_skips_nothing(count, layouts, steps):
    """Each layout (ranks, rows per micro-batch, accumulation) runs some steps from where the one before stopped."""
    position, seen = 0, []
    for ranks, micro, accumulation in layouts:
        size = ranks * micro * accumulation
        for _ in range(steps):
            seen += [
                row for row in global_batch_at(position, count, ranks, micro, global_batch=size) if row is not None
            ]
            position = train(count, global_batch=size).next_position(position)
    assert len(seen) == position
    in_order = [row for epoch in range(position // count + 1) for row in whole_epoch(count, epoch)]
    assert seen == in_order[:position]


def whole_epoch(count, epoch):
    return global_batch_at(epoch * count, count, 1, 1, global_batch=count)


@pytest.mark.parametrize(("ranks", "micro"), LAYOUTS)
@pytest.mark.parametrize("count", [1, 3, 8, 9])
def test_held_out_rows_come_once_over_all_ranks(count, ranks, micro):
    sides = [
        HeldOutBatches(make_rows(count), micro_batch=micro, rank=rank, data_ranks=ranks, pad_id=PAD)
        for rank in range(ranks)
    ]
    lists = [list(side) for side in sides]
    assert {len(batches) for batches in lists} == {len(sides[0])}
    assert len(sides[0]) == -(-count // (ranks * micro))
    rows = [row for step in zip(*lists, strict=True) for batch in step for row in taken(batch)]
    assert rows == list(range(count)) + [None] * (len(rows) - count)
    assert all(len(batch.input_ids) == micro for batches in lists for batch in batches)


def test_rows_from_a_file(tmp_path):
    Rows.from_rows(make_rows(5)).write(tmp_path / "a.arrow")
    rows = Rows.open(tmp_path / "a.arrow")
    batches = TrainBatches(rows, seed=0, global_batch=5, micro_batch=5, rank=0, data_ranks=1, pad_id=PAD)
    (batch,) = batches.micro_batches(0)
    assert sorted(taken(batch)) == [0, 1, 2, 3, 4]
    assert batch.trained_tokens == rows.trained_tokens


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"count": 0}, "no rows"),
        (
            {"count": 3, "global_batch": 6, "ranks": 2, "micro": 2},
            "global_batch 6 is not a multiple of 2 rows x 2 ranks",
        ),
        ({"count": 3, "rank": 1}, "rank 1 of 1"),
        ({"count": 3, "micro": 0}, "micro_batch 0"),
    ],
)
def test_layouts_that_cannot_be(options, says):
    with pytest.raises(ValueError, match=says):
        train(options.pop("count"), **options)
