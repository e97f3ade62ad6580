"""Every private symbol of torch and transformers, and every difference between the supported releases.

Nothing else in the package reaches below the public interface. Each function names what it stands in for, and is
tested by hiding the attribute that another release lacks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed import distributed_c10d
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointWrapper,
    checkpoint_wrapper,
)
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather as AllGatherComm
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter as ReduceScatterComm
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import Placement, _StridedShard
from torch.utils._python_dispatch import TorchDispatchMode

from shardwise.spec.plan import Plan
from shardwise.spec.problems import BadInput, Problem

__all__ = ["AllGatherComm", "CheckpointWrapper", "ReduceScatterComm", "TorchDispatchMode", "checkpoint_wrapper"]


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
    reshard_after_forward: bool | int
    """Whether gathered weights are freed after forward, or the ranks over which they then stay sharded."""
    sums_gradients: bool
    """Whether gradients are summed over ranks, without a division."""
    forward_prefetch: tuple[nn.Module, ...]
    """Units gathered ahead in forward, nearest first."""
    backward_prefetch: tuple[nn.Module, ...]
    """The same in backward; the unit itself: none; empty: FSDP2's default, the one before."""
    gathers_in_background: bool
    """Whether gathers return before they are done (CPUs)."""
    all_gather: AllGatherComm
    """The all-gather that it calls."""
    reduce_scatter: ReduceScatterComm
    """The reduce-scatter that it calls."""
    separate_group: bool
    """Whether it reduces on a communicator of its own."""
    reduce_buffers: int
    """Reduce-scatter inputs in flight (GPUs)."""
    offloaded: bool
    """Whether its shards live in host memory."""
    reduces: bool
    """Whether the next backward reduces its gradients."""
    all_reduces: bool
    """Whether the next backward reduces them over replicas too."""
    parameters: tuple[nn.Parameter, ...]
    """Its sharded parameters."""


def _param_groups(unit: FSDPModule) -> list[Any]:
    """Parameter groups of a unit: a list from torch 2.12 on, one group (or None) before."""
    state = unit._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is not None:
        return list(groups)
    if not hasattr(state, "_fsdp_param_group"):
        raise UnsupportedRelease(f"torch {torch.__version__}: an FSDP2 unit does not show its parameter group")
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


def unit_key(unit: FSDPModule) -> int:
    """Return a number that is equal for two modules exactly when one `fully_shard` call took both."""
    return id(unit._get_fsdp_state())


def unit_facts(unit: FSDPModule) -> UnitFacts | None:
    """Read one `fully_shard` unit back; None when it holds no parameter of its own."""
    groups = _param_groups(unit)
    if not groups:
        return None
    group, state = groups[0], unit._get_fsdp_state()
    return UnitFacts(
        param_dtype=group.mp_policy.param_dtype,
        reduce_dtype=group.mp_policy.reduce_dtype,
        output_dtype=group.mp_policy.output_dtype,
        reshard_after_forward=_resharding(group),
        sums_gradients=group.gradient_divide_factor == 1.0 and group.force_sum_reduction_for_comms,
        forward_prefetch=_modules_of(state._states_to_forward_prefetch),
        backward_prefetch=_modules_of(state._states_to_backward_prefetch),
        gathers_in_background=group.unshard_async_op,
        all_gather=group._all_gather_comm,
        reduce_scatter=group._reduce_scatter_comm,
        separate_group=getattr(group.mesh_info, "reduce_scatter_process_group", None) is not None,
        reduce_buffers=getattr(group, "reduce_scatter_max_input_buffers", 1),
        offloaded=isinstance(group.offload_policy, CPUOffloadPolicy),
        reduces=group.reduce_grads,
        all_reduces=group.all_reduce_grads,
        parameters=tuple(held.sharded_param for held in group.fsdp_params),
    )


def _resharding(group: Any) -> bool | int:
    """True: to the shards; a number: to shards over that many ranks; False: not at all."""
    after = group.post_forward_mesh_info
    if after is None or after is group.mesh_info or after.shard_mesh_size == group.mesh_info.shard_mesh_size:
        return after is not None
    return int(after.shard_mesh_size)


def _modules_of(states: Iterable[Any]) -> tuple[nn.Module, ...]:
    return tuple(state._modules[0] for state in states)


def reads_gradients_early(unit: FSDPModule) -> bool:
    """Whether FSDP2 reads a unit's reduced gradients as soon as the reduce-scatter returns.

    It does where it adds to a gradient that exists, and where a hook waits for the gradient.
    """
    shards = [param.sharded_param for group in _param_groups(unit) for param in group.fsdp_params]
    return any(s.grad is not None or getattr(s, "_post_accumulate_grad_hooks", None) for s in shards)


def gather_in_background(root: FSDPModule, enabled: bool) -> None:
    """Let gathers of a model return at once on CPUs, where there are no streams (`_set_unshard_async_op`)."""
    if not hasattr(root, "_set_unshard_async_op"):
        raise UnsupportedRelease(f"torch {torch.__version__}: FSDPModule has no _set_unshard_async_op")
    root._set_unshard_async_op(enabled)


def after_backward(callback: Callable[[], None]) -> None:
    """Run `callback` at the end of the backward that is running, as FSDP2's own last step does."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


SINCE_2_13 = ("set_reduce_scatter_max_input_buffers", "set_separate_reduce_scatter_group")
"""Setters of FSDPModule that torch 2.11 and 2.12 lack."""


def set_reduce_buffers(root: FSDPModule, buffers: int) -> None:
    """Set how many reduce-scatter inputs of a model may be in flight on GPUs; 1 is what every release does."""
    if buffers != 1:
        _since_2_13(root, SINCE_2_13[0])(buffers)


def set_separate_group(root: FSDPModule) -> None:
    """Let a model reduce on a communicator of its own; collective."""
    _since_2_13(root, SINCE_2_13[1])(True)


def check_release(plan: Plan) -> None:
    """Refuse, before ranks start, what this release of torch lacks.

    Raises:
        BadInput: naming the setting and the release that has it.
    """
    wanted = {
        ("reduce_scatter.buffers", SINCE_2_13[0]): plan.reduce_scatter.buffers if torch.cuda.is_available() else 1,
        ("reduce_scatter.separate_group", SINCE_2_13[1]): plan.reduce_scatter.separate_group,
    }
    problems = [
        Problem(
            field=field,
            value=value,
            reason=f"needs torch 2.13, and this is torch {torch.__version__}",
            fix="remove it, or install torch 2.13",
        )
        for (field, setter), value in wanted.items()
        if value not in (1, False) and not hasattr(FSDPModule, setter)
    ]
    if problems:
        raise BadInput(problems)


def _since_2_13(root: FSDPModule, setter: str) -> Any:
    if not hasattr(root, setter):
        raise UnsupportedRelease(f"torch {torch.__version__}: FSDPModule has no {setter}; it came with torch 2.13")
    return getattr(root, setter)


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
    """Let transformers fill the non-persistent buffers of one module, as its own loader does.

    Its parameters carry transformers' mark of those that are loaded meanwhile (`_is_hf_initialized`): else an embedding
    would be filled too, and gathered on every rank for its row of padding.
    """
    initialise = getattr(model, "_init_weights", None)
    if initialise is None:
        raise UnsupportedRelease(f"{type(model).__name__} has no _init_weights: is it a transformers model?")
    parameters = [cast(Any, parameter) for parameter in module.parameters(recurse=False)]
    for parameter in parameters:
        parameter._is_hf_initialized = True
    try:
        initialise(module)
    finally:
        for parameter in parameters:
            del parameter._is_hf_initialized


def is_compiled(module: nn.Module) -> bool:
    """Whether `module.compile()` was called."""
    return module._compiled_call_impl is not None


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


Operator = torch._ops.OpOverload
"""One operator of torch, as dispatch modes and checkpoint policies see it."""


def operator_name(operator: Operator) -> str:
    """Return the name of an operator without its overload, as `aten::mm`."""
    return str(operator._schema.name)


def operator_argument(operator: Operator, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Return the argument `name` of a call of an operator, or its default; None when it has no such argument."""
    for place, argument in enumerate(operator._schema.arguments):
        if argument.name == name:
            return args[place] if place < len(args) else kwargs.get(name, argument.default_value)
    return None


def group_ranks(group: Any) -> tuple[int, ...]:
    """Return the global ranks of a process group as operators take it: itself, boxed, or its name."""
    if isinstance(group, torch.ScriptObject):
        group = dist.ProcessGroup.unbox(group)
    name: str = group if isinstance(group, str) else group.group_name
    return tuple(dist.get_process_group_ranks(cast(Any, distributed_c10d)._resolve_process_group(name)))


def strided_shard(dim: int, split_factor: int) -> Placement:
    """Return the placement that FSDP2 gives a dim which tensor parallelism has split into `split_factor` parts."""
    return _StridedShard(dim, split_factor=split_factor)


def is_view_of_parameter(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor looks at a parameter's memory, as the transposed weight that a linear layer saves does."""
    return isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter)


def is_plain(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor is nothing but memory and a shape: no parameter and no subclass; fake ones are."""
    return type(tensor) in (torch.Tensor, FakeTensor)


def all_gather(
    output: torch.Tensor, part: torch.Tensor, group: dist.ProcessGroup, *, async_op: bool
) -> dist.Work | None:
    """Gather parts into one tensor by this release's name for it (`all_gather_single` from torch 2.13 on)."""
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return cast("dist.Work | None", gather(output, part, group=group, async_op=async_op))


@contextmanager
def replaced(owner: Any, name: str, stand_in: Any) -> Iterator[None]:
    """Replace one attribute of a module or class for a while.

    Raises:
        UnsupportedRelease: it does not have it.
    """
    if not hasattr(owner, name):
        raise UnsupportedRelease(f"{getattr(owner, '__name__', owner)} has no {name}")
    before = getattr(owner, name)
    setattr(owner, name, stand_in)
    try:
        yield
    finally:
        setattr(owner, name, before)
