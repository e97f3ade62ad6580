"""The collectives of a training step, by closed formula of the Plan: what every rank issues, before anything runs."""

from __future__ import annotations

from collections import Counter

from shardwise.predict.tensor_axis import TensorWork, norm_groups, tensor_exchanges
from shardwise.spec.collectives import CollectiveKind, Collectives, Key
from shardwise.spec.plan import Mesh, Plan
from shardwise.spec.units import UnitRow, UnitTable

COUNTS_BYTES = 16
"""Trained and seen tokens of a step, two fp64 numbers."""
LOSS_BYTES = 8
"""The step's loss, one fp64 number."""
NORM_BYTES = 4
"""Sum of squares of gradients, one fp32 number."""
OVERFLOW_BYTES = 4
"""The loss scaler's flag, fp32."""
STOP_BYTES = 8
"""Whether to stop, int64."""


def collectives_of_step(
    plan: Plan,
    units: UnitTable,
    *,
    device_type: str,
    looks_for_stop: bool = False,
    tensor: TensorWork | None = None,
    leave_tensor_out: bool = False,
) -> Collectives:
    """Return the collectives of one optimizer step, equal on all ranks.

    Args:
        plan: What is decided; prefetch changes when gathers happen, not how many.
        units: The model's communication units.
        device_type: On `cpu` an all-to-all of the same bytes takes the place of the reduce-scatter.
        looks_for_stop: Ranks agree before each further micro-batch whether to go on, as they do in slow steps.
        tensor: What the tensor axis works on; needed where it has several ranks, else ValueError.
        leave_tensor_out: Leave out what depends on it instead: exchanges over the tensor axis, and how many norms of
            gradients are summed over the shard axis (one is counted).
    """
    if plan.mesh.tensor > 1 and tensor is None and not leave_tensor_out:
        raise ValueError("what a tensor axis exchanges depends on activations: give `tensor`")
    counts: Counter[Key] = Counter()
    for unit in units.rows:
        if unit.parameters:
            counts += _gathers(unit, plan)
            counts += _reductions(unit, plan, device_type)
    counts += _agreements(plan, looks_for_stop)
    counts += _norm_and_overflow(plan, tensor)
    if tensor is not None:
        counts += tensor_exchanges(plan, tensor)
    return Collectives.of(counts)


def _gathers(unit: UnitRow, plan: Plan) -> Counter[Key]:
    """Every forward gathers; a backward does again what was freed in between, if a gradient gets there."""
    if plan.mesh.shard == 1:
        return Counter()
    forward: Key = ("all_gather", "shard", unit.all_gather_bytes)
    counts = Counter({forward: plan.accumulation_steps})
    after = unit.reshard_after_forward
    if after is not False and unit.has_backward:
        axis = "shard" if after is True else f"shard/{after}"
        counts["all_gather", axis, unit.all_gather_bytes] += plan.accumulation_steps
    return counts


def _reductions(unit: UnitRow, plan: Plan, device_type: str) -> Counter[Key]:
    """Over the shard axis whole gradients, over the replicas this rank's part of them."""
    counts: Counter[Key] = Counter()
    whole, mode, steps = unit.reduce_scatter_bytes, plan.accumulation_mode, plan.accumulation_steps
    if whole and plan.mesh.shard > 1:
        kind: CollectiveKind = "all_to_all" if device_type == "cpu" else "reduce_scatter"
        counts[kind, "shard", whole] += 1 if mode == "defer_all" else steps
    if whole and plan.mesh.replicate > 1:
        counts["all_reduce", "replicate", whole // plan.mesh.shard] += steps if mode == "reduce_each" else 1
    return counts


def _agreements(plan: Plan, looks_for_stop: bool) -> Counter[Key]:
    """What all ranks agree on: counts, loss, overflow, stop."""
    world = world_axis(plan.mesh)
    counts: Counter[Key] = Counter({("all_reduce", world, COUNTS_BYTES): 1})
    counts["all_reduce", world, LOSS_BYTES] += 1
    if plan.dtypes.loss_scaling:
        counts["all_reduce", world, OVERFLOW_BYTES] += 1
    if looks_for_stop:
        counts["all_reduce", world, STOP_BYTES] += plan.accumulation_steps - 1
    return counts


def _norm_and_overflow(plan: Plan, tensor: TensorWork | None) -> Counter[Key]:
    """The gradient norm is summed over the axes that split gradients; the scaler asks those of the first gradient."""
    counts: Counter[Key] = Counter()
    if plan.mesh.shard > 1:
        counts["all_reduce", "shard", NORM_BYTES] += 1 if tensor is None else norm_groups(plan, tensor)
        counts["all_reduce", "shard", OVERFLOW_BYTES] += int(plan.dtypes.loss_scaling)
    if tensor is not None:
        counts["all_reduce", "tensor", NORM_BYTES] += 1
        counts["all_reduce", "tensor", OVERFLOW_BYTES] += int(
            plan.dtypes.loss_scaling and tensor.vocabulary is not None
        )
    return counts


def world_axis(mesh: Mesh) -> str:
    """Return the axis that holds all ranks, or `world` when none does."""
    sizes = {"shard": mesh.shard, "replicate": mesh.replicate, "tensor": mesh.tensor}
    return next((axis for axis, size in sizes.items() if size == mesh.world), "world")
