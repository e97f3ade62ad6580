"""What a run records: `metrics.jsonl`, TensorBoard events, memory."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import psutil
import torch


class MetricsLog:
    """Appends one JSON object a line, and the same numbers as TensorBoard scalars."""

    def __init__(self, path: Path, *, tensorboard: Path | None, start_step: int) -> None:
        """Open the log, dropping lines of steps after `start_step` that a resumed run will do again."""
        _keep_until(path, start_step)
        self._file = path.open("a", buffering=1)
        self._writer: Any = None
        if tensorboard is not None:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(tensorboard), purge_step=start_step + 1)

    def write(self, step: int, **values: float | int | bool | str | None) -> None:
        """Record values of one step (counted from 1; 0: before training)."""
        self._file.write(json.dumps({"step": step, **values, "time": round(time.time(), 3)}) + "\n")
        if self._writer is not None:
            for name, value in values.items():
                if isinstance(value, int | float) and not isinstance(value, bool):
                    self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Flush and close both."""
        self._file.close()
        if self._writer is not None:
            self._writer.close()


def _keep_until(path: Path, step: int) -> None:
    if not path.is_file():
        return
    kept = []
    for line in path.read_text().splitlines():
        try:
            if json.loads(line)["step"] <= step:
                kept.append(line)
        except (ValueError, KeyError):
            continue  # the half line of a killed run
    path.write_text("".join(line + "\n" for line in kept))


def memory_name(device: torch.device) -> str:
    """Return what `memory_bytes` measures on this device."""
    return "allocated" if device.type == "cuda" else "RSS"


def memory_bytes(device: torch.device) -> int:
    """Return this rank's peak GPU memory allocated by tensors, or on CPU its resident set now, in bytes."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    return int(psutil.Process().memory_info().rss)
