"""SIGINT and SIGTERM become a stop between two steps, agreed on by all ranks."""

from __future__ import annotations

import signal
from types import FrameType

import torch
import torch.distributed as dist


class StopSignal:
    """Remembers that this process was asked to stop. Launchers repeat their signals, so repeats change nothing."""

    def __init__(self) -> None:
        self.received: signal.Signals | None = None

    def install(self) -> None:
        """Handle SIGINT and SIGTERM from now on."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._handle)

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        if self.received is None:
            self.received = signal.Signals(number)

    def agreed(self, device: torch.device) -> bool:
        """Return, on all ranks alike, whether any rank was asked to stop. A collective."""
        return any_rank(self.received is not None, device)


def any_rank(value: bool, device: torch.device) -> bool:
    """Return, on all ranks alike, whether the value is true on any of them. A collective."""
    flag = torch.tensor(int(value), device=device)
    dist.all_reduce(flag, op=dist.ReduceOp.MAX)
    return bool(flag)
