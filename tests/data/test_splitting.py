"""No prompt is both trained on and held out."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.data.split import split_by_prompt
from shardwise.spec.problems import BadInput

prompts_of_rows = st.lists(st.sampled_from("abcdefgh"), min_size=2, max_size=40).filter(lambda p: len(set(p)) > 1)


@given(prompts=prompts_of_rows, fraction=st.floats(0.01, 0.99), seed=st.integers(0, 3))
def test_whole_prompts_on_both_sides(prompts, fraction, seed):
    train, held = split_by_prompt(prompts, fraction=fraction, seed=seed)
    assert train
    assert held
    assert sorted(train + held) == list(range(len(prompts)))
    assert train == sorted(train)
    assert held == sorted(held)
    assert not {prompts[i] for i in train} & {prompts[i] for i in held}
    smallest = min(prompts.count(prompt) for prompt in set(prompts))
    assert len(held) <= max(round(fraction * len(prompts)), smallest)


def test_size_seed_and_order():
    prompts = [f"question {n}" for n in range(1000)]
    train, held = split_by_prompt(prompts, fraction=0.1, seed=0)
    assert (len(train), len(held)) == (900, 100)
    assert split_by_prompt(prompts, fraction=0.1, seed=0) == (train, held)
    assert split_by_prompt(prompts, fraction=0.1, seed=1) != (train, held)
    shuffled = random.Random(0).sample(prompts, k=1000)
    _, held_shuffled = split_by_prompt(shuffled, fraction=0.1, seed=0)
    assert {shuffled[i] for i in held_shuffled} == {prompts[i] for i in held}


def test_one_prompt_with_most_rows_stays_in_training():
    prompts = ["often"] * 90 + [f"once {n}" for n in range(10)]
    for seed in range(5):
        train, held = split_by_prompt(prompts, fraction=0.05, seed=seed)
        assert (len(train), len(held)) == (95, 5)


@pytest.mark.parametrize("prompts", [["a"], ["a"] * 5])
def test_one_prompt_cannot_be_split(prompts):
    with pytest.raises(BadInput, match="1 distinct prompt in"):
        split_by_prompt(prompts, fraction=0.5, seed=0)
