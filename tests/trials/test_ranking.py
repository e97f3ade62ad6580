"""Order of rows that differ in one decision."""

from __future__ import annotations

from shardwise.trials.measured import MeasuredRow
from shardwise.trials.ranking import Ranked, pairs_of, ranked, together
from shardwise.trials.throughput_checks import check_times
from trials.timed import lasting, timed_row


def _pairs(*contents):
    return pairs_of(check_times([MeasuredRow.model_validate(one) for one in contents], lasting(1.0)))


def test_one_decision_makes_a_pair_and_two_do_not():
    """Rows per forward (and the global batch that follows) are one decision, checkpointing beside it another."""
    small = timed_row(100.0, id="A-1")
    large = timed_row(120.0, id="A-2", plan__micro_batch=4, plan__global_batch=8)
    both = timed_row(120.0, id="A-3", plan__micro_batch=4, plan__global_batch=8, plan__activation_checkpointing="none")
    pairs = _pairs(small, large, both)
    assert [(pair.field, pair.slow.row.id, pair.fast.row.id) for pair in pairs] == [("micro_batch", "A-1", "A-2")]


def test_the_strategy_is_one_decision_with_mesh_and_resharding():
    whole = timed_row(100.0, id="A-1")
    kept = timed_row(
        120.0, id="A-2", plan__strategy="NO_SHARD", plan__shard=1, plan__replicate=2, plan__reshard_after_forward=None
    )
    assert [pair.field for pair in _pairs(whole, kept)] == ["strategy"]


def test_rows_of_other_sources_models_lengths_or_near_figures_are_no_pair():
    first = timed_row(100.0, id="A-1")
    change = {"plan__compile": True}
    for other in (
        timed_row(150.0, id="B-1", **change),
        timed_row(150.0, id="A-2", **change, model__layers=4),
        timed_row(150.0, id="A-2", **change, cluster__gpus_per_node=4),
        timed_row(150.0, id="A-2", **change, plan__seq_len=768),
        timed_row(104.0, id="A-2", **change),
    ):
        assert _pairs(first, other) == []
    assert len(_pairs(first, timed_row(106.0, id="A-2", **change))) == 1


def test_tokens_of_a_longer_forward_put_it_first():
    """Steps last 1 s whatever the rows: 4 rows are predicted faster than 3, measured so or not."""
    small = {"id": "A-1", "plan__micro_batch": 3}
    large = {"id": "A-2", "plan__micro_batch": 4, "plan__global_batch": 8}
    (right,) = _pairs(timed_row(100.0, **small), timed_row(120.0, **large))
    (wrong,) = _pairs(timed_row(120.0, **small), timed_row(100.0, **large))
    assert (right.right, wrong.right) == (True, False)
    by_field = ranked([right, wrong, right])
    assert by_field == {"micro_batch": Ranked(pairs=3, right=2)}
    assert together(by_field.values()) == Ranked(pairs=3, right=2)


def test_equal_predictions_have_no_order():
    (pair,) = _pairs(timed_row(100.0, id="A-1"), timed_row(120.0, id="A-2", plan__compile=True))
    assert not pair.right
