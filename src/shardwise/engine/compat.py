"""Every private symbol of torch and transformers, and every difference between the supported releases.

Nothing else in the package reaches below the public interface. Each function names what it stands in for, and is
tested by hiding the attribute that another release lacks.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointWrapper,
    checkpoint_wrapper,
)
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

__all__ = ["CheckpointWrapper", "checkpoint_wrapper"]


class UnsupportedRelease(RuntimeError):
    """An installed library lacks something that every supported release has."""


@dataclass(frozen=True, kw_only=True)
class UnitFacts:
    """What FSDP2 itself says of one unit."""

    param_dtype: torch.dtype | None
    """Dtype in which the unit is gathered; None: each parameter's own."""
    reduce_dtype: torch.dtype | None
    """Dtype of the gradient reduction; None: the gradients' own."""
    output_dtype: torch.dtype | None
    """Dtype of the unit's outputs; None: as computed."""
    reshard_after_forward: bool
    """Whether gathered weights are freed after forward."""
    sums_gradients: bool
    """Whether gradients are summed over ranks, without a division."""


def _param_groups(unit: FSDPModule) -> list[Any]:
    """Parameter groups of a unit: a list from torch 2.12 on, one group (or None) before."""
    state = unit._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is not None:
        return list(groups)
    if not hasattr(state, "_fsdp_param_group"):
        raise UnsupportedRelease(f"torch {torch.__version__}: an FSDP2 unit does not show its parameter group")
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


def unit_facts(unit: FSDPModule) -> UnitFacts | None:
    """Read one `fully_shard` unit back; None when it holds no parameter of its own."""
    groups = _param_groups(unit)
    if not groups:
        return None
    group = groups[0]
    return UnitFacts(
        param_dtype=group.mp_policy.param_dtype,
        reduce_dtype=group.mp_policy.reduce_dtype,
        output_dtype=group.mp_policy.output_dtype,
        reshard_after_forward=group.post_forward_mesh_info is not None,
        sums_gradients=group.gradient_divide_factor == 1.0 and group.force_sum_reduction_for_comms,
    )


def sum_gradients(unit: FSDPModule) -> None:
    """Make the unit add gradients over ranks without dividing, by plain sums on every backend.

    Raises UnsupportedRelease where the setters are missing: an averaged gradient would be silently wrong.
    """
    for setter, value in (("set_gradient_divide_factor", 1.0), ("set_force_sum_reduction_for_comms", True)):
        if not hasattr(unit, setter):
            raise UnsupportedRelease(f"torch {torch.__version__}: FSDPModule has no {setter}; use torch >= 2.11")
        getattr(unit, setter)(value)


def local_slices(param: torch.Tensor) -> tuple[slice, ...]:
    """Return the part of the full tensor that this rank holds; all of it for a plain tensor."""
    if not isinstance(param, DTensor):
        return tuple(slice(0, size) for size in param.shape)
    shape, offset = compute_local_shape_and_global_offset(param.shape, param.device_mesh, param.placements)
    return tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))


def agree_on_overflow(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> None:
    """Give every rank the same overflow flag before `scaler.step`.

    GradScaler reduces the flag over the mesh of the first gradient only; ranks outside it would step where others skip.
    """
    flags: Iterable[torch.Tensor] = scaler._found_inf_per_device(optimizer).values()
    for flag in flags:
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)


def init_module_buffers(model: nn.Module, module: nn.Module) -> None:
    """Let transformers fill the non-persistent buffers of one module, as its own loader does."""
    initialise = getattr(model, "_init_weights", None)
    if initialise is None:
        raise UnsupportedRelease(f"{type(model).__name__} has no _init_weights: is it a transformers model?")
    initialise(module)


def attention_of(model: nn.Module) -> Any:
    """Return the name of the attention implementation that a transformers model (or a PEFT model of one) uses."""
    return cast(Any, model).config._attn_implementation


@dataclass(frozen=True, kw_only=True)
class WeightRead:
    """Checkpoint tensors that together give one or more tensors of the model."""

    first_target: str
    """Name in the model (of the first target where one source gives several)."""
    sources: tuple[tuple[str, str], ...]
    """(key in the checkpoint, pattern of the converter that it matches or the key itself), in order."""
    converter: Any | None
    """transformers' WeightConverter, or None: the tensor is taken as it is."""


def weight_reads(model: nn.Module, keys: Iterable[str]) -> tuple[list[WeightRead], list[str]]:
    """Map checkpoint keys to model tensors by transformers' own renamings and converters.

    Returns the reads, and the keys that lead nowhere.
    """
    from copy import deepcopy

    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

    mapping = get_model_conversion_mapping(model)
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    targets = model.state_dict()
    prefix = cast(Any, model).base_model_prefix
    grouped: dict[str, tuple[Any | None, list[tuple[str, str]]]] = {}
    unused = []
    for key in sorted(keys, key=dot_natural_key):
        target, pattern = rename_source_key(key, renamings, converters, prefix, targets)
        if target not in targets and key in targets:
            target, pattern = key, None
        if target not in targets:
            unused.append(key)
        elif pattern is None:
            grouped[target] = (None, [(key, key)])
        else:
            grouped.setdefault(target, (deepcopy(by_pattern[pattern]), []))[1].append((key, pattern))
    reads = [
        WeightRead(first_target=target, sources=tuple(sources), converter=converter)
        for target, (converter, sources) in grouped.items()
    ]
    return reads, unused


def convert(read: WeightRead, tensors: list[torch.Tensor], model: nn.Module) -> dict[str, torch.Tensor]:
    """Run a read's converter over its source tensors; returns full tensors by name in the model."""
    if read.converter is None:
        return {read.first_target: tensors[0]}
    for (key, pattern), tensor in zip(read.sources, tensors, strict=True):
        read.converter.add_tensor(read.first_target, key, pattern, tensor)
    converted = read.converter.convert(read.first_target, model=model, config=cast(Any, model).config)
    return {name: value[0] if isinstance(value, list) else value for name, value in converted.items()}
