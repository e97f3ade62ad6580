"""Changes of a plan that users reported: each makes a step faster, by about as much as they saw."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shardwise.catalogue.clusters import find_cluster
from shardwise.planner.by_shape import plan_by_shape
from shardwise.predict.step_time import timeline_of
from shardwise.spec.reader import read_job
from shardwise.spec.timeline import LANES, Timeline
from shardwise.trials.directions import Outcome, outcome, outcome_of, outcomes
from shardwise.trials.reported import (
    DEFERRED_ALL_REDUCE,
    DIRECTIONS,
    FULL_TO_HYBRID,
    OFFLOAD,
    REDUCTION_IN_BF16,
    RESHARD_OFF,
)

OPEN = (REDUCTION_IN_BF16, OFFLOAD)
"""Reports without tokens per step, on which their effects rest so much that only the sign is asked for."""


def named(direction):
    return direction.source


@pytest.mark.parametrize("direction", DIRECTIONS, ids=named)
def test_the_change_makes_a_step_faster(direction):
    assert outcome(direction).right_in_sign


@pytest.mark.parametrize("direction", [one for one in DIRECTIONS if one not in OPEN], ids=named)
def test_the_effect_is_of_the_reported_size(direction):
    found = outcome(direction)
    assert found.right_in_size, (found.effect, direction.low)


@pytest.mark.parametrize("direction", OPEN, ids=named)
def test_the_effect_is_of_the_reported_size_with_a_plausible_batch(direction):
    found = outcomes(direction)
    assert any(one.right_in_size for one in found), [one.effect for one in found]


@pytest.mark.parametrize("direction", [one for one in DIRECTIONS if one.rows_per_s is not None], ids=named)
def test_the_speed_before_the_change_is_the_reported_one(direction):
    assert outcome(direction).rows_per_s == pytest.approx(direction.rows_per_s, rel=0.15)


def test_the_speed_after_the_change_is_the_reported_one_on_four_nodes():
    """16 cards x 16 rows x 16 forwards a step; 74.41 rows per second were reported."""
    assert 16 * 16 * 16 / outcome(FULL_TO_HYBRID).after.step_s == pytest.approx(74.41, rel=0.15)


def test_one_node_of_the_first_report():
    """21.7 rows per second of 4 cards, in the same thread."""
    cluster, model = find_cluster("a2-highgpu-4g"), FULL_TO_HYBRID.model()
    sizes = ["seq_len=2048", "micro_batch=16", f"global_batch={16 * 16 * 4}", "fsdp=FULL_SHARD"]
    job = read_job(None, [f"model={model.name}", *sizes, *FULL_TO_HYBRID.settings], needs_data=False)
    plan = plan_by_shape(job, model, cluster)
    step = timeline_of(plan.workload, plan.plan, cluster, FULL_TO_HYBRID.runtime)
    assert 16 * 16 * 4 / step.step_s == pytest.approx(21.7, rel=0.15)


def test_deferring_takes_the_wait_from_all_forwards_but_the_last():
    """With t for a forward and backward that wait for the all-reduce and c for one that does not, four take 4 t, and
    deferred 3 c + t. The report comes to t = 22.2 s and c = 10.8 s that way."""
    found = outcome(DEFERRED_ALL_REDUCE)
    waiting = found.before.step_s / 4
    computing = (found.after.step_s - waiting) / 3
    assert waiting == pytest.approx(22.2, rel=0.15)
    assert computing == pytest.approx(10.8, rel=0.15)
    assert found.effect == pytest.approx(4 * waiting / (3 * computing + waiting))


@pytest.mark.parametrize(
    ("direction", "parameters"),
    [
        (FULL_TO_HYBRID, 24 * (4 * 2048 * 2048 + 3 * 2048 * 8192 + 2 * 2048) + 2 * 50272 * 2048 + 2048),
        (REDUCTION_IN_BF16, 32 * (4 * 4096 * 4096 + 3 * 4096 * 11008 + 2 * 4096) + 2 * 50432 * 4096 + 4096),
        (
            DEFERRED_ALL_REDUCE,
            36 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 12288 + 2 * 4096 + 2 * 128) + 2 * 1024 * 4096 + 4096,
        ),
    ],
    ids=["1.8B", "6.9B", "7.0B"],
)
def test_models_that_no_catalogue_has(direction, parameters):
    """Attention, MLP and two norms of a block (in the third, norms of queries and keys too); embedding, head, norm."""
    assert direction.model().parameters == parameters


@pytest.mark.parametrize("place", range(len(REDUCTION_IN_BF16.guesses)))
def test_the_speed_before_the_change_picks_the_guess(place):
    wanted = REDUCTION_IN_BF16.guesses[place]
    speed = outcome_of(REDUCTION_IN_BF16, wanted).rows_per_s
    assert outcome(replace(REDUCTION_IN_BF16, rows_per_s=1.01 * speed)).guess == wanted


def test_without_a_speed_the_first_guess_is_taken():
    assert outcome(RESHARD_OFF).guess == RESHARD_OFF.guesses[0]


def _step(seconds: float) -> Timeline:
    return Timeline(
        step_s=seconds,
        spans=(),
        waits=(),
        busy=dict.fromkeys(LANES, 0.0),
        exposed=dict.fromkeys(LANES, 0.0),
        exposed_s=0.0,
    )


@pytest.mark.parametrize(
    ("low", "high", "before", "share", "right"),
    [
        (1.2, 1.2, 1.4, 2.0, True),
        (1.2, 1.2, 1.1, 0.5, True),
        (1.2, 1.2, 1.44, 2.2, False),
        (1.2, 1.2, 0.9, -0.5, False),
        (3.0, 10.0, 5.0, 1.0, True),
        (3.0, 10.0, 2.0, 0.5, True),
        (3.0, 10.0, 28.0, 3.0, False),
    ],
)
def test_an_effect_is_judged_by_its_part_beyond_one(low, high, before, share, right):
    """1.4 against 1.2: 0.4 is twice 0.2. Of a range the nearer end counts: 2 against 3 is 1 of 2, 28 against 10 is 27
    of 9. At half and at twice rounding decides."""
    direction = replace(RESHARD_OFF, low=low, high=high)
    found = Outcome(
        direction=direction, guess=direction.guesses[0], before=_step(before), after=_step(1.0), rows_per_s=1.0
    )
    assert found.share == pytest.approx(share)
    assert found.right_in_sign == (before > 1)
    if share not in (0.5, 2.0):
        assert found.right_in_size is right


def test_sources_and_words_are_there():
    assert len({one.source for one in DIRECTIONS}) == 5
    assert all(one.known and one.assumed and one.guesses and one.said for one in DIRECTIONS)
