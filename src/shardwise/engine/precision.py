"""Dtypes of a Plan on a model: storage, FSDP2's policies, buffers."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from shardwise.engine.dtypes import TORCH_DTYPE
from shardwise.spec.plan import Dtypes
from shardwise.spec.strict import Dtype


def store_trained(model: nn.Module, dtype: Dtype) -> None:
    """Give every trainable parameter its storage dtype; called on the meta device, where nothing is copied."""
    for parameter in model.parameters():
        if parameter.requires_grad and parameter.dtype != TORCH_DTYPE[dtype]:
            parameter.data = parameter.data.to(TORCH_DTYPE[dtype])


def unit_policy(dtypes: Dtypes) -> MixedPrecisionPolicy:
    """Policy of every unit but the root: outputs stay in the compute dtype, as the next unit expects them."""
    return MixedPrecisionPolicy(param_dtype=TORCH_DTYPE[dtypes.param], reduce_dtype=TORCH_DTYPE[dtypes.reduce])


def root_policy(dtypes: Dtypes) -> MixedPrecisionPolicy:
    """Policy of the root unit, whose outputs are the logits."""
    return MixedPrecisionPolicy(
        param_dtype=TORCH_DTYPE[dtypes.param],
        reduce_dtype=TORCH_DTYPE[dtypes.reduce],
        output_dtype=TORCH_DTYPE[dtypes.output],
    )


def is_rotary(module: nn.Module, buffer_name: str) -> bool:
    """Whether a buffer is a rotary table, which low precision would ruin at long positions."""
    return "rotary" in type(module).__name__.lower() or "inv_freq" in buffer_name


def cast_buffers(model: nn.Module, dtypes: Dtypes) -> None:
    """Cast floating buffers to the plan's buffer dtype, rotary tables excepted."""
    if dtypes.buffer is None:
        return
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.is_floating_point() and not is_rotary(module, name):
                setattr(module, name, buffer.to(TORCH_DTYPE[dtypes.buffer]))


def move_buffers(model: nn.Module, device: torch.device) -> None:
    """Put every buffer on `device`: FSDP2 moves offloaded parameters to it for computing, but no buffers."""
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(device))
