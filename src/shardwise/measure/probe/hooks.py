"""What FSDP2 itself costs the host for every unit: hooks, buffers and bookkeeping around next to no weights."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import cast

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from shardwise.engine.compat import sum_gradients
from shardwise.engine.gathers import set_prefetch
from shardwise.engine.reductions import set_reductions
from shardwise.measure.probe.team import Team
from shardwise.measure.probe.timing import Limits, host_clock
from shardwise.spec.layout import Prefetch, ReduceScatter

UNITS = 8
"""Units of the small model, the root not counted."""
LAYERS = 7
"""Linear layers of each, as a decoder block has."""
SIDE = 8
"""Of their weights."""


@dataclass(frozen=True, kw_only=True)
class _Unit:
    """What set_prefetch asks of a unit."""

    block: int
    checkpointed: bool = False
    has_backward: bool = True


def unit_s(team: Team, limits: Limits, post_s: float) -> float:
    """Return the host seconds that a unit costs in one pass, forward or backward. Collective.

    The same small model is timed plain and sharded over all ranks. Starting its three collectives is not counted.
    """
    plain = _model(team.device)
    sharded = _shard(_model(team.device), team)
    rows = torch.randn(SIDE, SIDE, device=team.device)
    apart = []
    for _ in range(limits.repeats + 1):
        team.barrier()
        apart.append(_step_s(sharded, rows) - _step_s(plain, rows))
    found = statistics.median(team.slowest(apart[1:]))
    return max(0.0, (found - 3 * UNITS * post_s) / (2 * UNITS))


def _model(device: torch.device) -> nn.Sequential:
    blocks = [nn.Sequential(*(nn.Linear(SIDE, SIDE, bias=False) for _ in range(LAYERS))) for _ in range(UNITS)]
    return nn.Sequential(*blocks).to(device)


def _shard(model: nn.Sequential, team: Team) -> nn.Sequential:
    """Shard every block and the rest over all ranks, as plans do by default."""
    mesh = init_device_mesh(team.device.type, (team.world,))
    for block in model:
        fully_shard(block, mesh=mesh)
    root = fully_shard(model, mesh=mesh)
    blocks = [cast(FSDPModule, block) for block in model]
    for unit in (root, *blocks):
        sum_gradients(unit)
    ahead = Prefetch(forward=2, backward=2, async_all_gather=True)
    set_prefetch(root, blocks, [_Unit(block=place) for place in range(UNITS)], ahead, team.device.type)
    reduce = ReduceScatter(buffers=2, separate_group=False, asynchronous=True)
    set_reductions(root, [root, *blocks], reduce, device_type=team.device.type, shard=team.world)
    return model


def _step_s(model: nn.Module, rows: torch.Tensor) -> float:
    """Return the host seconds of a forward and a backward."""
    if rows.device.type == "cuda":
        torch.cuda.synchronize()
    clock = host_clock(rows.device)
    started = clock()
    torch.autograd.backward(model(rows).sum())
    seconds = clock() - started
    model.zero_grad()
    return seconds
