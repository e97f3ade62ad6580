"""Set-up shared by every test: one thread per process, no network, tiny checkpoints made once per session."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

# Before anything imports torch: forked ranks must not inherit thread pools, and cores are shared by the ranks.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Return `tiny(family="llama", **options)`: the folder of a tiny random checkpoint, made once per session.

    Options are those of `harness.models.tiny_checkpoint`. The folder is shared: copy it before changing it.
    """
    from harness.models import tiny_checkpoint

    made: dict[str, Path] = {}

    def make(family: str = "llama", **options: object) -> Path:
        key = "-".join([family, *(f"{name}={options[name]}" for name in sorted(options))])
        if key not in made:
            made[key] = tiny_checkpoint(tmp_path_factory.mktemp(f"tiny-{family}"), family, **options)
        return made[key]

    return make
