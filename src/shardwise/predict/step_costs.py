"""From a plan's step to the seconds of its pieces: what the schedule is made from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shardwise.predict import step_moves
from shardwise.predict.blocks import Computation
from shardwise.predict.collectives import COUNTS_BYTES, LOSS_BYTES, NORM_BYTES, OVERFLOW_BYTES
from shardwise.predict.links import Group, Links, group_of
from shardwise.predict.pace import Pace
from shardwise.predict.pace.base import ADAM_BYTES
from shardwise.predict.schedule.costs import RootCosts, Rules, StepCosts, UnitCosts, UpdateCosts
from shardwise.predict.terms.facts import PlacedUnit
from shardwise.predict.terms.step import Step
from shardwise.predict.terms.unit_bytes import UnitBytes
from shardwise.predict.unit_rows import unit_kinds
from shardwise.predict.work import PartWork, Work
from shardwise.spec.cluster import Cluster
from shardwise.spec.plan import Plan
from shardwise.spec.prefetch import ahead_of, behind_of
from shardwise.spec.runtime import SHARDWISE, Runtime
from shardwise.spec.speeds import TimedKind

AXES = ("shard", "replicate", "tensor", "world")


@dataclass(frozen=True, kw_only=True, slots=True)
class Speeds:
    """Where a step runs, in seconds of what it does."""

    cluster: Cluster
    """The machines."""
    pace: Pace
    """Devices and hosts."""
    links: Links
    """Collectives."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Place:
    """A unit as the rules of prefetching see it."""

    block: int | None
    checkpointed: bool
    has_backward: bool


class Costing:
    """Seconds of one workload's steps on one cluster; what several plans have in common is worked out once."""

    def __init__(self, computed: Computation, speeds: Speeds) -> None:
        self.computed, self.speeds = computed, speeds
        self._units: dict[tuple[object, ...], tuple[UnitCosts, object]] = {}
        self._orders: dict[tuple[object, ...], tuple[_Order, object]] = {}

    def step(self, step: Step) -> StepCosts:
        """Return the pieces of a step, in seconds."""
        facts, plan = step.sharding.facts, step.plan
        order = self._order(step)
        scale = _Scale(self.speeds, self.computed.runtime, plan)
        units = tuple(self._unit(unit, work, scale) for unit, work in zip(facts.units, _works(step), strict=True))
        return StepCosts(
            units=units,
            names=order.names,
            root=self._root(step, scale),
            update=self._update(step, scale),
            rules=scale.rules,
            ahead=order.ahead,
            behind=order.behind,
            late=facts.late,
            buffers=plan.reduce_scatter.buffers,
            separate_group=plan.reduce_scatter.separate_group,
            background_gathers=plan.prefetch.async_all_gather,
            background_reductions=plan.reduce_scatter.asynchronous,
            micro_batches=plan.accumulation_steps,
            mode=plan.accumulation_mode,
            adding=scale.adding(step),
            post=scale.post,
            slowdown=self.speeds.pace.slowdown,
        )

    def _unit(self, unit: PlacedUnit, work: PartWork | None, scale: _Scale) -> UnitCosts:
        key = (id(unit), id(work), scale.key)
        found = self._units.get(key)
        if found is None:
            found = self._units[key] = (unit_costs(unit, work, scale), (unit, work))
        return found[0]

    def _root(self, step: Step, scale: _Scale) -> RootCosts:
        facts, ends = step.sharding.facts, step.parts.ends
        placed = PlacedUnit(
            bytes=facts.root, name="root", reshards=False, has_backward=True, block_kind=None, recomputed=False
        )
        own = {unit.name for unit in facts.units if unit.block_kind is None}
        model = self.computed.workload.model
        embed = None if model.embedding in own else ends.embedding.work
        head = None if model.head in own else ends.head.work
        seconds, issue = scale.seconds, scale.issue
        return RootCosts(
            unit=unit_costs(placed, None, scale),
            embed=seconds(embed.forward) if embed else 0.0,
            head=seconds(head.forward) if head else 0.0,
            head_backward=seconds(head.backward) if head else 0.0,
            embed_backward=seconds(embed.backward) if embed else 0.0,
            embed_issue=issue(embed.forward) if embed else 0.0,
            head_issue=issue(head.forward) if head else 0.0,
            head_backward_issue=issue(head.backward) if head else 0.0,
            embed_backward_issue=issue(embed.backward) if embed else 0.0,
        )

    def _update(self, step: Step, scale: _Scale) -> UpdateCosts:
        plan, pace, facts = step.plan, scale.speeds.pace, step.sharding.facts
        kinds = unit_kinds(self.computed.workload, plan)
        elements = sum(kind.rank_trained_elements * kind.count for kind in kinds)
        tensors = sum(sum(tensor.trained for tensor in kind.tensors) * kind.count for kind in kinds)
        updated = step_moves.update(elements, tensors, plan)
        on_host = facts.offloads
        states = step_moves.state_bytes(elements, plan) if plan.offload.optimizer and not plan.offload.parameters else 0
        away = facts.device_type == "cuda"
        weights = sum(unit.bytes.gathered for unit in facts.units) + facts.root.gathered
        return UpdateCosts(
            agree=scale.collective("all_reduce", COUNTS_BYTES, "world") if scale.runtime == SHARDWISE else 0.0,
            clip=pace.host_adam(elements) / 2 if on_host else pace.copy(*step_moves.clip(elements, tensors, plan)),
            clip_exchange=scale.agreements(),
            update=0.0 if on_host else pace.copy(*updated),
            host_update=pace.host_adam(updated.moved / ADAM_BYTES) if on_host else 0.0,
            gather=scale.collective("all_gather", weights, "shard") if scale.rules == "ddp" else 0.0,
            fetch=pace.host_copy(states) if away else 0.0,
            store=pace.host_copy(states) if away else 0.0,
        )

    def _order(self, step: Step) -> _Order:
        facts, prefetch = step.sharding.facts, step.plan.prefetch
        key = (id(facts.units), prefetch.forward, prefetch.backward)
        found = self._orders.get(key)
        if found is None:
            found = self._orders[key] = (order_of(step), facts.units)
        return found[0]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Order:
    """Names of units, and which are gathered ahead of which."""

    names: tuple[str, ...]
    ahead: tuple[tuple[int, ...], ...]
    behind: tuple[tuple[int, ...], ...]


def order_of(step: Step) -> _Order:
    """Return names and prefetching of a step's units."""
    facts, prefetch, first = step.sharding.facts, step.plan.prefetch, step.sharding.first_block
    names, places = [], []
    for place, unit in enumerate(facts.units):
        block = None if unit.block_kind is None else place - first
        names.append(unit.name if block is None else f"{step.block_list}.{block}")
        places.append(_Place(block=block, checkpointed=unit.recomputed, has_backward=unit.has_backward))
    count = len(places)
    return _Order(
        names=tuple(names),
        ahead=tuple(tuple(ahead_of(places, place, prefetch)) for place in (*range(count), -1)),
        behind=tuple(tuple(behind_of(places, place, prefetch)) for place in range(count + 1)),
    )


class _Scale:
    """Seconds of what one plan's units do."""

    def __init__(self, speeds: Speeds, runtime: Runtime, plan: Plan) -> None:
        self.speeds, self.runtime, self.plan = speeds, runtime, plan
        mesh, per_node = plan.mesh, speeds.cluster.per_node
        self.groups = {axis: group_of(axis, mesh, per_node) for axis in AXES}
        self.rules = rules_of(runtime, speeds.cluster)
        dtypes = plan.dtypes
        self.key = (
            (mesh.replicate, mesh.shard, mesh.tensor, plan.accumulation_mode, plan.accumulation_steps > 1),
            (dtypes.frozen_storage, dtypes.trained_storage, dtypes.param, dtypes.reduce, plan.offload.parameters),
        )

    @property
    def post(self) -> float:
        """Seconds of the main thread for starting a collective in the background; on GPUs streams do that."""
        measured = self.speeds.cluster.measured
        return measured.device.post_s if measured is not None and self.rules == "gloo" else 0.0

    def group(self, axis: str) -> Group:
        """Return how the groups of an axis, or of a part of it (`shard/4`), lie on the machines."""
        found = self.groups.get(axis)
        if found is None:
            found = self.groups[axis] = group_of(axis, self.plan.mesh, self.speeds.cluster.per_node)
        return found

    def collective(self, kind: TimedKind, payload: float, axis: str) -> float:
        """Return the seconds of a collective; 0 over one rank or of nothing."""
        group = self.group(axis)
        if payload <= 0 or group.nodes * group.per_node == 1:
            return 0.0
        return self.speeds.links.seconds(kind, payload, group)

    def seconds(self, work: Work) -> float:
        """Return the seconds of computing, collectives of the tensor axis included."""
        total = self.speeds.pace.seconds(work)
        for exchange, count in work.exchanges:
            total += count * self.collective(exchange.kind, exchange.bytes, "tensor")
        return total

    def issue(self, work: Work) -> float:
        """Return the host's seconds for issuing it."""
        return self.speeds.pace.issue(work)

    def adding(self, step: Step) -> float:
        """Return the seconds in which shards of gradients of several micro-batches are added up, on CPUs."""
        plan, facts = self.plan, step.sharding.facts
        apart = plan.accumulation_mode == "reduce_each" and plan.reduce_scatter.asynchronous
        if self.rules != "gloo" or not apart or plan.accumulation_steps == 1:
            return 0.0
        shards = sum(unit.bytes.gradient_shards for unit in facts.units) + facts.root.gradient_shards
        return self.speeds.pace.copy(3 * shards)

    def agreements(self) -> float:
        """Return the seconds of the small sums that end a step: norm, loss, overflow."""
        total = self.collective("all_reduce", NORM_BYTES, "shard") + self.collective("all_reduce", NORM_BYTES, "tensor")
        if self.runtime == SHARDWISE:
            total += self.collective("all_reduce", LOSS_BYTES, "world")
        if self.plan.dtypes.loss_scaling:
            total += 2 * self.collective("all_reduce", OVERFLOW_BYTES, "world")
        return total


def rules_of(runtime: Runtime, cluster: Cluster) -> Rules:
    """Return by which rules a program orders a step."""
    if runtime.sharding == "none":
        return "ddp"
    if runtime.sharding == "fsdp1":
        return "fsdp1"
    return "gloo" if cluster.gpu is None else "nccl"


def _works(step: Step) -> Sequence[PartWork | None]:
    """Return what each unit computes, in the order of units; None: its modules' work is counted elsewhere."""
    facts, first, blocks = step.sharding.facts, step.sharding.first_block, step.parts.blocks
    ends = step.parts.ends
    found: list[PartWork | None] = []
    for place, unit in enumerate(facts.units):
        if unit.block_kind is not None:
            found.append(blocks[place - first].work)
        elif " + " in unit.name:
            found.append(None)
        else:
            found.append(ends.embedding.work if place < first else ends.head.work)
    return found


def unit_costs(unit: PlacedUnit, work: PartWork | None, scale: _Scale) -> UnitCosts:
    """Return the seconds of one unit's pieces."""
    size, plan, pace = unit.bytes, scale.plan, scale.speeds.pace
    whole = scale.rules == "ddp"
    again = unit.has_backward and unit.reshards is not False and not whole
    part = "shard" if unit.reshards is True or unit.reshards is False else f"shard/{unit.reshards}"
    copied = 0.0 if whole or scale.rules == "fsdp1" else pace.copy(*step_moves.copy_out(size, plan))
    return UnitCosts(
        forward=scale.seconds(work.forward) if work else 0.0,
        backward=(scale.seconds(work.backward) if work else 0.0) + _adding(size, scale) + _flattening(size, scale),
        forward_issue=(scale.issue(work.forward) if work else 0.0) + pace.unit_issue,
        backward_issue=(scale.issue(work.backward) if work else 0.0) + pace.unit_issue,
        fetch=pace.host_copy(size.shards) if _away(scale) else 0.0,
        copy_in=0.0 if whole else pace.copy(*step_moves.copy_in(size, plan)),
        gather=0.0 if whole else scale.collective("all_gather", size.gathered, "shard"),
        regather=scale.collective("all_gather", size.gathered, part) if again else 0.0,
        copy_out=copied,
        recopy_out=copied if again else 0.0,
        **_reducing(size, scale),
        store=pace.host_copy(size.gradient_shards) if _away(scale) else 0.0,
    )


def _reducing(size: UnitBytes, scale: _Scale) -> Mapping[str, float]:
    """Return the seconds of a unit's reduction, by field of UnitCosts."""
    if not size.reduced:
        return {}
    plan, pace = scale.plan, scale.speeds.pace
    ranks = plan.mesh.shard
    return {
        "reduce_copy_in": 0.0 if scale.rules == "fsdp1" else pace.copy(*step_moves.reduce_copy_in(size, plan)),
        "reduce": scale.collective("reduce_scatter", size.reduced, "shard"),
        "reduce_sum": _summing(size, scale),
        "all_reduce": scale.collective("all_reduce", size.reduced / ranks, "replicate"),
    }


def _summing(size: UnitBytes, scale: _Scale) -> float:
    """Return the seconds of the main thread, on CPUs, for adding up what came, and for the cast of the sum."""
    if scale.rules != "gloo":
        return 0.0
    plan, pace = scale.plan, scale.speeds.pace
    ranks = plan.mesh.shard
    sums = pace.copy((ranks - 1) * 3 * size.reduced // ranks, ranks - 1)
    return sums + pace.copy(*step_moves.reduce_copy_out(size, plan))


def _flattening(size: UnitBytes, scale: _Scale) -> float:
    """Return the seconds in which FSDP1 puts a unit's gradients together, in backward, and casts them.

    Parameters are views of one flat one: autograd writes their gradients into one by `cat`. The cast to the dtype of
    the reduction has a stream of its own, but is as memory-bound as what it runs beside: it takes its time from that.
    """
    if scale.rules != "fsdp1" or not size.gradients:
        return 0.0
    pace = scale.speeds.pace
    return pace.copy(2 * size.gradients) + pace.copy(*step_moves.reduce_copy_in(size, scale.plan))


def _adding(size: UnitBytes, scale: _Scale) -> float:
    """Return the seconds in which whole gradients are added to those of the micro-batch before, where they wait."""
    plan = scale.plan
    if plan.accumulation_mode != "defer_all" or plan.accumulation_steps == 1 or not size.gradients:
        return 0.0
    cast = size.gradients if plan.dtypes.reduce != plan.dtypes.param else 0
    return scale.speeds.pace.copy(cast + 3 * size.kept_gradients)


def _away(scale: _Scale) -> bool:
    """Whether shards lie on the host, apart from where is computed."""
    return scale.plan.offload.parameters and scale.speeds.cluster.gpu is not None
