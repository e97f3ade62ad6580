"""Counts of cards as typed, and a job laid out on each: which plans are judged, with which batch."""

from __future__ import annotations

from dataclasses import replace

import pytest

from report.footprints import footprint
from report.timelines import RATED, STEP
from shardwise.catalogue.models import find_model
from shardwise.planner.by_shape import plan_by_shape
from shardwise.planner.scaling import read_counts, rows_per_gpu, scale
from shardwise.spec.cluster import Cluster
from shardwise.spec.problems import BadInput
from shardwise.spec.reader import read_job
from shardwise.spec.report import Report
from shardwise.spec.throughput import Price

FOUR = Cluster(name="4xA10", nodes=1, per_node=4, gpu=RATED, network="eth-80")


def planned(*settings, cluster=FOUR):
    job = read_job(None, ["model=llama-3.2-1b", "seq_len=64", *settings], needs_data=False)
    return plan_by_shape(job, find_model("llama-3.2-1b"), cluster)


def judge(other) -> Report:
    """30 ms on one machine, 60 ms on more."""
    timeline = STEP if other.cluster.nodes == 1 else replace(STEP, step_s=2 * STEP.step_s)
    return Report(instrument="estimate", plan=other.plan, footprint=footprint(), timeline=timeline)


def lines(*settings, counts=(4, 8), cluster=FOUR, **given):
    found = scale(planned(*settings, cluster=cluster), counts, judge=judge, **given)
    return {line.layout: line for line in found}


@pytest.mark.parametrize(
    ("text", "counts"),
    [
        ("8", (8,)),
        ("8,16,24", (8, 16, 24)),
        (" 8 , 16 ", (8, 16)),
        ("8,...,64", (8, 16, 32, 64)),
        ("8,16,...,64,128", (8, 16, 32, 64, 128)),
        ("8,16,\u2026,32", (8, 16, 32)),
        ("8,16,...,4096", tuple(8 * 2**power for power in range(10))),
        ("8,...,16", (8, 16)),
    ],
)
def test_counts_and_doubling(text, counts):
    assert read_counts(text, 8) == counts


@pytest.mark.parametrize(
    ("text", "value", "words"),
    [
        ("0", "0", "is not a count"),
        ("-8,16", "-8", "is not a count"),
        ("", "", "is not a count"),
        ("8,,16", "", "is not a count"),
        ("eight", "eight", "is not a count"),
        ("12", "12", "write 8 or 16"),
        ("4", "4", "write 8"),
        ("16,8", "16,8", "write 8,16"),
        ("8,8", "8,8", "write 8"),
        ("...,8", "...", "write a count before"),
        ("8,...", "...", "write a count before and behind"),
        ("8,...,...,16", "...", "write a count before and behind"),
        ("8,24,...,96", "8,24,...", "not twice 8"),
        ("8,...,48", "...,48", "end with 32 or 64"),
        ("8,...,8", "...,8", "end with 16"),
        (",".join(str(8 * number) for number in range(1, 40)), None, "leave some out"),
    ],
)
def test_what_is_no_list_of_counts_is_refused_with_the_remedy(text, value, words):
    with pytest.raises(BadInput) as caught:
        read_counts(text, 8)
    (problem,) = caught.value.problems
    assert problem.field == "--scale"
    assert value is None or problem.value == value
    assert words in f"{problem.reason} {problem.fix}"
    assert "doubling" in problem.allowed


def test_flat_hybrid_and_tensor_layouts_of_a_job():
    found = lines("fsdp=FULL_SHARD")
    meshes = {
        name: [(point.plan.strategy, point.plan.mesh.replicate, point.plan.mesh.shard) for point in line.points]
        for name, line in found.items()
        if name != "tensor"
    }
    assert meshes == {
        "flat": [("FULL_SHARD", 1, 4), ("FULL_SHARD", 1, 8)],
        "hybrid": [("FULL_SHARD", 1, 4), ("HYBRID_SHARD", 2, 4)],
    }
    assert list(found) == ["flat", "hybrid", "tensor"]


@pytest.mark.parametrize(
    ("settings", "flat", "hybrid"),
    [
        (("fsdp=SHARD_GRAD_OP",), "SHARD_GRAD_OP", "HYBRID_SHARD_ZERO2"),
        (("fsdp=NO_SHARD",), "NO_SHARD", "HYBRID_SHARD"),
        (("fsdp=HYBRID_SHARD", "mesh.shard=2"), "FULL_SHARD", "HYBRID_SHARD"),
    ],
)
def test_layouts_follow_the_job_s_strategy(settings, flat, hybrid):
    found = lines(*settings)
    assert [found[name].points[1].plan.strategy for name in ("flat", "hybrid")] == [flat, hybrid]


def test_each_card_keeps_its_rows():
    base = planned("fsdp=FULL_SHARD", "micro_batch=2", "global_batch=24")
    assert rows_per_gpu(base) == 6
    found = lines("fsdp=FULL_SHARD", "micro_batch=2", "global_batch=24", counts=(4, 8, 16))
    for name in ("flat", "hybrid"):
        plans = [point.plan for point in found[name].points]
        assert [plan.global_batch for plan in plans] == [24, 48, 96]
        assert {(plan.micro_batch, plan.accumulation_steps) for plan in plans} == {(2, 3)}
        assert [point.throughput.tokens for point in found[name].points] == [24 * 64, 48 * 64, 96 * 64]


def test_the_tensor_layout_takes_as_many_rows_as_fit():
    """2 rows a card are 8 for the 4 that share them; where 4 are too many, 2 and four times as often."""
    settings = ("fsdp=FULL_SHARD", "micro_batch=2", "global_batch=24")
    taken = {(point.plan.micro_batch, point.plan.accumulation_steps) for point in lines(*settings)["tensor"].points}
    assert taken == {(8, 3)}

    def small(other) -> Report:
        report = judge(other)
        return report if other.plan.micro_batch < 4 else replace(report, footprint=footprint(backward=100))

    (line,) = [line for line in scale(planned(*settings), (4, 8), judge=small) if line.layout == "tensor"]
    assert {(point.plan.micro_batch, point.plan.accumulation_steps, point.fits) for point in line.points} == {
        (2, 12, True)
    }
    nothing = scale(
        planned(*settings), (4,), judge=lambda other: replace(judge(other), footprint=footprint(backward=100))
    )
    assert [point.plan.micro_batch for line in nothing for point in line.points if line.layout == "tensor"] == [8]


def test_gains_and_price_come_from_the_judge():
    """Twice the tokens in twice the time: no gain from 4 to 8 cards."""
    found = lines("fsdp=FULL_SHARD", price=Price(amount=8.0, per="node"))["flat"]
    small, large = (point.throughput for point in found.points)
    assert small.tokens_per_s == pytest.approx(large.tokens_per_s)
    assert small.price_per_gpu_hour == 2.0
    assert found.points[0].exposed == pytest.approx({"all_gather": 2e-3, "reduce_scatter": 11.3e-3})


def test_a_layout_that_is_refused_says_why():
    """The fused loss head needs the whole head on every rank."""
    found = lines("fsdp=FULL_SHARD", "loss_head=fused")["tensor"]
    assert all(point.plan is None and point.refused.startswith("loss_head: ") for point in found.points)


def test_rows_that_cannot_be_kept_are_refused():
    """4 rows on tensor 2 x shard 4 are half a row for each of 8 cards: 2 rows on 4 cards, which are 4 data ranks."""
    cluster = FOUR.model_copy(update={"nodes": 2})
    found = lines("fsdp=FULL_SHARD", "mesh.tensor=2", "micro_batch=1", "global_batch=4", cluster=cluster)["flat"]
    assert found.points[0].plan is None
    assert "global_batch" in found.points[0].refused


def test_one_card_per_machine_has_one_layout():
    single = FOUR.model_copy(update={"per_node": 1, "name": "1xA10"})
    assert list(lines("fsdp=NO_SHARD", counts=(1, 2), cluster=single)) == ["flat"]


def test_a_count_that_is_not_timed_says_why():
    """A probe of two machines says nothing of four."""

    def two_at_most(other) -> Report:
        report = judge(other)
        return replace(report, timeline=None, notes=("no step time: four",)) if other.cluster.nodes > 2 else report

    found = scale(planned("fsdp=FULL_SHARD"), (4, 8, 16), judge=two_at_most)
    assert [[point.refused for point in line.points] for line in found] == 3 * [["", "", "no step time: four"]]


def test_machines_without_speeds_are_refused():
    def untimed(other) -> Report:
        return replace(judge(other), timeline=None, notes=("no step time: no speeds",))

    with pytest.raises(BadInput) as caught:
        scale(planned("fsdp=FULL_SHARD"), (4, 8), judge=untimed)
    (problem,) = caught.value.problems
    assert (problem.field, problem.value, problem.reason) == ("--scale", "4,8", "no step time: no speeds")
