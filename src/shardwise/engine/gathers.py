"""When the weights of a unit are gathered: prefetch depths, and gathers in the background on CPUs."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from shardwise.engine.compat import AllGatherComm, all_gather, gather_in_background
from shardwise.engine.exchange import GATHER_TAG, FreshBuffers, exchange
from shardwise.spec.layout import Prefetch
from shardwise.spec.prefetch import Gathered, ahead_of, behind_of


class ExchangedGather(FreshBuffers, AllGatherComm):
    """The all-gather of a unit on CPUs: between two ranks an exchange; among more, gloo's ring, which crosses less
    between hosts that hold several ranks each."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Fill `output_tensor` [ranks x shard]; `input_tensor` [shard] is this rank's part of it, in place."""
        if group.size() != 2:
            return all_gather(output_tensor, input_tensor, group, async_op=async_op)
        gathering = exchange([input_tensor] * 2, output_tensor.view(2, -1).unbind(), group, GATHER_TAG)
        if async_op:
            return gathering
        gathering.wait()
        return None


def set_prefetch(
    root: FSDPModule, live: Sequence[FSDPModule], units: Sequence[Gathered], prefetch: Prefetch, device_type: str
) -> None:
    """Give every unit the units that it gathers ahead, in place.

    Args:
        root: The root unit, which runs first in forward and in backward.
        live: All others, in the order of forward.
        units: The same as they were planned.
        prefetch: Depths. FSDP2 takes an empty list for its default, not for none: depth 0 in backward is a unit that
            names itself, whose gather has happened by then.
        device_type: On `cpu` gathers block unless they are asked to run in the background; on GPUs streams do that.
    """
    for place, unit in [*enumerate(live), (-1, root)]:
        unit.set_modules_to_forward_prefetch([live[other] for other in ahead_of(units, place, prefetch)])
    for place, unit in [*enumerate(live), (len(live), root)]:
        behind = [live[other] for other in behind_of(units, place, prefetch)]
        unit.set_modules_to_backward_prefetch(behind or [unit])
    if device_type == "cpu":
        gather_in_background(root, prefetch.async_all_gather)
        gather = ExchangedGather()
        for unit in (*live, root):
            unit.set_custom_all_gather(gather)
