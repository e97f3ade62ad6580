"""Ranks around files: work that succeeds on all ranks or fails on all, and waits longer than a collective may."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

T = TypeVar("T")

_PATIENCE = datetime.timedelta(hours=4)
"""Writing a large model outlasts the timeout of the training's own group."""

_group: tuple[dist.ProcessGroup | None, dist.ProcessGroup] | None = None


def rank() -> int:
    """This process's rank; 0 without a process group."""
    return dist.get_rank() if dist.is_initialized() else 0


def world() -> int:
    """Number of ranks; 1 without a process group."""
    return dist.get_world_size() if dist.is_initialized() else 1


def patient_group() -> dist.ProcessGroup | None:
    """Return a gloo group over all ranks with a long timeout, made at the first call; every rank must call.

    None without a process group, or where torch was built without gloo (the default group is used then).
    """
    global _group
    if not dist.is_initialized() or not dist.is_gloo_available():
        return None
    if _group is None or _group[0] is not dist.group.WORLD:
        _group = (dist.group.WORLD, dist.new_group(backend="gloo", timeout=_PATIENCE))
    return _group[1]


def gather(value: T) -> list[T]:
    """Return every rank's (picklable) value, by rank, on every rank."""
    if not dist.is_initialized():
        return [value]
    values: list[Any] = [None] * world()
    dist.all_gather_object(values, value, group=patient_group())
    return values


def attempt(task: str, work: Callable[[], T], error: type[Exception]) -> list[T]:
    """Run `work` on every rank; return all results by rank, or raise `error` on every rank when one failed.

    Args:
        task: What is being done, for the message ("saving step 30 to runs/a").
        work: Called once on every rank; its result must be picklable.
        error: Class of what is raised; its message names the ranks and their reasons.
    """
    cause: BaseException | None = None
    outcome: tuple[T | None, str]
    try:
        outcome = (work(), "")
    except (Exception, CheckpointException) as caught:  # noqa: BLE001 - the other ranks must hear of any failure
        cause, outcome = caught, (None, _reason(caught))
    outcomes = gather(outcome)
    failed = [(index, reason) for index, (_, reason) in enumerate(outcomes) if reason]
    if failed:
        raise error(f"{task} failed: {_told(failed)}") from cause
    return [value for value, _ in outcomes]  # type: ignore[misc]


def attempt_on_rank0(task: str, work: Callable[[], T], error: type[Exception]) -> T:
    """Run `work` on rank 0 alone while the others wait; return its result, or raise `error`, on every rank."""
    results = attempt(task, lambda: work() if rank() == 0 else None, error)
    return results[0]  # type: ignore[return-value]


def _reason(caught: BaseException) -> str:
    if isinstance(caught, CheckpointException):
        # The same failures arrive on every rank; each rank reports its own, so that none is told twice.
        mine = caught.failures.get(rank())
        return _reason(mine[0]) if mine else _ELSEWHERE
    return f"{type(caught).__name__}: {caught}".strip().rstrip(":")


_ELSEWHERE = "another rank failed"


def _told(failed: list[tuple[int, str]]) -> str:
    own = [(index, reason) for index, reason in failed if reason != _ELSEWHERE] or failed
    shown = [f"rank {index}: {reason}" for index, reason in own[:3]]
    return "; ".join(shown + ([f"and {len(own) - 3} more ranks"] if len(own) > 3 else []))
