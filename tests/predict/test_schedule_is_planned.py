"""What a schedule runs is what the plan means: every collective of `collectives_of_step`, as often, as large, and over
the same ranks. Two ways to the same figures that share nothing but the units."""

from __future__ import annotations

from collections import Counter
from functools import cache
from typing import Any

import pytest

from predict.estimate_grid import BF16, hybrid, plan_of, replicas
from predict.random_plans import some
from shardwise.catalogue.clusters import find_cluster
from shardwise.catalogue.models import model_from_config
from shardwise.predict.collectives import collectives_of_step
from shardwise.predict.links import Links, group_of, links_of
from shardwise.predict.step_time import timeline_of
from shardwise.predict.unit_rows import unit_table
from shardwise.spec.cluster import Cluster
from shardwise.spec.layout import Prefetch, ReduceScatter, Units
from shardwise.spec.method import Lora
from shardwise.spec.plan import Plan
from shardwise.spec.units import UnitRow, UnitTable
from shardwise.spec.workload import Workload

CONFIG = {
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 10,
    "num_attention_heads": 4,
    "vocab_size": 4096,
}
EACH, ALL, REPLICAS = (
    {"accumulation_steps": 3, "accumulation_mode": mode} for mode in ("reduce_each", "defer_all", "defer_replicate")
)
OWN = {"units": Units(embedding="own", head="own")}
KEEP = {"strategy": "SHARD_GRAD_OP", "reshard_after_forward": False}
ZERO2 = {**hybrid(2, 8), **KEEP, "strategy": "HYBRID_SHARD_ZERO2"}
PLANS: dict[str, dict[str, Any]] = {
    "full": {},
    "full, each": EACH,
    "full, deferred": ALL,
    "kept": {**KEEP, **EACH},
    "pairs": {"reshard_after_forward": 2, **EACH},
    "groups of 8": {"reshard_after_forward": 8, **ALL, **OWN},
    "hybrid, each": {**hybrid(2, 8), **EACH},
    "hybrid, replicas deferred": {**hybrid(2, 8), **REPLICAS},
    "hybrid, deferred": {**hybrid(4, 4), **ALL, **OWN},
    "hybrid, pairs": {**hybrid(2, 8), **REPLICAS, "reshard_after_forward": 2},
    "hybrid, kept": {**ZERO2, **REPLICAS},
    "replicas": {**replicas(16), "reshard_after_forward": False, **REPLICAS},
    "own ends": {**OWN, **EACH},
    "own ends, kept": {**OWN, **KEEP},
    "checkpointed": {"activation_checkpointing": "every_2", **EACH},
    "prefetch 3": {"prefetch": Prefetch(forward=3, backward=3, async_all_gather=True), **EACH},
    "prefetch 0": {"prefetch": Prefetch(forward=0, backward=0, async_all_gather=True), **OWN},
    "separate group": {"reduce_scatter": ReduceScatter(buffers=3, separate_group=True, asynchronous=True), **EACH},
    "fp16": {"dtypes": BF16.model_copy(update={"param": "fp16", "reduce": "fp16", "loss_scaling": True}), **EACH},
}


@cache
def machines() -> tuple[Cluster, Links]:
    """Two machines."""
    cluster = find_cluster("2x8xA100-SXM-80GB roce-200")
    return cluster, links_of(cluster)


def counted(workload: Workload, plan: Plan, cluster: Cluster) -> Counter[tuple[str, str]]:
    """How often a schedule runs each kind of collective for each unit."""
    spans = timeline_of(workload, plan, cluster).spans
    lanes = ("all_gather", "reduce_scatter", "all_reduce")
    return Counter((span.lane, span.unit) for span in spans if span.lane in lanes and span.what != "exchange")


def planned(workload: Workload, plan: Plan, cluster: Cluster) -> Counter[tuple[str, str]]:
    """How often the plan means it to: what the collectives of a unit alone add to those of a step without units."""
    found: Counter[tuple[str, str]] = Counter()
    without = _of_units((), plan, cluster)
    table = unit_table(workload, plan).rows
    for row in table:
        name = "root" if row is table[-1] else row.name
        for (kind, _, _), count in (_of_units((row,), plan, cluster) - without).items():
            found["reduce_scatter" if kind == "all_to_all" else kind, name] += count
    return found


def _of_units(rows: tuple[UnitRow, ...], plan: Plan, cluster: Cluster) -> Counter[tuple[str, str, int]]:
    step = collectives_of_step(
        plan, UnitTable(rows=rows), device_type=cluster.device_type, leave_tensor_out=plan.mesh.tensor > 1
    )
    return Counter({(row.kind, row.axis, row.payload_bytes): row.count for row in step.rows})


@pytest.mark.parametrize("lora", [None, Lora(rank=8)], ids=["all weights", "adapters"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("fields", PLANS.values(), ids=PLANS)
def test_a_schedule_runs_what_is_planned(fields: dict[str, Any], tied: bool, lora: Lora | None):
    """Counts by unit; and by lane the seconds of all, which say that sizes and ranks are the same too."""
    cluster, links = machines()
    workload = Workload(
        model=model_from_config({**CONFIG, "tie_word_embeddings": tied}, name="small"), seq_len=64, lora=lora
    )
    plan = plan_of(cluster=cluster, lora=lora is not None, **fields)
    assert counted(workload, plan, cluster) == planned(workload, plan, cluster)
    busy: Counter[str] = Counter()
    for row in collectives_of_step(plan, unit_table(workload, plan), device_type="cuda").rows:
        group = group_of(row.axis, plan.mesh, cluster.per_node)
        busy[row.kind] += row.count * links.seconds(row.kind, row.payload_bytes, group)  # type: ignore[arg-type]
    timeline = timeline_of(workload, plan, cluster)
    for kind in ("all_gather", "reduce_scatter", "all_reduce"):
        assert timeline.busy[kind] == pytest.approx(busy[kind]), kind


@pytest.mark.parametrize("seed", range(5))
def test_any_plan_runs_what_is_planned(seed: int):
    """Over models, clusters and switches at random, CPU processes among them; of more than 3 micro-batches those in the
    middle are not listed."""
    for drawn in some(f"planned {seed}", 10):
        few = drawn.change(accumulation_steps=min(3, drawn.plan.accumulation_steps))
        assert counted(*few) == planned(*few), few
