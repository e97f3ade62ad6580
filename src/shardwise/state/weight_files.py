"""Written weight files, read back."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from shardwise.state.live import info


def compare_files(folder: Path, expected: Mapping[str, torch.Tensor]) -> None:
    """Open every safetensors file of `folder` again; raise ValueError unless they hold `expected`, bit for bit."""
    seen: set[str] = set()
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a mapping
                if name in seen or name not in expected:
                    raise ValueError(f"{path.name} holds {name}, which should not be there")
                _compare(name, file.get_tensor(name), expected[name])
                seen.add(name)
    if missing := sorted(expected.keys() - seen):
        raise ValueError(f"the files lack {len(missing)} tensors: {', '.join(missing[:3])}")


def _compare(name: str, read: torch.Tensor, expected: torch.Tensor) -> None:
    if (read.dtype, read.shape) != (expected.dtype, expected.shape):
        raise ValueError(f"{name} was read back as {info(read)}, written as {info(expected)}")
    if not torch.equal(_bytes(read), _bytes(expected)):
        raise ValueError(f"{name} was read back with other bytes")


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def weight_bytes(folder: Path) -> int:
    """Return the size of a folder's weight files."""
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def stored_tensors(folder: Path) -> dict[str, Any]:
    """Return name -> `{"dtype", "shape"}` of a folder's weights, from the files' headers alone."""
    entries: dict[str, Any] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            entries |= json.loads(file.read(int.from_bytes(file.read(8), "little")))
    entries.pop("__metadata__", None)
    return entries
