"""Attention as GPUs run it, in fake tensors on a CPU mesh: which kernel torch takes there, and what the kernel takes.

Sources: torch's `aten/src/ATen/native/transformers/cuda/sdp_utils.cpp` (order and conditions of the kernels, 2.11 to
2.13), `attention.cpp` (masks), `flash_attn/flash_api.cpp` and `attention_backward.cu` (memory that backward takes for
itself).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F

from shardwise.engine.compat import Operator
from shardwise.engine.compat_fake import aten

Kernel = Literal["flash", "cudnn", "efficient", "math"]

HALF = (torch.bfloat16, torch.float16)

ALIGNED = 16
"""Elements to a multiple of which the memory-efficient kernel wants the rows of a mask."""


@dataclass(frozen=True, kw_only=True)
class Attention:
    """`F.scaled_dot_product_attention` of one generation of cards."""

    generation: str
    """As `workspace.generation` says."""

    def kernel(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None) -> Kernel:
        """Return the kernel that torch takes for these tensors [rows, heads, length, width]."""
        half, widths = query.dtype in HALF, {t.shape[-1] for t in (query, key, value)}
        same_heads = query.shape[1] == key.shape[1] == value.shape[1]
        fits = half and len(widths) == 1 and max(widths) <= 256
        if self.generation in ("hopper", "blackwell") and fits and max(widths) % 8 == 0:
            return "cudnn"
        if fits and mask is None and self.generation not in ("volta", "turing"):
            return "flash"
        if self.generation in ("volta", "turing") and query.dtype == torch.bfloat16:
            return "math"
        align = 8 if half else 4
        return "efficient" if same_heads and all(width % align == 0 for width in widths) else "math"

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        """Return attention [rows, heads, length, width of a value]; arguments are those of torch's function."""
        chosen = self.kernel(query, key, value, attn_mask)
        if chosen == "math":
            whole: Any = aten("_scaled_dot_product_attention_math")
            found = whole(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
            return _first(found)
        if chosen == "flash":
            return self._flash(query, key, value, dropout_p, is_causal, scale)
        mask = None if attn_mask is None else _additive(attn_mask, query, padded=chosen == "efficient")
        needs = torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value))
        if chosen == "cudnn":
            cudnn: Any = aten("_scaled_dot_product_cudnn_attention")
            return _first(cudnn(query, key, value, mask, needs, dropout_p, is_causal, False, scale=scale))
        efficient: Any = aten("_scaled_dot_product_efficient_attention")
        return _first(efficient(query, key, value, mask, needs, dropout_p, is_causal, scale=scale))

    @staticmethod
    def _flash(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        dropout_p: float,
        is_causal: bool,
        scale: float | None,
    ) -> torch.Tensor:
        width = query.shape[-1]
        missing = -width % 8
        if missing:
            query, key, value = (F.pad(tensor, (0, missing)) for tensor in (query, key, value))
            scale = 1 / math.sqrt(width) if scale is None else scale
        flash: Any = aten("_scaled_dot_product_flash_attention")
        return _first(flash(query, key, value, dropout_p, is_causal, False, scale=scale))[..., :width]


def _first(found: Any) -> torch.Tensor:
    result: torch.Tensor = found[0]
    return result


def _additive(mask: torch.Tensor, query: torch.Tensor, *, padded: bool) -> torch.Tensor:
    """Return a mask as the kernels take it: in the dtype of the queries, rows aligned, one for all heads."""
    if mask.dtype == torch.bool:
        allowed, never = mask.new_zeros((), dtype=query.dtype), mask.new_full((), -math.inf, dtype=query.dtype)
        mask = torch.where(mask, allowed, never)
    length = mask.shape[-1]
    if padded and length % ALIGNED:
        mask = F.pad(mask, (0, -length % ALIGNED))[..., :length]
    return mask.expand(query.shape[0], query.shape[1], *mask.shape[-2:])


BACKWARDS = ("flash", "cudnn", "efficient")
"""Kernels whose backward takes memory for itself."""


def backward_operators() -> dict[Operator, str]:
    """Return the operator of each kernel's backward."""
    return {aten(f"_scaled_dot_product_{name}_attention_backward"): name for name in BACKWARDS}


def scratch_bytes(kernel: str, args: tuple[Any, ...]) -> int:
    """Return what a backward takes beside its results, from the arguments of its operator.

    Flash attention, and cuDNN's in the same way: sums of query gradients in fp32 with lengths and widths rounded up,
    one fp32 number a query, and where heads are shared the gradients of keys and values of every query head. The
    memory-efficient kernel: the same sums, unless the queries are in fp32; then the product of output and its gradient.
    """
    _, query, key, value = args[:4]
    rows, heads, length, width = query.shape
    if kernel == "efficient":
        per_query = rows * heads * length * 4
        return int(per_query * (query.shape[-1] + 1) if query.dtype in HALF else per_query * (value.shape[-1] + 1))
    rounded = -(-length // 128) * 128
    wide = 256 if width > 192 else -(-width // 32) * 32
    scratch = rows * heads * rounded * (wide + 1) * 4
    if key.shape[1] != heads:
        scratch += rows * key.shape[2] * heads * (key.shape[3] + value.shape[3]) * key.element_size()
    return int(scratch)
