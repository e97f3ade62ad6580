"""Which operation `scaled_dot_product_attention` becomes, and what each keeps and takes.

torch 2.13: `ATen/native/transformers/cuda/sdp_utils.cpp` (order and conditions), `attention.cpp` (masks),
`flash_attn/flash_api.cpp` and `attention_backward.cu` (memory of backward); on CPUs `sdp_utils_cpp.cpp`.
"""

from __future__ import annotations

from typing import Literal

Kernel = Literal["flash", "cudnn", "efficient", "cpu", "math"]
"""FlashAttention; cuDNN's; the memory-efficient kernel; a CPU's flash attention; single operations."""

ALIGNED = 16
"""Elements to a multiple of which the memory-efficient kernel wants the rows of a mask."""

_ROWS = 128
"""Queries that FlashAttention's backward rounds a length up to."""

_STATISTICS = 32
"""Queries that the memory-efficient kernel rounds the length of its statistics up to."""


def kernel_of(
    device: str,
    generation: str,
    *,
    item: int,
    widths: tuple[int, int],
    same_heads: bool,
    grouped: bool,
    masked: bool,
    dropout: bool,
) -> Kernel:
    """Return the kernel that torch takes.

    Args:
        device: `cuda` or `cpu`.
        generation: Of the card (`predict.workspace`).
        item: Bytes of an element.
        widths: Elements of a query and of a value per head.
        same_heads: There is a key for every query head.
        grouped: Where there is not, that is allowed.
        masked: A mask is given.
        dropout: Weights are dropped.
    """
    if not same_heads and not grouped:
        return "math"
    if device == "cpu":
        return "math" if dropout or widths[0] != widths[1] else "cpu"
    half = item == 2
    fits = half and widths[0] == widths[1] <= 256
    if generation in ("hopper", "blackwell") and fits and widths[0] % 8 == 0:
        return "cudnn"
    if fits and not masked and generation not in ("volta", "turing"):
        return "flash"
    if generation in ("volta", "turing") and half:
        return "efficient" if same_heads and widths[0] % 8 == widths[1] % 8 == 0 else "math"
    align = 8 if half else 4
    return "efficient" if same_heads and widths[0] % align == widths[1] % align == 0 else "math"


def statistics(kernel: Kernel, rows: int, heads: int, length: int) -> int:
    """Return the fp32 numbers that a kernel keeps for backward, one per query."""
    rounded = -(-length // _STATISTICS) * _STATISTICS if kernel == "efficient" else length
    return rows * heads * rounded


def scratch(
    kernel: Kernel, *, rows: int, heads: int, kv_heads: int, length: int, widths: tuple[int, int], item: int
) -> int:
    """Return the bytes that a kernel's backward takes beside its results.

    Sums of query gradients in fp32, with lengths and widths rounded up, and one fp32 number a query; where heads are
    shared, the gradients of keys and values of every query head.
    """
    if kernel in ("cpu", "math"):
        return 0
    if kernel == "efficient":
        return rows * heads * length * 4 * ((widths[0] if item == 2 else widths[1]) + 1)
    rounded = -(-length // _ROWS) * _ROWS
    wide = 256 if widths[0] > 192 else -(-widths[0] // 32) * 32
    needed = rows * heads * rounded * (wide + 1) * 4
    if kv_heads != heads:
        needed += rows * length * heads * sum(widths) * item
    return needed
