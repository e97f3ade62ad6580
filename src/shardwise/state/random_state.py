"""The random generators of one rank: saved, restored, or seeded anew for another number of ranks."""

from __future__ import annotations

import hashlib
import random
from typing import Any

import numpy as np
import torch


def capture() -> dict[str, Any]:
    """Return the state of Python's, NumPy's and torch's generators, and the current GPU's when there is one."""
    state: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def restore(state: dict[str, Any]) -> list[str]:
    """Set all generators; returns notes on those that could not be set."""
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if torch.cuda.is_available() and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])
    elif torch.cuda.is_available() or "cuda" in state:
        return ["GPU random numbers start anew: the checkpoint was saved on another kind of device"]
    return []


def reseed(state: dict[str, Any], rank: int, world: int) -> None:
    """Seed all generators from a saved state of another number of ranks: repeatable, and different on every rank."""
    material = bytes(state["torch"].numpy()) + f"/{rank}/{world}".encode()
    seed = int.from_bytes(hashlib.sha256(material).digest()[:4], "little")
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
