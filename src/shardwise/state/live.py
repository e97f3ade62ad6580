"""What a live sharded model and its optimizer hold, by name."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from shardwise.engine import eight_bit
from shardwise.engine.names import unwrapped_name
from shardwise.engine.resting_state import empty_state, optimizer_name
from shardwise.state.manifest import Contents, OptimizerInfo, TensorInfo

_NOT_SAVED = ("foreach", "fused", "capturable", "differentiable", "params", "param_names")
"""Group entries that belong to the live optimizer, not to what was learnt."""

_GROUPS = "optimizer_groups"
_STEP = "step"


def reshard(model: nn.Module) -> None:
    """Free gathered weights, so that parameters are the shards again.

    A unit that does not reshard after forward stays gathered when no backward follows, as after an evaluation; its
    parameters are then whole tensors that the optimizer does not know.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def all_weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return every parameter and persistent buffer by its name without wrappers; tied ones once."""
    reshard(model)
    weights: dict[str, torch.Tensor] = {unwrapped_name(name): p for name, p in model.named_parameters()}
    persistent = {unwrapped_name(name) for name in model.state_dict()}
    for name, buffer in model.named_buffers():
        if unwrapped_name(name) in persistent:
            weights[unwrapped_name(name)] = buffer
    return weights


def saved_weights(model: nn.Module) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return (weights that a checkpoint holds, weights that never change).

    When something is frozen, only what trains is saved; otherwise everything is, persistent buffers included.
    """
    weights = all_weights(model)
    frozen = {name: weight for name, weight in weights.items() if _is_parameter(weight) and not weight.requires_grad}
    if not frozen:
        return weights, {}
    return {name: weight for name, weight in weights.items() if weight.requires_grad}, frozen


def info(tensor: torch.Tensor) -> TensorInfo:
    """Return a tensor's global shape and dtype."""
    return TensorInfo(shape=tuple(tensor.shape), dtype=str(tensor.dtype).removeprefix("torch."))


def contents(model: nn.Module, optimizer: torch.optim.Optimizer) -> Contents:
    """Describe what a checkpoint of this model and optimizer holds.

    Raises:
        ValueError: the optimizer holds a parameter that is not the model's, or a state that is neither a number nor
            shaped and sharded as its weight.
    """
    saved, frozen = saved_weights(model)
    return Contents(
        weights={name: info(weight) for name, weight in saved.items()},
        frozen_tensors=len(frozen),
        frozen_elements=sum(weight.numel() for weight in frozen.values()),
        optimizer=_optimizer_info(model, optimizer),
    )


def _optimizer_info(model: nn.Module, optimizer: torch.optim.Optimizer) -> OptimizerInfo:
    state: dict[str, dict[str, TensorInfo]] = {}
    groups: list[list[str]] = [[] for _ in optimizer.param_groups]
    for index, name, parameter in _named(model, optimizer):
        groups[index].append(name)
        for key, value in optimizer.state.get(parameter, {}).items():
            _check_state(name, key, value, parameter)
        if saved := _saved_form(optimizer, parameter):
            state[name] = {key: info(value) for key, value in saved.items()}
    return OptimizerInfo(
        name=optimizer_name(optimizer),
        groups=tuple(tuple(names) for names in groups),
        state=state,
        updates=update_counts(optimizer),
    )


def update_counts(optimizer: torch.optim.Optimizer) -> tuple[int, ...]:
    """Return the distinct numbers of updates that the parameters have had, sorted."""
    counts = {int(values[_STEP]) for values in optimizer.state.values() if _STEP in values}
    return tuple(sorted(counts))


def weight_entries(model: nn.Module) -> dict[str, Any]:
    """Return the saved weights under `weights/<name>`."""
    return {f"weights/{name}": weight for name, weight in saved_weights(model)[0].items()}


def optimizer_entries(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the state's tensors under `optimizer/<parameter>/<key>`, and the groups' settings as one object."""
    entries: dict[str, Any] = {_GROUPS: pickle.dumps([_settings(group) for group in optimizer.param_groups])}
    for _, name, parameter in _named(model, optimizer):
        for key, value in _saved_form(optimizer, parameter).items():
            entries[f"optimizer/{name}/{key}"] = value
    return entries


def empty_entries(model: nn.Module, optimizer: torch.optim.Optimizer, saved: OptimizerInfo) -> dict[str, Any]:
    """Return tensors to load `saved` into: the optimizer's own where it has them, else new ones sharded as the weights.

    The optimizer takes no step for it. Scales of 8-bit states are left out when they are those of another sharding.
    """
    entries: dict[str, Any] = {_GROUPS: b""}
    eight_bit_states = optimizer_name(optimizer) == eight_bit.CLASS
    for _, name, parameter in _named(model, optimizer):
        for key, wanted in saved.state.get(name, {}).items():
            if eight_bit_states and eight_bit.is_scale(key):
                if eight_bit.scale_shape(parameter) == wanted.shape:
                    entries[f"optimizer/{name}/{key}"] = eight_bit.empty_scales(parameter)
                continue
            value = None if eight_bit_states else optimizer.state.get(parameter, {}).get(key)
            if value is None or info(value) != wanted:
                value = _empty(optimizer, parameter, wanted)
            entries[f"optimizer/{name}/{key}"] = value
    return entries


def install_entries(
    model: nn.Module, optimizer: torch.optim.Optimizer, saved: OptimizerInfo, entries: Mapping[str, Any]
) -> None:
    """Give the optimizer the loaded state and group settings; its implementation (fused, foreach) stays its own."""
    loaded = optimizer.state_dict()
    numbers = iter(number for group in loaded["param_groups"] for number in group["params"])
    loaded["state"] = {}
    for _, name, parameter in _named(model, optimizer):
        number = next(numbers)
        if name in saved.state:
            places = {key: f"optimizer/{name}/{key}" for key in saved.state[name]}
            state = {key: entries[place] for key, place in places.items() if place in entries}
            loaded["state"][number] = _live_form(optimizer, parameter, state)
    for group, settings in zip(loaded["param_groups"], pickle.loads(entries[_GROUPS]), strict=True):
        group.update(settings)
    optimizer.load_state_dict(loaded)


def _named(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[tuple[int, str, torch.Tensor]]:
    """Yield (group, name, parameter) in the optimizer's order."""
    names = {id(parameter): unwrapped_name(name) for name, parameter in model.named_parameters()}
    for index, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            if id(parameter) not in names:
                raise ValueError("the optimizer holds a parameter that is not the model's: build it after sharding")
            yield index, names[id(parameter)], parameter


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in _NOT_SAVED}


def _is_parameter(weight: torch.Tensor) -> bool:
    return isinstance(weight, nn.Parameter)


def _check_state(name: str, key: str, value: object, parameter: torch.Tensor) -> None:
    if isinstance(value, torch.Tensor):
        shaped = value.shape == parameter.shape and isinstance(value, DTensor) == isinstance(parameter, DTensor)
        if shaped or value.ndim == 0:
            return
    raise ValueError(f"optimizer state {key!r} of {name} is neither a number nor shaped as its weight: cannot be saved")


def _empty(optimizer: torch.optim.Optimizer, parameter: torch.Tensor, wanted: TensorInfo) -> torch.Tensor:
    dtype: torch.dtype = getattr(torch, wanted.dtype)
    if wanted.shape == tuple(parameter.shape):
        return empty_state(optimizer, parameter, dtype)
    return torch.zeros(wanted.shape, dtype=dtype)


def _saved_form(optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> Mapping[str, torch.Tensor]:
    """Return a parameter's state as a checkpoint holds it; only 8-bit states differ from the live ones."""
    state: Mapping[str, torch.Tensor] = optimizer.state.get(parameter, {})
    return eight_bit.saved_form(parameter, state) if optimizer_name(optimizer) == eight_bit.CLASS else state


def _live_form(
    optimizer: torch.optim.Optimizer, parameter: torch.Tensor, saved: Mapping[str, torch.Tensor]
) -> Mapping[str, torch.Tensor]:
    return eight_bit.live_form(parameter, saved) if optimizer_name(optimizer) == eight_bit.CLASS else saved
