"""Throughput of rows: tokens over seconds, and what nothing is said of."""

from __future__ import annotations

import pytest

from house.source import ROOT
from shardwise.trials import throughput_figures as figures
from shardwise.trials.measured import MeasuredRow, read_rows
from shardwise.trials.throughput_checks import check_times, tokens_of
from trials.rows import row
from trials.timed import checked, lasting, timed_row

PUBLISHED = ROOT / "bench" / "measurements" / "published.jsonl"
ADAPTERS = {"rank": 8, "targets": ["q_proj"], "base_quantization": None, "adapter_dtype": "bf16"}
TWO_NODES = {"cluster__num_gpus": 16, "plan__shard": 16, "plan__global_batch": 48}


def test_tokens_per_second_are_those_of_one_gpu():
    """Each of 2 GPUs has 3 rows of 384 tokens per step of half a second: 2304 tokens/s, 20 % above 1920."""
    check = checked(timed_row(1920.0), 0.5)
    assert check.timed.tokens_per_s == 2304
    assert check.relative_error == pytest.approx(0.2)


def test_ranks_of_a_tensor_group_share_their_rows():
    """2 ranks compute the same 3 rows: half as many tokens for each."""
    shared = {"plan__shard": 1, "plan__tensor": 2, "plan__global_batch": 3, "model__heads": 4, "model__kv_heads": 4}
    assert tokens_of(checked(timed_row(1.0, **shared, model__head_dim=80), 1.0).timed.case) == 3 * 384 / 2


def test_every_forward_of_a_step_counts():
    several = timed_row(1.0, plan__accumulation=5, plan__global_batch=30)
    assert checked(several, 1.0).timed.tokens_per_s == 5 * 3 * 384


def test_nothing_is_said_of_rows_that_are_not_for_it():
    asked_nothing = checked(row(measured__tokens_per_s_per_gpu=7.0, use=["memory"]), 1.0)
    assert (asked_nothing.timed, asked_nothing.skipped_because, asked_nothing.relative_error) == (None, None, None)
    assert checked(row(use=["throughput"]), 1.0).timed is None


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"plan__activation_checkpointing": "unknown"}, "plan.activation_checkpointing"),
        ({"plan__loss": "unknown"}, "plan.loss"),
        ({"plan__accumulation": None}, "plan.accumulation"),
        ({"plan__context": 2, "plan__shard": 1}, "context parallelism"),
        ({"plan__strategy": "MEGATRON"}, "MEGATRON"),
    ],
)
def test_what_time_needs_and_a_row_does_not_say_is_skipped_with_the_reason(changes, reason):
    check = checked(timed_row(1.0, **changes), 1.0)
    assert check.timed is None
    assert reason in check.skipped_because


def test_adapters_alone_need_no_count_of_forwards():
    check = checked(timed_row(1.0, plan__accumulation=None, lora=ADAPTERS), 1.0)
    assert check.timed.tokens_per_s == 3 * 384


@pytest.mark.parametrize(
    ("changes", "assumed"),
    [({}, False), (TWO_NODES, True), ({**TWO_NODES, "cluster__network": "roce-1600"}, False)],
)
def test_a_network_that_is_not_named_is_assumed_and_marked(changes, assumed):
    check = checked(timed_row(1.0, **changes), 1.0)
    assert check.timed.network_assumed is assumed
    without = figures.of_times([check], assumed_networks=False)
    assert (without is None) is assumed


def test_a_run_on_a_part_of_a_node_has_that_part():
    cluster = checked(timed_row(1.0), 1.0).timed.case.cluster
    assert (cluster.nodes, cluster.per_node) == (1, 2)
    two = checked(timed_row(1.0, **TWO_NODES), 1.0).timed.case.cluster
    assert (two.nodes, two.per_node) == (2, 8)


def test_products_in_fp8_are_the_programs():
    case = checked(timed_row(1.0, plan__compute_dtype="fp8"), 1.0).timed.case
    assert case.runtime.fp8_linears
    assert case.plan.dtypes.param == "bf16"


@pytest.mark.parametrize(
    ("name", "attention", "kernel"),
    [("mosaicml/mpt-7b", "flash", "triton"), ("mosaicml/mpt-7b", "sdpa", "flash"), ("small", "flash", "flash")],
)
def test_mpt_calls_the_first_flash_attention(name, attention, kernel):
    case = checked(timed_row(1.0, model__name=name, plan__attention=attention), 1.0).timed.case
    assert case.runtime.attention_kernel == kernel


def test_a_card_of_unknown_speed_is_skipped():
    unknown = MeasuredRow.model_validate(timed_row(1.0, cluster__gpu="Z100-SXM-80GB"))
    (check,) = check_times([unknown])
    assert check.timed is None
    assert check.skipped_because


def test_neither_id_nor_source_nor_notes_nor_what_was_measured_matter():
    for one in read_rows(PUBLISHED)[::40]:
        said = {"id": "X-1", "source": "x", "notes": "", "trust": "low", "assumed": [], "headline": []}
        measured = one.measured.model_copy(update={"peak_gib": None, "mfu": None})
        other = one.model_copy(update={**said, "measured": measured})
        (first,), (second,) = check_times([one]), check_times([other])
        assert (first.timed and first.timed.tokens_per_s) == (second.timed and second.timed.tokens_per_s)


def test_error_figures_by_group():
    """Steps of 1 s are 1152 tokens/s: errors of +20 %, 0 and -20 % on three rows of two sources and cards."""
    rows = [
        timed_row(960.0, id="A-1", headline=["throughput"]),
        timed_row(1152.0, id="A-2"),
        timed_row(1440.0, id="B-1", cluster__gpu="H100-SXM-80GB"),
    ]
    checks = check_times([MeasuredRow.model_validate(one) for one in rows], lasting(1.0))
    assert figures.of_times(checks).median == pytest.approx(0.2)
    assert figures.of_times(checks, headline=True).rows == 1
    assert {name: found.rows for name, found in figures.by_source(checks).items()} == {"A": 2, "B": 1}
    assert figures.by_card(checks)["H100-SXM-80GB"].bias == pytest.approx(-0.2)
    assert [check.row.id for check in figures.furthest(checks, 1)] in (["A-1"], ["B-1"])
    assert figures.of_times([]) is None


def test_the_flat_rule_is_a_share_of_the_peak_over_the_models_flops():
    """2 FLOPs per element of a matrix in forward, 4 in backward; attention 3 times 4 x width x length; head included.

    3 blocks of 4 x 320^2 + 3 x 320 x 864 = 1239040 elements and a head of 320 x 11008 = 3522560: 7239680 elements, 6
    FLOPs of each; attention 12 x 3 x 320 x 384 = 4423680: 47861760 FLOPs per token. 45 % of 312e12 go into them.
    """
    check = checked(timed_row(1.0), 1.0)
    assert figures.flat_rule(check.timed.case) == pytest.approx(0.45 * 312e12 / 47861760, rel=1e-6)
    error = figures.of_flat_rule([check])
    assert error.bias == pytest.approx(0.45 * 312e12 / 47861760 - 1)


def test_the_shorter_flat_rule_counts_parameters_alone():
    """6 FLOPs per parameter and token, 4 where adapters train."""
    whole, adapted = checked(timed_row(1.0), 1.0), checked(timed_row(1.0, lora=ADAPTERS), 1.0)
    parameters = whole.timed.case.workload.model.parameters
    for check, per_parameter in ((whole, 6), (adapted, 4)):
        found = figures.of_flat_rule([check], by_parameters=True)
        assert found.bias == pytest.approx(0.45 * 312e12 / (per_parameter * parameters) - 1)
