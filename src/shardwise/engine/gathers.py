"""When the weights of a unit are gathered: prefetch depths, and gathers in the background on CPUs."""

from __future__ import annotations

from collections.abc import Sequence

from torch.distributed.fsdp import FSDPModule

from shardwise.engine.compat import gather_in_background
from shardwise.spec.layout import Prefetch


def set_prefetch(root: FSDPModule, units: Sequence[FSDPModule], prefetch: Prefetch, device_type: str) -> None:
    """Give every unit the units that it gathers ahead, in place.

    Args:
        root: The root unit, which runs first in forward and in backward.
        units: All others, in the order of forward.
        prefetch: Depths. FSDP2 takes an empty list for its default, not for none: depth 0 in backward is a unit that
            names itself, whose gather has happened by then.
        device_type: On `cpu` gathers block unless they are asked to run in the background; on GPUs streams do that.
    """
    for place, unit in enumerate(units):
        ahead, behind = targets(units, place, prefetch)
        unit.set_modules_to_forward_prefetch(ahead)
        unit.set_modules_to_backward_prefetch(behind or [unit])
    root.set_modules_to_forward_prefetch(list(units[: prefetch.forward]))
    root.set_modules_to_backward_prefetch(list(reversed(units))[: prefetch.backward] or [root])
    if device_type == "cpu":
        gather_in_background(root, prefetch.async_all_gather)


def targets(units: Sequence[FSDPModule], place: int, prefetch: Prefetch) -> tuple[list[FSDPModule], list[FSDPModule]]:
    """Return (units that unit `place` gathers ahead in forward, and in backward), nearest first."""
    ahead = list(units[place + 1 : place + 1 + prefetch.forward])
    behind = list(reversed(units[max(0, place - prefetch.backward) : place]))
    return ahead, behind
