"""A world of ranks that is not there: fake tensors, a fake process group, and answers where a value would be read."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch.distributed.device_mesh import DeviceMesh

from shardwise.engine.compat_fake import FakeTensors, fake_group, fakes_taken_as_real
from shardwise.engine.mesh import build_mesh
from shardwise.spec.layout import Mesh


@dataclass(frozen=True, kw_only=True)
class FakeRank:
    """Rank 0 of a world that is not there."""

    mesh: DeviceMesh
    """All ranks, on the device `cpu`: fake tensors of GPUs abort the process where torch has no CUDA."""
    tensors: FakeTensors
    """A context manager within which new tensors are fake."""


@contextmanager
def fake_rank(mesh: Mesh, *, padded: bool) -> Iterator[FakeRank]:
    """Be rank 0 of a world as large as `mesh`, for a while; nothing stays behind.

    Args:
        mesh: The plan's.
        padded: Whether attention masks hold padding, where transformers looks.

    Raises:
        RuntimeError: this process has a process group already.
    """
    with fake_group(mesh.world), fakes_taken_as_real(all_tokens=not padded):
        yield FakeRank(mesh=build_mesh(mesh, "cpu"), tensors=FakeTensors())


@dataclass(frozen=True, kw_only=True)
class FakeBatch:
    """A micro-batch of whole rows without content; int64 tensors [rows, length]."""

    input_ids: torch.Tensor
    """Token ids."""
    attention_mask: torch.Tensor
    """What transformers sees in it is decided by `fake_rank`."""
    labels: torch.Tensor
    """Every token is trained."""


def fake_batch(rows: int, length: int) -> FakeBatch:
    """Return a batch; called where new tensors are fake."""
    input_ids = torch.zeros((rows, length), dtype=torch.int64)
    return FakeBatch(input_ids=input_ids, attention_mask=torch.ones_like(input_ids), labels=torch.zeros_like(input_ids))
