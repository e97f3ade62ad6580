"""Choices made otherwise: what changes, of which rows."""

from __future__ import annotations

import pytest

from shardwise.catalogue.cards import gpu
from shardwise.trials.choices import CHOICES, HELD, SLOWED, Choice, errors_otherwise
from shardwise.trials.measured import MeasuredRow
from shardwise.trials.throughput_checks import check_times
from shardwise.trials.throughput_figures import of_times
from trials.timed import timed_row

LARGE = {
    "model__hidden": 4096,
    "model__heads": 32,
    "model__kv_heads": 32,
    "model__head_dim": 128,
    "model__ffn": 16384,
    "plan__seq_len": 2048,
    "plan__micro_batch": 4,
    "plan__global_batch": 8,
}
"""Blocks that keep a card busy."""


def _checks(**changes):
    return check_times([MeasuredRow.model_validate(timed_row(1000.0, **{**LARGE, **changes}))])


def _choice(word: str) -> Choice:
    (found,) = [choice for choice in CHOICES if word in choice.otherwise]
    return found


def _otherwise(checks, choice: Choice):
    return errors_otherwise(checks, [choice])[choice.otherwise]


def test_nothing_otherwise_changes_nothing():
    checks, nothing = _checks(), Choice(otherwise="nothing")
    assert _otherwise(checks, nothing) == of_times(checks)
    assert _otherwise(checks, Choice(otherwise="no values", values={})) == of_times(checks)
    assert errors_otherwise(_checks(plan__context=2, plan__shard=1), [nothing]) == {}


@pytest.mark.parametrize(
    ("word", "changes"),
    [
        ("MPT", {"model__name": "mosaicml/mpt-7b", "plan__attention": "flash"}),
        ("torch chooses", {"cluster__gpu": "H100-SXM-80GB", "plan__attention": "flash"}),
        ("500 W", {"cluster__gpu": SLOWED}),
    ],
)
def test_a_choice_is_about_its_rows_and_leaves_others_alone(word, changes):
    """Faster are the second kernel than the first, cuDNN on Hopper than the second, a card at 700 W than at 500."""
    about, other = _checks(**changes), _checks()
    assert _otherwise(about, _choice(word)).bias > of_times(about).bias
    assert _otherwise(other, _choice(word)) == of_times(other)


@pytest.mark.parametrize("word", ["UNHIDDEN", "OVERLAP", "JITTER"])
def test_a_constant_takes_another_value(word):
    """Less that hides behind nothing, less slowing down and machines that are alike all make steps shorter."""
    checks = _checks(cluster__num_gpus=16, plan__shard=16, plan__global_batch=64)
    assert _otherwise(checks, _choice(word)).bias > of_times(checks).bias


def test_the_slowed_card_differs_by_its_memory_and_its_power():
    slowed, held = gpu(SLOWED).rates, gpu(HELD).rates
    assert slowed.products["bf16"].value == held.products["bf16"].value
    assert slowed.achieved.value < held.achieved.value
