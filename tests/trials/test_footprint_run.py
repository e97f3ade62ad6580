"""A plan's memory by a run on this machine: the same as the trace, and refused where it cannot be had."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from shardwise.catalogue.clusters import find_cluster
from shardwise.catalogue.models import find_model
from shardwise.cli.main import app
from shardwise.planner.by_shape import plan_by_shape
from shardwise.predict.trace import trace
from shardwise.spec.footprint import CATEGORIES
from shardwise.spec.problems import BadInput
from shardwise.spec.reader import read_job
from shardwise.trials import footprint_run as module
from shardwise.trials.footprint_run import footprint_run
from shardwise.trials.processes import HostsFailed

KIB = 1024


def planned(model, *settings, cluster="2xcpu"):
    job = read_job(None, [f"model={model}", "seq_len=40", *settings], needs_data=False)
    return plan_by_shape(job, find_model(str(model)), find_cluster(cluster))


def test_a_run_equals_the_trace_in_every_phase_and_category(tiny):
    found = planned(tiny("llama"), "fsdp=full_shard", "micro_batch=3", "global_batch=6", "use_lora=true", "lora_rank=5")
    run = footprint_run(found.job, found.plan, found.cluster).footprint
    traced = trace(found.workload, found.plan, found.cluster).footprint
    for phase in ("forward", "backward", "optimizer_step"):
        mine, its = run.of_phase(phase), traced.of_phase(phase)
        for category in CATEGORIES:
            one, other = mine.live.get(category, 0), its.live.get(category, 0)
            assert abs(one - other) <= max(0.01 * other, 16 * KIB), (phase, category, one, other)
    assert run.largest_buffer.bytes == traced.largest_buffer.bytes


def test_it_needs_processes_of_this_machine(tiny):
    for cluster in ("2xA10", "2x2xcpu"):
        found = planned(tiny("llama"), cluster=cluster)
        with pytest.raises(BadInput, match="CPU processes of this machine"):
            footprint_run(found.job, found.plan, found.cluster)


@pytest.mark.slow
def test_a_rank_that_fails_is_told_with_its_last_words_and_ends_with_four(tiny, monkeypatch):
    found = planned(tiny("llama"))
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "no-such-interface")
    with pytest.raises(HostsFailed, match=r"rank [01] ended with exit code"):
        footprint_run(found.job, found.plan, found.cluster)
    arguments = ["plan", "--model", str(tiny("llama")), "--cluster", "2xcpu", "seq_len=40", "--by", "run"]
    assert CliRunner().invoke(app, arguments).exit_code == 4


@pytest.mark.slow
def test_ranks_that_take_too_long_are_ended(tiny, monkeypatch):
    found = planned(tiny("llama"))
    monkeypatch.setattr(module, "TIMEOUT_S", 0.5)
    with pytest.raises(HostsFailed, match="took more than"):
        footprint_run(found.job, found.plan, found.cluster)


@pytest.mark.slow
def test_the_article_s_table_by_estimate_trace_and_run(tiny):
    """Where two instants are about as high, instruments may name either, so what is alive there is not compared."""
    arguments = ["plan", "--table", "--json", "--by", "estimate,trace,run", "--model", str(tiny("llama")), "seq_len=40"]
    result = CliRunner().invoke(app, [*arguments, "--cluster", "4xcpu", "global_batch=4"], catch_exceptions=False)
    rows = {row["strategy"]: row["by"] for row in json.loads(result.output)["rows"]}
    whole = rows["NO_SHARD"]["run"]
    for strategy, ranks in (("NO_SHARD", 1), ("SHARD_GRAD_OP", 4), ("FULL_SHARD", 4), ("HYBRID_SHARD", 2)):
        run = rows[strategy]["run"]
        for part in ("parameters", "gradients", "optimizer_states"):
            assert run[part] == pytest.approx(whole[part] / ranks, rel=0.03)  # rows are padded
            assert rows[strategy]["estimate"][part] == pytest.approx(run[part], rel=1e-3)
            assert rows[strategy]["trace"][part] == pytest.approx(run[part], rel=1e-3)
        for instrument in ("estimate", "trace"):
            peak = rows[strategy][instrument]["peak"]
            assert abs(peak - run["peak"]) <= max(0.01 * run["peak"], 16 * KIB), (strategy, instrument)
