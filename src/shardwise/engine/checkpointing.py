"""Activation checkpointing on blocks."""

from __future__ import annotations

from torch import nn

from shardwise.engine.compat import checkpoint_wrapper


def is_checkpointed(setting: str, index: int) -> bool:
    """Whether block `index` recomputes its activations under a Plan's `activation_checkpointing`."""
    if setting == "none":
        return False
    every = 1 if setting == "full" else int(setting.removeprefix("every_"))
    return index % every == 0


def wrap_blocks(blocks: nn.ModuleList, setting: str) -> int:
    """Wrap every block that `setting` asks for, in place; returns how many.

    Non-reentrant, so frozen embeddings need no special input, and the RNG is restored for dropout.
    """
    wrapped = 0
    for index, block in enumerate(blocks):
        if is_checkpointed(setting, index):
            blocks[index] = checkpoint_wrapper(block, preserve_rng_state=True)
            wrapped += 1
    return wrapped
