"""Every pair of values either runs and gives what one process gives, or is refused with a reason, or needs a GPU."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from combinations.array import CoveringArray
from combinations.compare import differences, tolerance_of
from combinations.features import CORE, FEATURES, GPU_KERNELS, TRIPLE, pairs_of, world_of
from combinations.live import train_alone, train_live
from combinations.page import TARGET, is_meaningless, page
from combinations.product import Product
from combinations.survey import survey, triples
from harness.ranks import run_ranks

ROWS = 62
"""Live runs; a change of features may change it."""


@pytest.fixture(scope="module")
def surveyed(tiny):
    return survey(tiny)


@pytest.fixture(scope="module")
def product(tiny):
    return Product(tiny)


def test_every_pair_that_runs_is_in_a_row_and_no_other(surveyed):
    proven = set(surveyed.pairs("cpu"))
    assert {pair for row in surveyed.rows for pair in pairs_of(row)} == proven
    assert len(surveyed.rows) == ROWS
    for values in triples(proven):
        assert any(all(row[feature] == value for feature, value in values) for row in surveyed.rows)
    assert len(list(triples(proven))) == len(list(itertools.product(*(FEATURES[name] for name in TRIPLE))))


def test_every_row_is_accepted(surveyed, product):
    for row in surveyed.rows:
        assert product.plan(row).mesh.world == world_of(row)


def test_few_pairs_are_refused_and_none_between_core_features(surveyed):
    refused = surveyed.pairs("")
    assert len(refused) < 0.1 * len(surveyed.verdicts)
    between_core = [pair for pair in refused if {pair[0][0], pair[1][0]} <= set(CORE)]
    assert between_core
    assert all(is_meaningless(pair) for pair in between_core)
    for pair in refused:
        problem = surveyed.verdicts[pair].problem
        assert problem.field
        assert problem.reason
        assert problem.fix


def test_only_kernels_for_gpus_wait_for_one(surveyed, product):
    kernels = set(GPU_KERNELS.items())
    assert all(kernels & set(pair) for pair in surveyed.pairs("cuda"))
    for kernel in kernels:
        assert any(kernel in pair for pair in surveyed.pairs("cuda"))
        assert product.refusal(dict([kernel]), "cpu") is not None


def test_the_page_is_up_to_date(surveyed):
    assert TARGET.read_text() == page(surveyed), "run: PYTHONPATH=tests python -m combinations.page"


@given(st.lists(st.integers(1, 4), min_size=2, max_size=5), st.data())
def test_any_wanted_pairs_are_covered(sizes, data):
    features = {f"f{place}": [str(value) for value in range(size)] for place, size in enumerate(sizes)}
    every = [
        ((one, a), (other, b))
        for one, other in itertools.combinations(features, 2)
        for a in features[one]
        for b in features[other]
    ]
    forbidden = data.draw(st.sets(st.sampled_from(every), max_size=2))
    whole = [dict(zip(features, values, strict=True)) for values in itertools.product(*features.values())]
    rows = [row for row in whole if not forbidden & set(itertools.combinations(row.items(), 2))]
    possible = {pair for row in rows for pair in itertools.combinations(row.items(), 2)}
    found = CoveringArray(features, set(every) - forbidden, sorted(possible), {}).rows
    assert {pair for row in found for pair in itertools.combinations(row.items(), 2)} == possible
    if possible != set(every) - forbidden:
        with pytest.raises(ValueError, match="no row can hold any of"):
            CoveringArray(features, set(every) - forbidden, sorted(set(every) - forbidden), {})


@pytest.mark.slow
@pytest.mark.parametrize("number", range(ROWS))
def test_a_row_gives_what_one_process_gives(surveyed, product, number):
    row = surveyed.rows[number]
    job, plan = product.job(row), product.plan(row)
    live = run_ranks(train_live, world_of(row), job, plan, timeout=600 if plan.compile else 120)
    found = differences(live, train_alone(job), tolerance_of(row))
    assert not found, f"{row}\n" + "\n".join(found)
