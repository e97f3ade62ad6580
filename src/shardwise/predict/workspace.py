"""What matrix products keep for themselves on a card, and the generations of cards as far as kernels depend on them."""

from __future__ import annotations

from shardwise.spec.cluster import Gpu

_GENERATIONS = {
    "volta": ("V100",),
    "turing": ("T4", "RTX2080", "RTX-2080", "TITAN-RTX"),
    "hopper": ("H100", "H200", "H800", "H20", "GH200"),
    "blackwell": ("B100", "B200", "B300", "GB200", "GB300"),
    "amd": ("MI",),
}
"""Card names by their beginnings; others are Ampere or Ada cards, or small Blackwells, which behave alike."""

HANDLES = 2
"""Threads that multiply matrices: the program's in forward, autograd's in backward. Each has its own workspace."""


def generation(gpu: Gpu) -> str:
    """Return the generation of a card, as far as kernels depend on it; `ampere` for all that is not named here."""
    name = gpu.name.upper()
    return next((found for found, starts in _GENERATIONS.items() if name.startswith(starts)), "ampere")


def workspace_bytes(gpu: Gpu) -> int:
    """Return the workspace of cuBLAS (hipBLAS on AMD) that one thread holds from its first matrix product on.

    torch 2.13, ATen/cuda/CublasHandlePool.cpp: parseChosenWorkspaceSize.
    """
    if generation(gpu) == "amd":
        return (128 if gpu.name.upper().startswith("MI3") else 32) * 2**20
    if generation(gpu) == "hopper":
        return 32 * 2**20
    return 2 * 4096 * 1024 + 8 * 16 * 1024
