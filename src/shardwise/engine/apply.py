"""The one function that shards a model. Whoever runs, rehearses or traces a Plan calls it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, OffloadPolicy, fully_shard

from shardwise.engine.activation_offload import offload_activations
from shardwise.engine.blocks import find_blocks
from shardwise.engine.checkpointing import wrap_blocks
from shardwise.engine.compat import sum_gradients, unit_key
from shardwise.engine.compat_shard import one_mesh_after_forward
from shardwise.engine.gathers import set_prefetch
from shardwise.engine.loss_head import install_loss_head
from shardwise.engine.mesh import data_mesh, tensor_mesh
from shardwise.engine.precision import root_policy, unit_policy
from shardwise.engine.reductions import set_reductions
from shardwise.engine.tensor_parallel import parallelize
from shardwise.engine.units import PlannedUnit, plan_units
from shardwise.spec.plan import Plan


def apply(model: nn.Module, plan: Plan, mesh: DeviceMesh, *, device_type: str | None = None) -> FSDPModule:
    """Lay `model` out as `plan` says, in place, and return it.

    The model carries its adapters already (parameters added later would never be reduced), may be on the meta device,
    and has its final requires_grad flags and storage dtypes. Every rank of the mesh calls it.

    Order: the loss head, tensor parallelism, checkpointing and activation offload on blocks, compilation, one
    `fully_shard` per unit from the innermost, then the root with all that is left; at last what the units do
    in time: prefetch and reductions.

    Args:
        model: On any device.
        plan: What is decided.
        mesh: All ranks.
        device_type: What the plan is for; default: the mesh's. A trace lays a plan for GPUs out on a mesh of CPUs.

    Raises:
        BadInput: units that cannot be made.
    """
    install_loss_head(model, plan)
    across = tensor_mesh(mesh)
    if across is not None:
        parallelize(model, across, sequence_parallel=plan.mesh.sequence_parallel)
    planned = plan_units(model, plan)
    blocks = find_blocks(model).modules
    originals = list(blocks)
    wrap_blocks(blocks, plan.activation_checkpointing)
    if plan.offload.activations:
        offload_activations(blocks)
    if plan.compile:
        for block in blocks:
            block.compile()
    wrappers = {id(block): wrapped for block, wrapped in zip(originals, blocks, strict=True)}
    _shard(model, planned, wrappers, plan, data_mesh(mesh))
    live = units(model)
    for unit in live:
        sum_gradients(unit)
    inner = [cast(FSDPModule, wrappers.get(id(unit.modules[0]), unit.modules[0])) for unit in planned[:-1]]
    root = cast(FSDPModule, model)
    device_type = device_type or mesh.device_type
    set_prefetch(root, inner, planned[:-1], plan.prefetch, device_type)
    set_reductions(root, live, plan.reduce_scatter, device_type=device_type, shard=plan.mesh.shard)
    return root


def _shard(
    model: nn.Module, planned: Sequence[PlannedUnit], wrappers: dict[int, nn.Module], plan: Plan, mesh: DeviceMesh
) -> None:
    """Call `fully_shard` on every unit, inner ones first, the root last."""
    offload = OffloadPolicy()
    if plan.offload.parameters:
        offload = CPUOffloadPolicy(pin_memory=torch.accelerator.is_available())
    common: dict[str, Any] = {"mesh": mesh, "offload_policy": offload}
    order = {id(module): place for place, module in enumerate(model.modules())}
    with one_mesh_after_forward():
        for unit in sorted(planned[:-1], key=lambda unit: -order[id(unit.modules[0])]):
            modules = [wrappers.get(id(module), module) for module in unit.modules]
            fully_shard(
                modules if len(modules) > 1 else modules[0],
                reshard_after_forward=reshards(unit, plan),
                mp_policy=unit_policy(plan.dtypes),
                **common,
            )
    # The root keeps torch's default for reshard_after_forward: only then is its useless second gather left out.
    fully_shard(model, mp_policy=root_policy(plan.dtypes), **common)


def reshards(unit: PlannedUnit, plan: Plan) -> bool | int:
    """Return what becomes of a unit's gathered weights after its forward."""
    return False if unit.stays_gathered else plan.reshard_after_forward


def units(model: nn.Module) -> list[FSDPModule]:
    """Return the communication units of a sharded model, root first; a unit of two modules by its first."""
    found: dict[int, FSDPModule] = {}
    for module in model.modules():
        if isinstance(module, FSDPModule):
            found.setdefault(unit_key(module), module)
    return list(found.values())
