"""The device mesh of a Plan."""

from __future__ import annotations

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shardwise.spec.layout import Mesh

AXES = ("replicate", "shard", "tensor")
"""Mesh axes from the outermost (slowest link) to the innermost."""


def build_mesh(mesh: Mesh, device_type: str) -> DeviceMesh:
    """Return the mesh of a plan: axis `shard` always, `replicate` and `tensor` where they have more than one rank.

    Needs an initialised process group of `mesh.world` ranks. Ranks of one `tensor` group are neighbours.
    """
    sizes = {axis: getattr(mesh, axis) for axis in AXES}
    kept = [axis for axis in AXES if axis == "shard" or sizes[axis] > 1]
    return init_device_mesh(device_type, tuple(sizes[axis] for axis in kept), mesh_dim_names=tuple(kept))


def data_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Return the part of the mesh over which FSDP2 shards and replicates: all axes but `tensor`."""
    names = mesh.mesh_dim_names or ()
    kept = tuple(name for name in names if name != "tensor")
    return mesh if kept == names else mesh[kept if len(kept) > 1 else kept[0]]


def tensor_mesh(mesh: DeviceMesh) -> DeviceMesh | None:
    """Return the axis `tensor` of the mesh; None when it has one rank."""
    return mesh["tensor"] if "tensor" in (mesh.mesh_dim_names or ()) else None


def data_rank(mesh: Mesh, rank: int) -> int:
    """Return which of the data ranks a rank is; ranks of one `tensor` group are the same one and see the same rows."""
    return rank // mesh.tensor
