"""The article's changes over a grid: signs that must hold in every cell, and its figure where it should come out."""

from __future__ import annotations

from statistics import median

import pytest

from shardwise.predict.throughput import throughput_of
from shardwise.trials.article_grid import (
    CLUSTERS,
    LORA,
    METHODS,
    MODELS,
    ROWS,
    WHOLE,
    Cell,
    Gain,
    fitting,
    gains,
    planned,
    step,
)

NVLINK = "8xA100-SXM-80GB"


@pytest.fixture(scope="module")
def prefetched() -> dict[Cell, Gain]:
    return gains(("prefetch.backward=0",), ("prefetch.backward=1",))


def test_the_grid_is_whole(prefetched):
    assert len(prefetched) == len(CLUSTERS) * len(MODELS) * len(METHODS) * len(ROWS)


def test_prefetching_never_costs_time(prefetched):
    assert min(gain.percent for gain in prefetched.values()) >= 0


def test_keeping_weights_never_costs_time():
    assert min(gain.percent for gain in gains((), ("fsdp=SHARD_GRAD_OP",)).values()) >= 0


def test_the_article_s_figure_of_prefetching_comes_out_on_nvlink(prefetched):
    """15 to 25 % on a fast network, all weights trained, one row per card."""
    chosen = fitting(prefetched, lambda cell: (cell.cluster, cell.method, cell.rows) == (NVLINK, WHOLE, 1))
    assert 15 <= median(chosen) <= 25


def test_prefetching_brings_little_where_the_link_is_the_bound(prefetched):
    """25 Gb/s between nodes: gathers take tens of times as long as what they could hide under."""
    cell = Cell("2x8xA100-SXM-80GB eth-25", "qwen-7b", WHOLE, 1)
    assert step(cell).busy["all_gather"] > 10 * step(cell).busy["compute"]
    assert prefetched[cell].percent < 5


def test_prefetching_brings_less_with_more_computing(prefetched):
    for model in MODELS:
        for method in METHODS:
            few, many = (prefetched[Cell(NVLINK, model, method, rows)].percent for rows in ROWS)
            assert many < few


def test_checkpointing_adds_a_third_of_the_products_and_with_adapters_about_half():
    """Per weight of a block and token: forward 2 FLOPs, backward 4, forward once more 2, so 2 of 6; with frozen weights
    2 of 4. The head is not done again, and attention counts three times its forward in both."""
    shares = {}
    for method in METHODS:
        plan = planned(Cell(NVLINK, "llama-3-70b", method, 1))
        flops = throughput_of(
            step(Cell(NVLINK, "llama-3-70b", method, 1)), plan.workload, plan.plan, plan.cluster
        ).flops
        shares[method] = flops.again / flops.model
    assert 0.31 < shares[WHOLE] < 1 / 3
    assert 0.45 < shares[LORA] < 1 / 2


def test_what_does_not_fit_is_left_out():
    found = {
        Cell("8xA10", "qwen-7b", WHOLE, rows): Gain(percent, fits)
        for rows, percent, fits in ((1, 3, True), (4, 9, False))
    }
    assert fitting(found) == [3]
    assert fitting(found, lambda cell: cell.rows == 4) == []
