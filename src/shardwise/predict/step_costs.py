"""From a plan's step to the seconds of its pieces: what the schedule is made from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shardwise.predict import step_moves
from shardwise.predict.blocks import Computation
from shardwise.predict.collectives import COUNTS_BYTES
from shardwise.predict.pace.base import ADAM_BYTES
from shardwise.predict.schedule.costs import RootCosts, StepCosts, UnitCosts, UpdateCosts
from shardwise.predict.terms.facts import PlacedUnit
from shardwise.predict.terms.step import Step
from shardwise.predict.unit_costs import Scale, Speeds, smaller_group, unit_costs
from shardwise.predict.unit_rows import unit_kinds
from shardwise.predict.work import PartWork
from shardwise.spec.prefetch import ahead_of, behind_of
from shardwise.spec.runtime import SHARDWISE


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
        scale = Scale(self.speeds, self.computed.runtime, plan)
        units = tuple(
            self._unit(unit, work, scale, travelling)
            for unit, (work, travelling) in zip(facts.units, _works(step), strict=True)
        )
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
            regather_group=smaller_group(plan.reshard_after_forward, plan) is not None,
            background_gathers=plan.prefetch.async_all_gather,
            background_reductions=plan.reduce_scatter.asynchronous,
            micro_batches=plan.accumulation_steps,
            mode=plan.accumulation_mode,
            adding=scale.adding(step),
            post=scale.post,
            tensor=_over_tensor_axis(step, scale) if plan.mesh.tensor > 1 else 0.0,
            slowdown=self.speeds.pace.slowdown,
        )

    def _unit(self, unit: PlacedUnit, work: PartWork | None, scale: Scale, travelling: int) -> UnitCosts:
        key = (id(unit), id(work), travelling, scale.key)
        found = self._units.get(key)
        if found is None:
            found = self._units[key] = (unit_costs(unit, work, scale, travelling), (unit, work))
        return found[0]

    def _root(self, step: Step, scale: Scale) -> RootCosts:
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

    def _update(self, step: Step, scale: Scale) -> UpdateCosts:
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


def _works(step: Step) -> Sequence[tuple[PartWork | None, int]]:
    """Return what each unit computes, in the order of units (None: its modules' work is counted elsewhere), and the
    bytes that it saves on the host for backward."""
    facts, first, blocks = step.sharding.facts, step.sharding.first_block, step.parts.blocks
    ends = step.parts.ends
    found: list[tuple[PartWork | None, int]] = []
    for place, unit in enumerate(facts.units):
        if unit.block_kind is not None:
            block = blocks[place - first]
            found.append((block.work, block.travelling))
        elif " + " in unit.name:
            found.append((None, 0))
        else:
            found.append((ends.embedding.work if place < first else ends.head.work, 0))
    return found


def _over_tensor_axis(step: Step, scale: Scale) -> float:
    """Return the seconds of one micro-batch that are collectives over the tensor axis."""
    parts = step.parts
    works = [block.work for block in parts.blocks] + [parts.ends.embedding.work, parts.ends.head.work]
    alike: dict[int, float] = {}
    for work in works:
        if id(work) not in alike:
            alike[id(work)] = scale.exchanges(work.forward) + scale.exchanges(work.backward)
    return sum(alike[id(work)] for work in works)
