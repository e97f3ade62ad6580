"""A job on ever more machines: flat, hybrid and tensor layouts, planned and timed as if each had been typed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise

from shardwise.planner.advice import Judge, by_estimate
from shardwise.planner.by_shape import Planned, plan_by_shape
from shardwise.predict.throughput import throughput_of
from shardwise.report.scaling_table import ScalingLine, ScalingPoint, flat_title
from shardwise.spec.cluster import CPU, Cluster
from shardwise.spec.layout import StrategyName
from shardwise.spec.problems import BadInput, Problem
from shardwise.spec.reader import job_to_dict, read_job_dict
from shardwise.spec.throughput import Price

FIELD = "--scale"
MOST_COUNTS = 32
ELLIPSIS = ("...", "\u2026")
ALLOWED = "counts of cards, ascending, such as 8,16,32 or 8,...,4096 (doubling)"

_PLAIN: dict[StrategyName, StrategyName] = {"HYBRID_SHARD": "FULL_SHARD", "HYBRID_SHARD_ZERO2": "SHARD_GRAD_OP"}
"""Strategy with replicas -> the same without."""
_HYBRID: dict[StrategyName, StrategyName] = {
    "FULL_SHARD": "HYBRID_SHARD",
    "SHARD_GRAD_OP": "HYBRID_SHARD_ZERO2",
    "NO_SHARD": "HYBRID_SHARD",
}
"""Strategy without replicas -> sharded inside a node."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Layout:
    """One way to lay a job out, whatever the number of cards."""

    name: str
    title: str
    strategy: StrategyName
    tensor: int = 1


def read_counts(text: str, per_node: int) -> tuple[int, ...]:
    """Return the counts of cards that a text names, where `...` stands for doubling.

    Args:
        text: Such as `8,16,...,4096`.
        per_node: Cards of one machine, which each count must be a multiple of.

    Raises:
        BadInput: what is no count, not ascending, or not whole machines, with the remedy.
    """
    counts: list[int] = []
    words = [word.strip() for word in text.split(",")]
    for place, word in enumerate(words):
        if word not in ELLIPSIS:
            counts.append(_count(word, per_node))
        elif not counts or place + 1 == len(words) or words[place + 1] in ELLIPSIS:
            raise _refused(word, "stands between two counts", "write a count before and behind it")
        else:
            counts += _doublings(counts, _count(words[place + 1], per_node))
    for before, after in pairwise(counts):
        if after <= before:
            fix = f"write {','.join(map(str, sorted(set(counts))))}"
            raise _refused(text, f"counts ascend, and {after} comes behind {before}", fix)
    if len(counts) > MOST_COUNTS:
        raise _refused(text, f"is {len(counts)} counts, more than {MOST_COUNTS}", "leave some out")
    return tuple(counts)


def _count(word: str, per_node: int) -> int:
    if not word.isdecimal() or int(word) == 0:
        raise _refused(word, "is not a count of cards", "")
    count = int(word)
    if count % per_node:
        down, up = count // per_node * per_node, (count // per_node + 1) * per_node
        fix = f"write {down} or {up}" if down else f"write {up}"
        raise _refused(word, f"is not a number of whole machines of {per_node}", fix)
    return count


def _doublings(counts: Sequence[int], last: int) -> list[int]:
    """Return the counts that an ellipsis stands for: between what comes before it and `last`."""
    if len(counts) > 1 and counts[-1] != 2 * counts[-2]:
        reason = f"`...` means doubling, and {counts[-1]} is not twice {counts[-2]}"
        raise _refused(f"{counts[-2]},{counts[-1]},...", reason, f"write {counts[-2]},...,{last} or every count")
    found, size = [], 2 * counts[-1]
    while size < last:
        found.append(size)
        size *= 2
    if size != last:
        near = f"{size // 2} or {size}" if found else str(size)
        raise _refused(f"...,{last}", f"doubling {counts[-1]} does not lead to {last}", f"end with {near}")
    return found


def _refused(value: str, reason: str, fix: str) -> BadInput:
    return BadInput(Problem(field=FIELD, value=value, reason=reason, allowed=ALLOWED, fix=fix))


def rows_per_gpu(planned: Planned) -> Fraction:
    """Return the rows of a step over the cards: what each keeps when their number changes."""
    return Fraction(planned.plan.global_batch, planned.plan.mesh.world)


def scale(
    planned: Planned, counts: Sequence[int], *, judge: Judge = by_estimate, price: Price | None = None
) -> tuple[ScalingLine, ...]:
    """Return each layout on each count of cards, of the same machines, with the rows of a step per card kept.

    Flat: the job's strategy over all cards. Hybrid: sharded inside a machine, replicas over machines; on one machine it
    is flat. Tensor: matrix products shared inside a machine, with sequence parallel norms, sharded over machines; so
    many times the rows per forward as cards share them, or the largest half of a half of that which fits. A layout that
    is refused says why.

    Args:
        planned: The job; its own cluster gives machine and network.
        counts: Cards, ascending, whole machines each.
        judge: The instrument; where its report has no timeline, its last note is the reason.
        price: What cards cost; None: not known.

    Raises:
        BadInput: no layout on any count; the first reason, such as that speeds of the machines are not known.
    """
    lines = tuple(
        ScalingLine(
            layout=layout.name,
            title=layout.title,
            points=tuple(_point(planned, layout, count, judge, price) for count in counts),
        )
        for layout in _layouts(planned)
    )
    if not any(point.plan is not None for line in lines for point in line.points):
        reason = lines[0].points[0].refused
        raise BadInput(Problem(field=FIELD, value=",".join(map(str, counts)), reason=reason))
    return lines


def _layouts(planned: Planned) -> Iterator[_Layout]:
    strategy = planned.plan.strategy
    plain = _PLAIN.get(strategy, strategy)
    per_node = planned.cluster.per_node
    yield _Layout(name="flat", title=flat_title(plain), strategy=plain)
    if per_node == 1:
        return
    hybrid = _HYBRID[plain]
    title = f"{hybrid}: sharded inside a machine, replicas over machines"
    yield _Layout(name="hybrid", title=title, strategy=hybrid)
    sharded: StrategyName = "FULL_SHARD" if plain == "NO_SHARD" else plain
    title = f"tensor {per_node} inside a machine x {sharded} over machines"
    yield _Layout(name="tensor", title=title, strategy=sharded, tensor=per_node)


def _point(planned: Planned, layout: _Layout, count: int, judge: Judge, price: Price | None) -> ScalingPoint:
    """Return a layout on so many cards, with as many rows per forward as fit."""
    first = None
    for rows in _rows_per_forward(planned, layout):
        point = _judged(planned, layout, rows, _grown(planned.cluster, count), judge, price)
        if point.plan is not None and point.fits is not False:
            return point
        first = first or point
    assert first is not None
    return first


def _rows_per_forward(planned: Planned, layout: _Layout) -> Iterator[int]:
    """Yield rows that a data rank could take at a time: the job's for each card that shares them, and halves."""
    rows = max(1, planned.plan.micro_batch * layout.tensor // planned.plan.mesh.tensor)
    yield rows
    while layout.tensor > 1 and rows % 2 == 0 and rows > planned.plan.micro_batch:
        rows //= 2
        yield rows


def _judged(
    planned: Planned, layout: _Layout, rows: int, cluster: Cluster, judge: Judge, price: Price | None
) -> ScalingPoint:
    try:
        other = _laid_out(planned, layout, rows, cluster)
    except BadInput as error:
        problem = error.problems[0]
        return _refusal(cluster, f"{problem.field}: {problem.reason}")
    report = judge(other)
    timeline, device = report.timeline, report.footprint.device
    if timeline is None:
        return _refusal(cluster, report.notes[-1] if report.notes else "its step is not timed")
    return ScalingPoint(
        cluster=cluster,
        plan=other.plan,
        throughput=throughput_of(timeline, other.workload, other.plan, cluster, price),
        exposed_s=timeline.exposed_s,
        exposed={lane: seconds for lane, seconds in timeline.exposed.items() if seconds > 0},
        needed=report.footprint.peak.allocated if device is None else device.needed.value,
        fits=None if device is None else device.fits,
    )


def _refusal(cluster: Cluster, reason: str) -> ScalingPoint:
    return ScalingPoint(cluster=cluster, plan=None, throughput=None, exposed={}, refused=reason)


def _grown(cluster: Cluster, count: int) -> Cluster:
    nodes = count // cluster.per_node
    card = CPU if cluster.gpu is None else cluster.gpu.name
    network = f" {cluster.network}" if cluster.network else ""
    return cluster.model_copy(update={"nodes": nodes, "name": f"{nodes}x{cluster.per_node}x{card}{network}"})


def _laid_out(planned: Planned, layout: _Layout, micro: int, cluster: Cluster) -> Planned:
    """Return the job's plan under a layout.

    Raises:
        BadInput: why there is none.
    """
    rows = rows_per_gpu(planned) * cluster.world
    if rows.denominator > 1:
        each = rows_per_gpu(planned)
        reason = f"{each} rows for each of {cluster.world} cards are no whole number"
        raise BadInput(Problem(field="global_batch", reason=reason, fix="choose a multiple of the cards"))
    alone = cluster.nodes == 1
    strategy = _PLAIN.get(layout.strategy, layout.strategy) if alone else layout.strategy
    deferred = planned.plan.accumulation_mode == "defer_replicate"
    settings = (
        f"fsdp={'NO_SHARD' if alone and layout.tensor > 1 else strategy}",
        "mesh.replicate=null",
        f"mesh.shard={cluster.per_node if strategy.startswith('HYBRID') else 'null'}",
        f"mesh.tensor={layout.tensor}",
        f"mesh.sequence_parallel={'true' if layout.tensor > 1 else 'false'}",
        f"accumulation={'reduce_each' if deferred else planned.plan.accumulation_mode}",
        f"micro_batch={micro}",
        f"global_batch={rows.numerator}",
    )
    job = read_job_dict(job_to_dict(planned.job), settings, needs_data=False)
    return plan_by_shape(job, planned.workload.model, cluster)
