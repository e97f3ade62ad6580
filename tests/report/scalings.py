"""Scaling lines made by hand."""

from __future__ import annotations

from report.footprints import answer, footprint
from report.timelines import RATED
from shardwise.report.scaling_table import ScalingLine, ScalingPoint
from shardwise.spec.cluster import Cluster
from shardwise.spec.throughput import Flops, Throughput

ROWS = 8


def point(gpus: int, step_s: float, *, price=None, fits=True, needed=10 * 2**30, **exposed: float) -> ScalingPoint:
    """`gpus` cards, 8 a node, that take `step_s` for 8 rows of 64 tokens each."""
    throughput = Throughput(
        step_s=step_s,
        tokens=ROWS * 64 * gpus,
        gpus=gpus,
        flops=Flops(model=1e12, again=0),
        peak_flops=None,
        price_per_gpu_hour=price,
    )
    return ScalingPoint(
        cluster=Cluster(name=f"{gpus // 8}x8xA10", nodes=gpus // 8, per_node=8, gpu=RATED, network="eth-80"),
        plan=answer(footprint()).plan,
        throughput=throughput,
        exposed_s=sum(exposed.values()),
        exposed=exposed,
        needed=needed,
        fits=fits,
    )


def refused(gpus: int, reason: str) -> ScalingPoint:
    """A count that has no plan."""
    cluster = Cluster(name="x", nodes=gpus // 8, per_node=8, gpu=RATED)
    return ScalingPoint(cluster=cluster, plan=None, throughput=None, exposed={}, refused=reason)


def line(*points: ScalingPoint, layout="flat", title="FULL_SHARD over all cards") -> ScalingLine:
    """One layout."""
    return ScalingLine(layout=layout, title=title, points=points)
