"""Activation checkpointing on blocks: whole blocks, every k-th, or all but what is costly to compute again."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any, Literal

from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    create_selective_checkpoint_contexts,
)

from shardwise.engine.compat import CheckpointWrapper, Operator, checkpoint_wrapper, operator_argument, operator_name
from shardwise.spec.layout import is_checkpointed

Checkpointing = Literal["none", "full", "selective"]
"""What one block does in backward: nothing; all of its forward again; the cheap part of it."""

CHEAP_INNER = 256
"""`selective` computes matrix products again whose inner dimension is at most this: those of adapters, and attention
scores where attention is not one operator. Two operations per unit of inner dimension are what an element costs."""

_LEFT_FACTOR = {
    "aten::mm": 0,
    "aten::bmm": 0,
    "aten::addmm": 1,
    "aten::baddbmm": 1,
    "aten::_grouped_mm": 0,
    "transformers::grouped_mm_fallback": 0,
}
"""Matrix products: operator -> place of the left factor among its arguments."""

_ATTENTION = frozenset(
    {
        "aten::_scaled_dot_product_flash_attention",
        "aten::_scaled_dot_product_efficient_attention",
        "aten::_scaled_dot_product_cudnn_attention",
        "aten::_scaled_dot_product_flash_attention_for_cpu",
        "aten::_scaled_dot_product_fused_attention_overrideable",
        "aten::_flash_attention_forward",
        "aten::_efficient_attention_forward",
        "aten::_cudnn_attention_forward",
        "flash_attn::_flash_attn_forward",
        "flash_attn::_flash_attn_varlen_forward",
    }
)
"""Attention as one operator, on CPUs and GPUs."""


def planned_checkpointing(setting: str, index: int) -> Checkpointing:
    """Return what block `index` should do under a Plan's `activation_checkpointing`."""
    if not is_checkpointed(setting, index):
        return "none"
    return "selective" if setting == "selective" else "full"


def checkpointing_of(block: nn.Module) -> Checkpointing:
    """Return what a live block does, read from its wrapper."""
    if not isinstance(block, CheckpointWrapper):
        return "none"
    return "selective" if block.checkpoint_fn.keywords.get("context_fn") is _selective_contexts else "full"


def wrap_blocks(blocks: nn.ModuleList, setting: str) -> int:
    """Wrap every block that `setting` asks for, in place; returns how many.

    Non-reentrant, so frozen embeddings need no special input, and the RNG is restored for dropout.
    """
    wrapped = 0
    for index, block in enumerate(blocks):
        planned = planned_checkpointing(setting, index)
        if planned == "none":
            continue
        how: dict[str, Any] = {"context_fn": _selective_contexts} if planned == "selective" else {}
        blocks[index] = checkpoint_wrapper(block, preserve_rng_state=True, **how)
        wrapped += 1
    return wrapped


def is_kept(operator: Operator, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether `selective` keeps this call's output for backward.

    Kept: attention as one operator, and matrix products with an inner dimension above CHEAP_INNER. Attention with
    dropout is not: left out of the recompute, it would draw no random numbers there, and every later dropout of the
    block would get other ones than in forward.
    """
    name = operator_name(operator)
    if name in _ATTENTION:
        return not operator_argument(operator, "dropout_p", args, kwargs)
    place = _LEFT_FACTOR.get(name)
    return place is not None and int(args[place].shape[-1]) > CHEAP_INNER


def _keep(_: SelectiveCheckpointContext, operator: Operator, *args: object, **kwargs: object) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if is_kept(operator, args, kwargs) else CheckpointPolicy.PREFER_RECOMPUTE


def _selective_contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    contexts: tuple[AbstractContextManager[Any], AbstractContextManager[Any]]
    contexts = create_selective_checkpoint_contexts(_keep)  # type: ignore[no-untyped-call]
    return contexts
