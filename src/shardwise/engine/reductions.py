"""Reduce-scatter on CPUs: an exchange and a sum, in the background where nothing reads the result early.

gloo's own reduce-scatter is an all-reduce: it sends every gradient twice and blocks. Here each rank sends every other
rank its part once, (n - 1) / n of the buffer, and adds up what it received in the order of ranks.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from shardwise.engine.compat import (
    ReduceScatterComm,
    after_backward,
    reads_gradients_early,
    set_reduce_buffers,
    set_separate_group,
    unit_facts,
)
from shardwise.engine.exchange import REDUCE_TAG, Exchange, FreshBuffers, exchange
from shardwise.spec.layout import ReduceScatter


@dataclass(frozen=True, kw_only=True)
class _InFlight:
    """One reduction on the wire."""

    work: Exchange
    """Done when `parts` are filled."""
    parts: tuple[torch.Tensor, ...]
    """[shard] of every rank: what is this rank's of its gradients."""
    output: torch.Tensor
    """[shard]: where their sum goes."""

    def finish(self) -> None:
        """Wait, and add up in the order of ranks."""
        self.work.wait()
        first, second, *others = self.parts
        torch.add(first, second, out=self.output)
        for part in others:
            self.output.add_(part)


class Reductions:
    """Reductions in flight of one model, oldest first."""

    def __init__(self, buffers: int) -> None:
        self.buffers = buffers
        """How many may be in flight."""
        self._queue: deque[_InFlight] = deque()
        self._armed = False

    def add(self, reduction: _InFlight) -> None:
        """Take a reduction; waits for the oldest when too many are in flight. All are done when backward returns."""
        self._queue.append(reduction)
        while len(self._queue) > self.buffers:
            self._queue.popleft().finish()
        if not self._armed:
            self._armed = True
            after_backward(self.drain)

    def drain(self) -> None:
        """Finish all that is in flight."""
        self._armed = False
        while self._queue:
            self._queue.popleft().finish()


class ExchangedReduce(FreshBuffers, ReduceScatterComm):
    """The reduce-scatter of one unit."""

    def __init__(self, queue: Reductions | None, unit: FSDPModule) -> None:
        self.queue = queue
        """Where reductions are left; None: each is finished at once."""
        self._unit = weakref.ref(unit)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: object,
        async_op: bool = False,
    ) -> None:
        """Reduce `input_tensor` [ranks x shard] into `output_tensor` [shard], now or by the end of backward.

        Where FSDP2 reads the output right after this call, it is finished at once.
        """
        if op != dist.ReduceOp.SUM:
            raise NotImplementedError(f"gradients are summed here, not reduced by {op}")
        mine = input_tensor.view(group.size(), -1).unbind()
        parts = list(torch.empty_like(input_tensor).view(group.size(), -1).unbind())
        parts[group.rank()] = mine[group.rank()]
        work = exchange(mine, parts, group, REDUCE_TAG)
        reduction = _InFlight(work=work, parts=tuple(parts), output=output_tensor)
        unit = self._unit()
        if self.queue is None or unit is None or reads_gradients_early(unit):
            reduction.finish()
        else:
            self.queue.add(reduction)


def set_reductions(
    root: FSDPModule, units: Sequence[FSDPModule], reduce_scatter: ReduceScatter, *, device_type: str, shard: int
) -> None:
    """Make every unit reduce as the plan says, in place. Collective where a group of its own is made.

    Args:
        root: The root unit.
        units: All units, the root included.
        reduce_scatter: The plan's.
        device_type: On `cpu` the exchange takes the place of gloo's reduce-scatter.
        shard: Ranks of the shard axis; nothing is reduced over one.
    """
    if reduce_scatter.separate_group:
        set_separate_group(root)
    if device_type != "cpu":
        set_reduce_buffers(root, reduce_scatter.buffers)
        return
    if shard == 1:
        return
    queue = Reductions(reduce_scatter.buffers) if reduce_scatter.asynchronous else None
    for unit in units:
        unit.set_custom_reduce_scatter(ExchangedReduce(queue, unit))


def reduces_in_background(model: nn.Module) -> bool:
    """Whether reductions of this model's units are finished later than FSDP2 believes: by exchanges on CPUs. On GPUs
    FSDP2's own streams know when a gradient is there. All units are alike in this (`set_reductions`)."""
    units = (unit_facts(module) for module in model.modules() if isinstance(module, FSDPModule))
    first = next((facts for facts in units if facts is not None), None)
    reduce = None if first is None else first.reduce_scatter
    return isinstance(reduce, ExchangedReduce) and reduce.queue is not None
