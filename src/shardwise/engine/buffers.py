"""Buffers that no checkpoint holds, filled as transformers fills them."""

from __future__ import annotations

import torch
from torch import nn

from shardwise.engine.compat import init_module_buffers
from shardwise.engine.names import unwrapped_name
from shardwise.spec.problems import BadInput, Problem


def _poison(buffer: torch.Tensor) -> None:
    if buffer.is_floating_point():
        buffer.fill_(float("nan"))
    elif buffer.dtype != torch.bool:
        buffer.fill_(torch.iinfo(buffer.dtype).min)


def _poisoned(buffer: torch.Tensor) -> bool:
    if buffer.is_floating_point():
        return bool(buffer.isnan().any())
    return buffer.dtype != torch.bool and bool((buffer == torch.iinfo(buffer.dtype).min).any())


@torch.no_grad()
def fill_buffers(model: nn.Module, plain_model: nn.Module) -> int:
    """Fill non-persistent buffers (rotary tables and the like) after `to_empty`; returns how many.

    Fresh memory holds garbage that no error would show, so buffers are first marked; one that is still marked
    afterwards is refused. Called before weights are loaded.

    Args:
        model: The materialised model, adapters and wrappers included.
        plain_model: The transformers model inside it.

    Raises:
        BadInput: a buffer that transformers does not know how to fill.
    """
    persistent = {unwrapped_name(name) for name in model.state_dict()}
    owners = []
    for module_name, module in model.named_modules():
        names = [
            name
            for name, _ in module.named_buffers(recurse=False)
            if unwrapped_name(f"{module_name}.{name}").lstrip(".") not in persistent
        ]
        if names:
            owners.append((module_name, module, names))
    for _, module, names in owners:
        for name in names:
            _poison(module.get_buffer(name))
        init_module_buffers(plain_model, module)
    for module_name, module, names in owners:
        for name in names:
            if _poisoned(module.get_buffer(name)):
                raise BadInput(
                    Problem(
                        field="model",
                        value=f"{module_name}.{name}",
                        reason="this buffer is in no checkpoint and transformers does not fill it",
                        fix="the architecture is not supported",
                    )
                )
    return sum(len(names) for _, _, names in owners)
