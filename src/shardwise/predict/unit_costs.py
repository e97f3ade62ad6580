"""Seconds of the pieces of one communication unit under one plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from shardwise.predict import step_moves
from shardwise.predict.collectives import LOSS_BYTES, NORM_BYTES, OVERFLOW_BYTES
from shardwise.predict.links import Group, Links, group_of
from shardwise.predict.pace import Pace
from shardwise.predict.schedule.costs import Rules, UnitCosts
from shardwise.predict.terms.facts import PlacedUnit
from shardwise.predict.terms.step import Step
from shardwise.predict.terms.unit_bytes import UnitBytes
from shardwise.predict.work import PartWork, Work
from shardwise.spec.cluster import Cluster
from shardwise.spec.plan import Plan
from shardwise.spec.runtime import SHARDWISE, Runtime
from shardwise.spec.speeds import TimedKind


@dataclass(frozen=True, kw_only=True, slots=True)
class Speeds:
    """Where a step runs, in seconds of what it does."""

    cluster: Cluster
    """The machines."""
    pace: Pace
    """Devices and hosts."""
    links: Links
    """Collectives."""


class Scale:
    """Seconds of what one plan's units do."""

    def __init__(self, speeds: Speeds, runtime: Runtime, plan: Plan) -> None:
        self.speeds, self.runtime, self.plan = speeds, runtime, plan
        mesh = plan.mesh
        self.groups: dict[str, Group] = {}
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
        return self.speeds.pace.seconds(work) + self.exchanges(work)

    def exchanges(self, work: Work) -> float:
        """Return the seconds of collectives of the tensor axis."""
        return sum(
            count * self.collective(exchange.kind, exchange.bytes, "tensor") for exchange, count in work.exchanges
        )

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


def unit_costs(unit: PlacedUnit, work: PartWork | None, scale: Scale, travelling: int = 0) -> UnitCosts:
    """Return the seconds of one unit's pieces.

    Args:
        unit: What it holds.
        work: What it computes; None: nothing that is not counted elsewhere.
        scale: How long things take.
        travelling: Bytes of what its forward saves for backward that lie on the host in between.
    """
    size, plan, pace = unit.bytes, scale.plan, scale.speeds.pace
    whole = scale.rules == "ddp"
    again = unit.has_backward and unit.reshards is not False and not whole
    kept = smaller_group(unit.reshards, plan)
    part = "shard" if kept is None else f"shard/{kept}"
    copied = 0.0 if whole or scale.rules == "fsdp1" else pace.copy(*step_moves.copy_out(size, plan))
    return UnitCosts(
        forward=(scale.seconds(work.forward) if work else 0.0) + _keeping(size, kept, scale),
        backward=(scale.seconds(work.backward) if work else 0.0) + _adding(size, scale) + _flattening(size, scale),
        forward_issue=(scale.issue(work.forward) if work else 0.0) + pace.unit_issue,
        backward_issue=(scale.issue(work.backward) if work else 0.0) + pace.unit_issue,
        fetch=pace.host_copy(size.shards) if _away(scale) else 0.0,
        copy_in=0.0 if whole else pace.copy(*step_moves.copy_in(size, plan)),
        gather=0.0 if whole else scale.collective("all_gather", size.gathered, "shard"),
        regather=scale.collective("all_gather", size.gathered, part) if again else 0.0,
        recopy_in=pace.copy(*step_moves.recopy_in(size, plan, kept)) if again and kept else 0.0,
        copy_out=copied,
        recopy_out=copied if again else 0.0,
        **_reducing(size, scale),
        store=pace.host_copy(size.gradient_shards) if _away(scale) else 0.0,
        travel=pace.host_copy(travelling) if travelling else 0.0,
    )


def smaller_group(reshards: bool | int, plan: Plan) -> int | None:
    """Return over how many ranks a unit is resharded after forward, if over less than the shard axis."""
    return None if isinstance(reshards, bool) or reshards >= plan.mesh.shard else reshards


def _keeping(size: UnitBytes, kept: int | None, scale: Scale) -> float:
    """Return the seconds in which a rank copies the part of a unit's weights that it keeps behind forward."""
    return 0.0 if kept is None else scale.speeds.pace.copy(*step_moves.keep(size, kept))


def _reducing(size: UnitBytes, scale: Scale) -> Mapping[str, float]:
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


def _summing(size: UnitBytes, scale: Scale) -> float:
    """Return the seconds of the main thread, on CPUs, for adding up what came, and for the cast of the sum."""
    if scale.rules != "gloo":
        return 0.0
    plan, pace = scale.plan, scale.speeds.pace
    ranks = plan.mesh.shard
    sums = pace.copy((ranks - 1) * 3 * size.reduced // ranks, ranks - 1)
    return sums + pace.copy(*step_moves.reduce_copy_out(size, plan))


def _flattening(size: UnitBytes, scale: Scale) -> float:
    """Return the seconds in which FSDP1 puts a unit's gradients together, in backward, and casts them.

    Parameters are views of one flat one: autograd writes their gradients into one by `cat`. The cast to the dtype of
    the reduction has a stream of its own, but is as memory-bound as what it runs beside: it takes its time from that.
    """
    if scale.rules != "fsdp1" or not size.gradients:
        return 0.0
    pace = scale.speeds.pace
    return pace.copy(2 * size.gradients) + pace.copy(*step_moves.reduce_copy_in(size, scale.plan))


def _adding(size: UnitBytes, scale: Scale) -> float:
    """Return the seconds in which whole gradients are added to those of the micro-batch before, where they wait."""
    plan = scale.plan
    if plan.accumulation_mode != "defer_all" or plan.accumulation_steps == 1 or not size.gradients:
        return 0.0
    cast = size.gradients if plan.dtypes.reduce != plan.dtypes.param else 0
    return scale.speeds.pace.copy(cast + 3 * size.kept_gradients)


def _away(scale: Scale) -> bool:
    """Whether shards lie on the host, apart from where is computed."""
    return scale.plan.offload.parameters and scale.speeds.cluster.gpu is not None
