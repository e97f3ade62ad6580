"""The device mesh of a Plan."""

from __future__ import annotations

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shardwise.spec.plan import Plan


def build_mesh(plan: Plan, device_type: str) -> DeviceMesh:
    """Return the mesh for `fully_shard`: one axis `shard`, or `replicate` x `shard` when there are replicas.

    Needs an initialised process group of `plan.mesh.world` ranks.
    """
    if plan.mesh.replicate == 1:
        return init_device_mesh(device_type, (plan.mesh.shard,), mesh_dim_names=("shard",))
    return init_device_mesh(device_type, (plan.mesh.replicate, plan.mesh.shard), mesh_dim_names=("replicate", "shard"))
