"""Predictions against measurements: like with like, and what the reach of the published file is."""

from __future__ import annotations

import time

import make_accuracy
import pages
import pytest

from shardwise.predict.constants import GIB
from shardwise.trials import figures, throughput_figures
from shardwise.trials.measured import MeasuredRow, read_rows
from shardwise.trials.ranking import ranked, together
from shardwise.trials.refit import FITTED, fit, leave_one_out
from shardwise.trials.throughput_checks import check_times
from shardwise.trials.validate import check_rows
from shardwise.trials.validate_text import as_json, as_text
from trials.rows import row, single


@pytest.fixture
def published():
    """The rows with their memory, worked out once for all tests."""
    return make_accuracy.memory()


@pytest.fixture
def throughput():
    """What is found out about their throughput, worked out once for all tests."""
    return make_accuracy.throughput()


def _check(content):
    return check_rows([MeasuredRow.model_validate(content)])[0]


def test_the_reach_on_the_published_rows(published):
    headline, tensors = (
        figures.of_rows(published, tensors=True, headline=True),
        figures.of_rows(published, tensors=True),
    )
    assert (headline.rows, tensors.rows) == (6, 54)
    assert headline.median <= 0.05
    assert headline.p90 <= 0.12
    assert tensors.median <= 0.08
    assert tensors.p90 <= 0.20
    called = figures.confusion(published)
    assert called.oom_called_oom >= 24
    assert called.fits_called_fitting >= 0.97 * (called.fits_called_fitting + called.fits_called_oom)


def test_the_reach_of_throughput_on_the_published_rows(throughput):
    headline = throughput_figures.of_times(throughput.checks, headline=True)
    overall = throughput_figures.of_times(throughput.checks)
    assert (headline.rows, overall.rows) == (12, 186)
    assert headline.median <= 0.10
    assert headline.p90 <= 0.25
    assert overall.median <= 0.14
    assert overall.p90 <= 0.35
    assert throughput.left_out.together.median <= 0.18
    order = together(ranked(throughput.pairs).values())
    assert order.pairs >= 27
    assert order.right >= 0.9 * order.pairs


def test_the_readme_says_how_far_off_throughput_is(throughput):
    text = " ".join((pages.ROOT / "README.md").read_text(encoding="utf-8").split())
    overall, left = throughput_figures.of_times(throughput.checks), throughput.left_out.together
    assert f"{overall.rows} published runs" in text
    assert f"about {100 * overall.median:.0f} % in the middle" in text
    assert f"about {100 * left.median:.0f} % with constants fitted without the run's source" in text


def test_every_headline_row_is_predicted(published):
    assert all(check.memory is not None for check in published if "memory" in check.row.headline)


@pytest.mark.parametrize("check", [check_rows, check_times])
def test_a_tenth_of_the_published_rows_takes_a_second(check):
    rows = read_rows(make_accuracy.ROWS)[::10]
    begin = time.process_time()
    check(rows)
    assert time.process_time() - begin < 1


@pytest.mark.parametrize(
    ("statistic", "figure"),
    [
        ("allocated", "tensors"),
        ("active", "tensors"),
        ("reserved", "reserved"),
        ("unknown", "reserved"),
        ("nvidia-smi", "total"),
    ],
)
def test_like_is_held_against_like(statistic, figure):
    check = _check(row(measured__statistic=statistic, measured__peak_gib=1.25))
    device = check.predicted.device
    sizes = {
        "tensors": check.predicted.peak.allocated,
        "reserved": device.reserved.value,
        "total": device.total.value,
    }
    assert len(set(sizes.values())) == 3
    assert check.memory.predicted == sizes[figure] / GIB
    assert check.memory.relative_error == pytest.approx(sizes[figure] / GIB / 1.25 - 1)


def test_figures_are_given_only_where_a_row_is_good_for_them():
    nothing = _check(row(use=[]))
    assert (nothing.memory, nothing.fits_predicted, nothing.skipped_because) == (None, None, None)
    oom = {"measured__outcome": "oom", "measured__peak_gib": None, "measured__statistic": None}
    ran_out = _check(row(use=[], **oom))
    assert ran_out.memory is None
    assert ran_out.fits_predicted is True
    assert _check(row(use=["memory"])).fits_predicted is None
    assert _check(row(use=["feasibility"])).memory is None


@pytest.mark.parametrize("card", [None, "Z100-SXM-80GB"])
def test_a_card_that_nobody_knows_has_peaks_but_no_limit(card):
    known, unknown = _check(row()), _check(row(cluster__gpu=card))
    assert unknown.memory.predicted == pytest.approx(known.memory.predicted, rel=0.02)
    assert unknown.fits_predicted is None
    assert "does not know the card" in _check(row(cluster__gpu=card, use=["feasibility"])).skipped_because


def test_a_row_that_cannot_fit_is_called_so():
    assert _check(row(plan__micro_batch=4096, plan__global_batch=8192)).fits_predicted is False


def test_the_optimizer_step_holds_five_copies_of_what_trains():
    """Weights, gradients, two moments and a root of one of them: 10 bytes per parameter in bf16, 20 in fp32."""
    deep = {"model__layers": 40, "model__vocab": 512, "plan__seq_len": 8, "plan__micro_batch": 1}
    alone = _check(single(**deep, plan__global_batch=1)).predicted
    two = _check(row(**deep, plan__global_batch=2, plan__fsdp_version=1)).predicted
    parameters = alone.case.workload.model.parameters
    assert alone.peak.phase == two.peak.phase == "optimizer_step"
    workspace = alone.peak.allocated - 10 * parameters
    assert 0 <= workspace <= 64 * 2**20
    assert two.peak.allocated == pytest.approx(20 * parameters / 2 + workspace, rel=0.01)


def test_a_quantised_base_is_a_quarter_and_its_constants():
    lora = {"rank": 8, "targets": ["q_proj"], "base_quantization": None, "adapter_dtype": "bf16"}
    sizes = {}
    for kind in (None, "nf4", "nf4-dq", "int8", "gptq4"):
        found = _check(single(lora={**lora, "base_quantization": kind})).predicted
        sizes[kind] = found.peak.live["sharded_parameters"]
        model = found.case.workload.model
    packed = sum(t.elements for t in model.kinds[0].tensors if len(t.shape) == 2) * model.layers
    assert sizes[None] - sizes["nf4"] == pytest.approx(packed * (2 - 0.5 - 1 / 16), rel=1e-3)
    assert sizes[None] - sizes["nf4-dq"] == pytest.approx(packed * (2 - 0.5 - 1 / 64 - 1 / 4096), rel=1e-3)
    assert sizes[None] - sizes["int8"] == pytest.approx(packed, rel=0.02)
    assert sizes["nf4-dq"] < sizes["gptq4"] < sizes["nf4"]


def test_percentiles_lie_on_the_line_between_two_values():
    assert figures.percentile([4.0, 1.0, 2.0], 0.5) == 2.0
    assert figures.percentile([1.0, 2.0], 0.9) == pytest.approx(1.9)
    assert figures.percentile([7.0], 0.9) == 7.0


def test_a_source_counts_the_same_however_many_rows_it_has():
    """A is off by 10 and 30 % (20 in the mean), B by 40: 30 %, where the mean of the rows is 27."""
    relative = [("A", 0.1), ("A", -0.3), ("B", 0.4)]
    assert figures.mean_of_sources(relative) == pytest.approx(0.3)
    assert {name: found.rows for name, found in figures.errors_of_groups(relative).items()} == {"A": 2, "B": 1}


def test_skipped_rows_are_counted_by_reason():
    contents = (row(), row(plan__context=2, plan__shard=1), row(plan__context=2, plan__shard=1))
    assert figures.skipped([_check(content) for content in contents]) == {"context parallelism": 2}


def test_constants_are_fitted_within_their_bounds_and_lower_the_error(published):
    used = {constant.name: constant.value for constant in FITTED}
    found = fit(published)
    assert set(found) == set(used)
    for constant in FITTED:
        assert constant.low <= found[constant.name] <= constant.high
    assert fit([check for check in published if check.row.measured.statistic == "allocated"]) == used


def test_a_source_is_left_out_of_the_fit_that_predicts_it(published):
    left = {one.source: one for one in leave_one_out(published)}
    assert set(left) == {"FQL", "QWEN", "TT"}
    without = fit([check for check in published if check.row.family != "TT"])
    assert left["TT"].values == without


def test_json_has_the_agreed_keys(published, throughput):
    content = as_json(published, "estimate", throughput)
    assert [one["id"] for one in content["rows"]] == [check.row.id for check in published]
    for one in content["rows"]:
        assert set(one) == {"id", "outcome", "fits_predicted", "skipped_because", "memory", "throughput"}
        if one["memory"] is not None:
            keys = {"predicted", "measured", "relative_error", "statistic", "headline"}
            assert set(one["memory"]) == keys
            assert not one["skipped_because"]
        if one["throughput"] is not None:
            keys = {"predicted", "measured", "relative_error", "headline", "network_assumed", "step_s", "exposed_s"}
            assert set(one["throughput"]) in (keys, {"skipped_because"})
    summary = content["summary"]
    assert summary["tensors"]["rows"] == 54
    assert sum(summary["feasibility"].values()) == sum(one["fits_predicted"] is not None for one in content["rows"])
    times = summary["throughput"]
    assert times["compared"] == times["all"]["rows"] == times["leave_one_source_out"]["all"]["rows"]
    assert times["compared"] + sum(times["skipped"].values()) == sum("throughput" in c.row.use for c in published)
    assert times["without_assumed_networks"]["rows"] < times["all"]["rows"]
    assert sum(count["pairs"] for count in times["ranking"]["by_field"].values()) == times["ranking"]["pairs"]
    assert len(times["ranking"]["wrong"]) == times["ranking"]["pairs"] - times["ranking"]["right"]


def test_json_without_throughput_says_nothing_of_it(published):
    content = as_json(published, "estimate")
    assert content["summary"]["throughput"] is None
    assert all(one["throughput"] is None for one in content["rows"])


def test_the_text_names_what_is_off_and_why(published, throughput):
    text = as_text(published, "estimate", throughput)
    for needed in (
        "by source",
        "by statistic",
        "furthest off",
        "assumed in the row",
        "does it fit?",
        "ALLOCATOR_FACTOR",
        "flat 45 % of the peak, all",
        "all, no assumed network",
        "by card",
        "pairs that differ in one decision",
        "bare communication",
    ):
        assert needed in text
    assert "context parallelism" in text


def test_the_trace_is_for_programs_that_shardwise_runs():
    fsdp1 = check_rows([MeasuredRow.model_validate(row(plan__fsdp_version=1))], "trace")[0]
    assert "fsdp1" in fsdp1.skipped_because
    several = single(plan__replicate=2, cluster__num_gpus=2, plan__global_batch=6)
    assert "one process" in check_rows([MeasuredRow.model_validate(several)], "trace")[0].skipped_because


@pytest.mark.parametrize(
    "lora", [None, {"rank": 8, "targets": ["q_proj", "v_proj"], "base_quantization": None, "adapter_dtype": "bf16"}]
)
def test_trace_and_estimate_agree_on_one_unwrapped_process(lora):
    alone = MeasuredRow.model_validate(single(lora=lora))
    (traced,), (estimated,) = check_rows([alone], "trace"), check_rows([alone])
    assert traced.skipped_because is None
    assert traced.memory.predicted == pytest.approx(estimated.memory.predicted, rel=0.02)
    assert "unsharded_parameters" not in {name for name, size in traced.predicted.peak.live.items() if size}


def test_trace_and_estimate_agree_on_fsdp2():
    sharded = MeasuredRow.model_validate(row())
    (traced,), (estimated,) = check_rows([sharded], "trace"), check_rows([sharded])
    assert traced.memory.predicted == pytest.approx(estimated.memory.predicted, rel=0.05)
