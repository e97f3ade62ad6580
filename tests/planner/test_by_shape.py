"""Plans by shape alone are those that a run would make of the real model, and so is every change that is advised."""

from __future__ import annotations

import pytest

from shardwise.catalogue.clusters import find_cluster
from shardwise.catalogue.models import find_model
from shardwise.machine.prepare import preview
from shardwise.planner.advice import advise, by_estimate, changes
from shardwise.planner.by_shape import Planned, plan_by_shape, stored_dtype
from shardwise.planner.strategy_table import strategy_rows
from shardwise.report.strategy_table import stored_bytes
from shardwise.spec.job import Job
from shardwise.spec.problems import BadInput
from shardwise.spec.reader import job_to_dict, read_job, read_job_dict

LORA = ("use_lora=true", "lora_rank=5")


def asked(model, *settings: str, cluster: str = "4xA10") -> Job:
    return read_job(None, [f"model={model}", f'cluster="{cluster}"', *settings], needs_data=False)


def planned(model, *settings: str, cluster: str = "4xA10") -> Planned:
    job = asked(model, *settings, cluster=cluster)
    return plan_by_shape(job, find_model(str(model)), find_cluster(cluster))


JOBS = {
    "rule of thumb": ("seq_len=48",),
    "lora": ("seq_len=48", "fsdp=full_shard", "mixed_precision=fp16", *LORA),
    "replicas": ("fsdp=no_shard", "micro_batch=4", "accumulation=defer_all", "mixed_precision=bf16"),
    "hybrid": ("fsdp=hybrid_shard_zero2", "mesh={replicate: 2, shard: 2}", "accumulation=defer_replicate"),
    "groups": ("fsdp=full_shard", "fsdp.reshard_after_forward=2", "prefetch=2", "reduce_scatter.buffers=3"),
    "tensor": ("fsdp=shard_grad_op", "mesh.tensor=2", "activation_checkpointing=every_2"),
    "sgd": ("fsdp=zero2", "optimizer=sgd", "momentum=0.9", "offload=optimizer"),
    "selective": ("fsdp=full_shard", "activation_checkpointing=selective", "units.head=own", "offload=activations"),
    "compiled": ("fsdp=full_shard", "compile=true", "mixed_precision=bf16", "loss_head=chunked"),
    "16 bits": ("fsdp=full_shard", "mixed_precision={param_dtype: bf16, output_dtype: bf16}"),
}


@pytest.mark.parametrize("name", JOBS)
def test_the_plan_and_every_advised_change_are_what_a_run_would_decide_and_accept(tiny, name):
    folder = tiny("llama", kv=2)
    found, seen = planned(folder, *JOBS[name]), preview(asked(folder, *JOBS[name]))
    assert seen.plan == found.plan
    assert seen.units == found.units
    advised = advise(found, by_estimate(found).footprint)
    assert advised
    for advice in advised:
        again = preview(read_job_dict(job_to_dict(found.job), advice.settings, needs_data=False))
        other = planned_of(found, advice.settings)
        assert again.plan == other.plan, advice.settings
        assert again.units == other.units, advice.settings


def planned_of(found: Planned, settings) -> Planned:
    job = read_job_dict(job_to_dict(found.job), settings, needs_data=False)
    return plan_by_shape(job, found.workload.model, found.cluster)


def test_advice_is_ranked_and_says_what_the_estimate_says_of_the_change():
    found = planned("qwen2.5-0.5b", "fsdp=shard_grad_op", "micro_batch=4", "seq_len=512")
    before = by_estimate(found).footprint
    advised = advise(found, before)
    savings = [advice.lowers for advice in advised]
    assert savings == sorted(savings, reverse=True)
    for advice in advised:
        after = by_estimate(planned_of(found, advice.settings)).footprint
        assert advice.lowers == before.peak.allocated - after.peak.allocated > 0
        assert advice.peak == after.peak
        assert advice.device == after.device.total
        assert advice.fits == after.device.fits
    names = [setting for advice in advised for setting in advice.settings]
    assert {"activation_checkpointing=full", "micro_batch=2", "loss_head=chunked"} <= set(names)


def test_a_change_that_lowers_nothing_is_no_advice():
    found = planned("qwen2.5-0.5b", "fsdp=full_shard", "seq_len=512", "activation_checkpointing=full")
    assert not [a for a in advise(found, by_estimate(found).footprint) if "activation_checkpointing" in a.settings[0]]
    assert not [change for change in changes(found) if change.settings == ("fsdp=FULL_SHARD",)]


def test_half_the_rows_keep_the_global_batch():
    found = planned("gpt2", "micro_batch=6", "global_batch=48", "seq_len=32")
    (change,) = [change for change in changes(found) if change.settings[0].startswith("micro_batch")]
    other = planned_of(found, change.settings)
    assert (other.plan.micro_batch, other.plan.accumulation_steps, other.plan.global_batch) == (3, 4, 48)


def test_adapters_count_where_the_size_decides():
    """12.99B frozen, 13.00B with the adapters: what `preview` would count."""
    small = planned("llama-2-13b", *LORA, cluster="8xA100-80GB")
    large = planned("llama-2-13b", "use_lora=true", "lora_rank=512", cluster="8xA100-80GB")
    assert small.workload.model.parameters >= 13_000_000_000 or small.plan.strategy == "SHARD_GRAD_OP"
    assert large.plan.strategy == "FULL_SHARD"
    assert f"{large.units.parameters / 1e9:.1f}B parameters" in large.plan.reasons["strategy"]


def test_frozen_weights_rest_as_the_configuration_says():
    assert planned("llama-7b", *LORA).plan.dtypes.frozen_storage == stored_dtype(find_model("llama-7b")) == "fp16"
    assert planned("llama-7b", *LORA, "model.dtype=fp32").plan.dtypes.frozen_storage == "fp32"
    assert planned("llama-7b").plan.dtypes.frozen_storage is None


def test_an_evaluation_counts_where_rows_are_held_out():
    phases = [
        {instant.phase for instant in by_estimate(planned("gpt2", "seq_len=64", *settings)).footprint.peaks}
        for settings in ((), ("data=d.jsonl",), ("data={path: d.jsonl, held_out: 0.1}",))
    ]
    assert ["evaluation" in names for names in phases] == [False, False, True]


def test_units_inside_a_block_have_no_formula():
    for wrap in ("LlamaMLP", "[LlamaDecoderLayer, LlamaMLP]", "LlamaRMSNorm"):
        with pytest.raises(BadInput, match="use --by trace"):
            by_estimate(planned("smollm2-135m", "seq_len=32", f"units.wrap={wrap}"))
    whole = by_estimate(planned("smollm2-135m", "seq_len=32", "units.wrap=LlamaDecoderLayer", "units.head=own"))
    assert whole.footprint.peak == by_estimate(planned("smollm2-135m", "seq_len=32", "units.head=own")).footprint.peak


def test_rules_without_a_model_are_asked():
    with pytest.raises(BadInput, match="splits it"):
        planned("gpt2", "loss_head=fused", "mesh.tensor=2")
    with pytest.raises(BadInput, match="GPUs only"):
        planned("gpt2", "loss_head=fused", cluster="2xcpu")


@pytest.mark.parametrize(
    ("cluster", "settings", "names"),
    [
        ("1xA10", (), ["NO_SHARD"]),
        ("2xA10", (), ["NO_SHARD", "SHARD_GRAD_OP", "FULL_SHARD"]),
        ("4xA10", (), ["NO_SHARD", "SHARD_GRAD_OP", "FULL_SHARD", "HYBRID_SHARD"]),
        ("2x4xA10", (), ["NO_SHARD", "SHARD_GRAD_OP", "FULL_SHARD", "HYBRID_SHARD"]),
        ("4xA10", ("mesh.tensor=2",), ["NO_SHARD", "SHARD_GRAD_OP", "FULL_SHARD"]),
        ("3xA10", (), ["NO_SHARD", "SHARD_GRAD_OP", "FULL_SHARD"]),
    ],
)
def test_the_table_has_every_strategy_that_a_world_can_have(cluster, settings, names):
    found = planned("qwen2.5-0.5b", "fsdp=no_shard", "seq_len=64", *settings, cluster=cluster)
    rows = strategy_rows(found, {"estimate": by_estimate})
    assert [row.plan.strategy for row in rows] == names
    hybrid = [row.plan.mesh for row in rows if row.plan.strategy == "HYBRID_SHARD"]
    assert [(mesh.replicate, mesh.shard) for mesh in hybrid] == (
        [(2, 4)] if cluster == "2x4xA10" else [(2, 2)] * len(hybrid)
    )
    whole = rows[0].by["estimate"]
    for row in rows:
        found = row.by["estimate"]
        for part in ("parameters", "gradients", "optimizer_states"):
            assert getattr(found, part) == pytest.approx(getattr(whole, part) * row.share / rows[0].share, rel=2e-3)


def test_a_row_of_the_table_is_read_from_the_footprint():
    report = by_estimate(planned("qwen2.5-0.5b", "fsdp=full_shard", "seq_len=64"))
    row = stored_bytes(report.footprint)
    backward, step = report.footprint.of_phase("backward"), report.footprint.of_phase("optimizer_step")
    assert row.optimizer_states == step.live["optimizer_states"] == 2 * row.parameters
    assert row.gathered == backward.live.get("unsharded_parameters", 0) + backward.live.get("all_gather_buffers", 0)
    assert row.peak == report.footprint.peak.allocated
