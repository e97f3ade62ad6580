"""What holds for the time of every plan: plans at random over models, clusters and switches, the same each time.

Laws that look true and are not stand in docs/schedule.md, with what makes them fail.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from predict.random_plans import Drawn, some, workload_of
from shardwise.predict.estimate import estimate
from shardwise.predict.step_time import timeline_of
from shardwise.spec.cluster import Cluster, Figure
from shardwise.spec.curve import Curve
from shardwise.spec.method import Lora
from shardwise.spec.plan import Offload
from shardwise.spec.speeds import Measured
from shardwise.spec.timeline import COMMUNICATION

COUNT = 25
"""Plans that each law is tried on."""


def seconds(drawn: Drawn) -> float:
    """How long a step takes."""
    return timeline_of(*drawn, brief=True).step_s


def assert_no_slower(fast: Drawn, slow: Drawn, tolerance: float = 0.001) -> None:
    assert seconds(fast) <= seconds(slow) * (1 + tolerance), fast


@pytest.mark.parametrize("seed", range(3))
def test_every_plan_has_a_time(seed: int):
    """A step is as long as any lane works, and as what is computed and what is bare together; reductions and gathers
    take turns unless a group is their own."""
    for drawn in some(f"time {seed}", COUNT):
        report = estimate(*drawn)
        t, plan = report.timeline, drawn.plan
        assert t is not None, report.notes
        assert 0 < t.step_s < math.inf
        least = t.step_s * (1 + 1e-9)
        assert all(0 <= t.busy.get(lane, 0.0) <= least for lane in t.busy), drawn
        assert -1e-9 <= t.exposed_s <= t.communication_s + 1e-9
        assert t.busy["compute"] + t.exposed_s <= least
        assert all(t.exposed.get(lane, 0.0) <= t.busy.get(lane, 0.0) + 1e-9 for lane in COMMUNICATION)
        if not plan.reduce_scatter.separate_group and isinstance(plan.reshard_after_forward, bool):
            assert t.busy.get("all_gather", 0.0) + t.busy.get("reduce_scatter", 0.0) <= least
        if plan.mesh.shard == 1:
            assert t.busy.get("all_gather", 0.0) == t.busy.get("reduce_scatter", 0.0) == 0
        if plan.mesh.world == 1:
            assert t.busy.get("all_reduce", 0.0) == 0


def test_a_brief_timeline_has_the_same_totals():
    for drawn in some("brief", COUNT):
        full, brief = timeline_of(*drawn), timeline_of(*drawn, brief=True)
        assert (brief.spans, brief.waits) == ((), ())
        assert len(full.spans) > 0
        assert (brief.step_s, brief.exposed_s, brief.hidden_s) == (full.step_s, full.exposed_s, full.hidden_s)
        assert (brief.busy, brief.exposed) == (full.busy, full.exposed)


def twice(figure: Figure) -> Figure:
    return figure.model_copy(update={"value": 2 * figure.value})


def quicker(curve: Curve) -> Curve:
    return Curve(points=tuple((size, seconds / 2) for size, seconds in curve.points), source=curve.source)


def with_rates(cluster: Cluster, field: str) -> Cluster:
    """The cluster, one of its card's rates doubled, or what a probe measured of it taking half as long."""
    if cluster.measured is not None:
        return cluster.model_copy(update={"measured": with_curves(cluster.measured, field)})
    assert cluster.gpu is not None
    rates = cluster.gpu.rates
    assert rates is not None
    found: Any = getattr(rates, field)
    doubled = {name: twice(one) for name, one in found.items()} if field == "products" else twice(found)
    card = cluster.gpu.model_copy(update={"rates": rates.model_copy(update={field: doubled})})
    return cluster.model_copy(update={"gpu": card})


def with_curves(measured: Measured, field: str) -> Measured:
    if field == "link":
        collectives = tuple(one.model_copy(update={"curve": quicker(one.curve)}) for one in measured.collectives)
        return measured.model_copy(update={"collectives": collectives})
    if field == "host":
        return measured
    curves = {name: quicker(curve) for name, curve in getattr(measured.device, field).items()}
    return measured.model_copy(update={"device": measured.device.model_copy(update={field: curves})})


@pytest.mark.parametrize("field", ["products", "memory", "link", "host"])
def test_faster_hardware_is_never_slower(field: str):
    clusters: dict[str, Cluster] = {}
    for drawn in some(f"faster {field}", COUNT):
        faster = clusters.setdefault(drawn.cluster.name, with_rates(drawn.cluster, field))
        assert_no_slower(drawn._replace(cluster=faster), drawn)


def test_a_faster_network_is_never_slower():
    for drawn in some("network", COUNT, clusters=("2x8xA100-SXM-80GB eth-25",)):
        faster = drawn.cluster.model_copy(update={"network": "eth-100"})
        assert_no_slower(drawn._replace(cluster=faster), drawn)


def test_more_rows_at_once_take_longer_and_less_per_row():
    for drawn in some("rows", COUNT):
        once, more = seconds(drawn), seconds(drawn.change(micro_batch=2 * drawn.plan.micro_batch))
        assert once <= more <= 2 * once * 1.001, drawn


Change = Callable[[Drawn], Iterator[tuple[Drawn, Drawn]]]
"""Pairs of plans of which the first is never slower."""


def recomputing(drawn: Drawn) -> Iterator[tuple[Drawn, Drawn]]:
    if drawn.plan.offload.activations:
        return  # recomputing leaves less to travel
    kept = drawn.change(activation_checkpointing="none")
    yield from ((kept, drawn.change(activation_checkpointing=one)) for one in ("full", "selective", "every_2"))


def keeping_weights(drawn: Drawn) -> Iterator[tuple[Drawn, Drawn]]:
    if drawn.plan.mesh.shard > 1:
        yield drawn.change(reshard_after_forward=False), drawn.change(reshard_after_forward=True)


def deferring_replicas(drawn: Drawn) -> Iterator[tuple[Drawn, Drawn]]:
    deferred = drawn.change(accumulation_mode="defer_replicate")
    yield deferred, drawn.change(accumulation_mode="reduce_each")


def a_group_of_its_own(drawn: Drawn) -> Iterator[tuple[Drawn, Drawn]]:
    reduce = drawn.plan.reduce_scatter
    apart, shared = (reduce.model_copy(update={"separate_group": one}) for one in (True, False))
    yield drawn.change(reduce_scatter=apart), drawn.change(reduce_scatter=shared)


def more_buffers(drawn: Drawn) -> Iterator[tuple[Drawn, Drawn]]:
    reduce = drawn.plan.reduce_scatter
    two, one = (reduce.model_copy(update={"buffers": count}) for count in (2, 1))
    yield drawn.change(reduce_scatter=two), drawn.change(reduce_scatter=one)


def gathering_further_ahead(drawn: Drawn) -> Iterator[tuple[Drawn, Drawn]]:
    depths = [(0, 1), (1, 1), (2, 2), (3, 3)]
    plans = [
        drawn.change(prefetch=drawn.plan.prefetch.model_copy(update={"forward": ahead, "backward": behind}))
        for ahead, behind in depths
    ]
    yield from zip(plans[1:], plans, strict=False)


def nothing_on_the_host(drawn: Drawn) -> Iterator[tuple[Drawn, Drawn]]:
    if drawn.workload.lora is None:
        yield drawn.change(offload=Offload()), drawn


def compiling(drawn: Drawn) -> Iterator[tuple[Drawn, Drawn]]:
    if drawn.plan.mesh.tensor == 1:
        yield drawn.change(compile=True), drawn.change(compile=False)


def fewer_launches(drawn: Drawn) -> Iterator[tuple[Drawn, Drawn]]:
    one_by_one = drawn.change(optimizer_implementation="for_loop")
    yield drawn.change(optimizer_implementation="foreach"), one_by_one


LAWS: list[Change] = [
    recomputing,
    keeping_weights,
    deferring_replicas,
    a_group_of_its_own,
    more_buffers,
    gathering_further_ahead,
    nothing_on_the_host,
    compiling,
    fewer_launches,
]


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)
def test_never_slower(law: Change):
    for drawn in some(f"law {law.__name__}", COUNT):
        for fast, slow in law(drawn):
            assert_no_slower(fast, slow, 0.002)


@pytest.mark.parametrize("mode", ["defer_all", "defer_replicate"])
def test_deferring_never_sends_more(mode: str):
    for drawn in some(f"sends {mode}", COUNT):
        each, deferred = (
            timeline_of(*drawn.change(accumulation_mode=one), brief=True) for one in ("reduce_each", mode)
        )
        for lane in ("reduce_scatter", "all_reduce"):
            assert deferred.busy.get(lane, 0.0) <= each.busy.get(lane, 0.0) * (1 + 1e-9) + 1e-12


def test_adapters_on_large_models_are_faster():
    """Where products are large, what weight gradients would take is more than what adapters add."""
    lora, checked = Lora(rank=16), 0
    for drawn in some("adapters", COUNT, models=("llama-2-7b", "llama-2-70b"), clusters=("8xA100-SXM-80GB",)):
        if drawn.plan.mesh.tensor == 1:
            name, dtypes = drawn.workload.model.name, drawn.plan.dtypes
            whole = drawn._replace(workload=workload_of(name, 2048, None, False))
            adapters = drawn._replace(workload=workload_of(name, 2048, lora, False))
            adapters = adapters.change(dtypes=dtypes.model_copy(update={"frozen_storage": dtypes.trained_storage}))
            assert_no_slower(adapters, whole)
            checked += 1
    assert checked > COUNT // 2
