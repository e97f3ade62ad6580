"""What `fully_shard` does and its arguments cannot change; private symbols of torch, as in `engine.compat`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp._fully_shard import _fully_shard

from shardwise.engine.compat import replaced

_MAKES_MESH = "_get_post_forward_mesh_info"


@contextmanager
def one_mesh_after_forward() -> Iterator[None]:
    """Let all units that `fully_shard` makes share the mesh of an integer `reshard_after_forward`.

    By default every call makes a mesh of its own, with two process groups each: on GPUs, communicators of hundreds of
    MiB for every block.

    Raises:
        UnsupportedRelease: this torch makes that mesh elsewhere.
    """
    original: Any = getattr(_fully_shard, _MAKES_MESH, None)
    made: dict[tuple[int, DeviceMesh], Any] = {}

    def shared(reshard_after_forward: bool | int, mesh_info: Any) -> Any:
        if isinstance(reshard_after_forward, bool):
            return original(reshard_after_forward, mesh_info)
        key = (reshard_after_forward, mesh_info.mesh)
        if key not in made:
            made[key] = original(reshard_after_forward, mesh_info)
        return made[key]

    with replaced(_fully_shard, _MAKES_MESH, shared):
        yield
