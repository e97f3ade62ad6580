"""The article's table for any model and world: its strategies, planned and judged."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from shardwise.planner.advice import Judge
from shardwise.planner.by_shape import Planned, plan_by_shape
from shardwise.report.strategy_table import ARTICLE, StrategyRow, stored_bytes
from shardwise.spec.reader import job_to_dict, read_job_dict
from shardwise.spec.report import Instrument


def strategy_rows(planned: Planned, judges: Mapping[Instrument, Judge]) -> list[StrategyRow]:
    """Return a row per strategy that this world can have.

    Args:
        planned: The job; its own strategy does not matter.
        judges: Instruments by name.
    """
    return [
        StrategyRow(
            title=ARTICLE[other.plan.strategy],
            plan=other.plan,
            share=1 / (other.plan.mesh.shard * other.plan.mesh.tensor),
            by={name: stored_bytes(judge(other).footprint) for name, judge in judges.items()},
        )
        for other in _strategies(planned)
    ]


def _strategies(planned: Planned) -> Iterator[Planned]:
    ranks = planned.plan.mesh.data_ranks
    per_node = max(1, planned.cluster.per_node // planned.plan.mesh.tensor)
    for strategy in ARTICLE:
        if strategy != "NO_SHARD" and ranks == 1:
            continue
        shard = "null"
        if strategy == "HYBRID_SHARD":
            inside = per_node if per_node < ranks and ranks % per_node == 0 else ranks // 2
            if inside < 2 or ranks % inside or ranks == inside:
                continue
            shard = str(inside)
        mode = "reduce_each" if planned.plan.accumulation_mode == "defer_replicate" else planned.plan.accumulation_mode
        settings = (f"fsdp={strategy}", "mesh.replicate=null", f"mesh.shard={shard}", f"accumulation={mode}")
        job = read_job_dict(job_to_dict(planned.job), settings, needs_data=False)
        yield plan_by_shape(job, planned.workload.model, planned.cluster)
