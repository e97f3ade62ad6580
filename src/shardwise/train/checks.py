"""Cheap checks of a running training: ranks that drift apart, adapters that learn nothing, numbers that are not finite.

A run that is silently wrong costs more than one that stops.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from shardwise.engine.names import unwrapped_name
from shardwise.engine.shards import local
from shardwise.spec.plan import Mesh


class TrainingFailed(RuntimeError):
    """The run cannot go on: ranks differ, numbers are no longer finite, or nothing is learnt."""


class NotFinite(TrainingFailed):
    """A loss or a gradient norm is infinite or not a number."""

    def __init__(self, loss: float, norm: float, micro_batches: Sequence[tuple[int, int]]) -> None:
        self.micro_batches = tuple(micro_batches)
        """(rank, micro-batch) of every forward whose own loss was not finite."""
        super().__init__(f"loss {loss} and gradient norm {norm} are not finite")


def finite(value: float) -> bool:
    """Whether a number is neither infinite nor NaN."""
    return value == value and abs(value) != float("inf")


def find_not_finite(losses: Sequence[float]) -> list[tuple[int, int]]:
    """Return (rank, micro-batch) of every loss of any rank that is not finite. Every rank calls it."""
    gathered: list[list[float]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(gathered, list(losses))
    return [(rank, m) for rank, mine in enumerate(gathered) for m, loss in enumerate(mine) if not finite(loss)]


def compare_ranks(values: dict[str, float], flag: bool, device: torch.device) -> bool:
    """Return whether `flag` is true on any rank, after comparing numbers that must be equal on all. One collective.

    Raises:
        TrainingFailed: on every rank, naming what differs.
    """
    sent = [float(flag)]
    for value in values.values():
        shown = value if finite(value) else -1.0  # NaN would hide a difference; overflow is dealt with elsewhere
        sent += [shown, -shown]
    extremes = torch.tensor(sent, dtype=torch.float64, device=device)
    dist.all_reduce(extremes, op=dist.ReduceOp.MAX)
    found = extremes.tolist()
    for place, name in enumerate(values):
        largest, smallest = found[1 + 2 * place], -found[2 + 2 * place]
        if largest != smallest:
            raise TrainingFailed(f"ranks drifted apart: {name} is {smallest} on one rank and {largest} on another")
    return bool(found[0])


def check_adapters(model: nn.Module, device: torch.device) -> None:
    """Check, after the first step, that every adapter, and every module trained whole beside them, got a gradient.

    Every rank calls it. B starts at zero, so its gradient is the first that is not; that of A follows from the second
    step on.

    Raises:
        TrainingFailed: naming the adapters without one.
    """
    adapters = [
        (unwrapped_name(name), p)
        for name, p in model.named_parameters()
        if p.requires_grad and (".lora_B." in name or ".modules_to_save." in name)
    ]
    if not adapters:
        return
    moved = torch.tensor([float(_any_nonzero(p.grad)) for _, p in adapters], device=device)
    dist.all_reduce(moved, op=dist.ReduceOp.MAX)
    still = [name for (name, _), any_moved in zip(adapters, moved.tolist(), strict=True) if not any_moved]
    if still:
        listed = ", ".join(still[:3]) + (", ..." if len(still) > 3 else "")
        raise TrainingFailed(
            f"{len(still)} of {len(adapters)} adapters got no gradient in the first step: {listed}; "
            "leave their modules out of lora_targets and lora_modules_to_save"
        )


def _any_nonzero(gradient: torch.Tensor | None) -> bool:
    if gradient is None:
        return False
    return bool(local(gradient).count_nonzero())


def check_replicas(model: nn.Module, mesh: Mesh) -> None:
    """Check that ranks which hold the same weights hold them bit for bit. Every rank calls it; weights are resharded.

    Raises:
        TrainingFailed: on every rank, naming ranks that differ.
    """
    if mesh.replicate == 1 and mesh.tensor == 1:
        return
    mine = (_digest(model, split=True), _digest(model, split=False))
    gathered: list[tuple[str, str]] = [("", "")] * mesh.world
    dist.all_gather_object(gathered, mine)
    first: dict[tuple[str, int, int], tuple[str, int]] = {}
    for rank, (split, whole) in enumerate(gathered):
        shard, across = rank // mesh.tensor % mesh.shard, rank % mesh.tensor
        for key, digest in ((("split", shard, across), split), (("whole", shard, 0), whole)):
            expected, other = first.setdefault(key, (digest, rank))
            if expected != digest:
                raise TrainingFailed(f"ranks {other} and {rank} hold copies of the same weights that differ")


def _digest(model: nn.Module, *, split: bool) -> str:
    """Hash this rank's shards of what is trained: of the parameters that the tensor axis splits, or of all others."""
    digest = hashlib.blake2b(digest_size=16)
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad or _is_split(parameter) is not split:
            continue
        digest.update(name.encode())
        digest.update(local(parameter).contiguous().cpu().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _is_split(parameter: torch.Tensor) -> bool:
    """Whether ranks of one tensor group hold different parts of it."""
    if not isinstance(parameter, DTensor):
        return False
    names = parameter.device_mesh.mesh_dim_names or ()
    return "tensor" in names and not parameter.placements[names.index("tensor")].is_replicate()
