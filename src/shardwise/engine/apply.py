"""The one function that shards a model. Whoever runs, rehearses or traces a Plan calls it."""

from __future__ import annotations

from typing import cast

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from shardwise.engine.blocks import find_blocks
from shardwise.engine.checkpointing import wrap_blocks
from shardwise.engine.compat import sum_gradients
from shardwise.engine.precision import block_policy, root_policy
from shardwise.spec.plan import Plan


def apply(model: nn.Module, plan: Plan, mesh: DeviceMesh) -> FSDPModule:
    """Lay `model` out as `plan` says, in place, and return it.

    The model carries its adapters already (parameters added later would never be reduced), may be on the meta device,
    and has its final requires_grad flags and storage dtypes. Order: checkpointing, one unit per block, then the root
    unit with all that is left (embedding, final norm, head).
    """
    blocks = find_blocks(model).modules
    wrap_blocks(blocks, plan.activation_checkpointing)
    for block in blocks:
        fully_shard(
            block,
            mesh=mesh,
            reshard_after_forward=plan.reshard_after_forward,
            mp_policy=block_policy(plan.dtypes),
        )
    # The root keeps torch's default for reshard_after_forward: only then is its useless second gather left out.
    root = fully_shard(model, mesh=mesh, mp_policy=root_policy(plan.dtypes))
    for unit in units(model):
        sum_gradients(unit)
    return root


def units(model: nn.Module) -> list[FSDPModule]:
    """Return the communication units of a sharded model, root first."""
    return [cast(FSDPModule, module) for module in model.modules() if isinstance(module, FSDPModule)]
