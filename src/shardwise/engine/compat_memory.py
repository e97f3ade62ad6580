"""Private symbols of torch that the observers of memory need: `compat` for what concerns storages."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule
from torch.distributed.fsdp._fully_shard import _fsdp_param, _fsdp_param_group
from torch.distributed.tensor._sharding_prop import ShardingPropagator

from shardwise.engine.compat import CheckpointWrapper, UnsupportedRelease, _param_groups, replaced

Moment = Literal["gather", "copy_out", "hold", "reshard", "post_backward", "reduce"]
"""What FSDP2 is doing: gathering a unit; waiting for it and copying it out; making memory for what is copied out;
freeing it; the end of a unit's backward; the reduction in it."""

Around = Callable[[Moment, Any], AbstractContextManager[None]]
"""Entered while FSDP2 does something with a unit's parameter group (None where the group is not known)."""

_GROUP_METHODS: dict[str, Moment] = {
    "unshard": "gather",
    "wait_for_unshard": "copy_out",
    "reshard": "reshard",
    "post_backward": "post_backward",
}


@dataclass(frozen=True, kw_only=True)
class Held:
    """The tensors of one unit at an instant."""

    shards: tuple[torch.Tensor, ...]
    """Sharded parameters, padded."""
    sharded_gradients: tuple[torch.Tensor, ...]
    """Their gradients, and sums over the shard axis that are not reduced over replicas yet."""
    unsharded: tuple[nn.Parameter, ...]
    """Gathered parameters that were ever made, with or without memory."""
    unsharded_gradients: tuple[torch.Tensor, ...]
    """Whole gradients."""
    offloaded: bool
    """Whether shards and their gradients live on the host."""


def recomputed_part(block: nn.Module) -> nn.Module:
    """Return what of a block runs again in backward: the module in a checkpoint wrapper, or the block itself."""
    return cast(nn.Module, block._checkpoint_wrapped_module) if isinstance(block, CheckpointWrapper) else block


def groups_of(unit: FSDPModule) -> list[object]:
    """Return the parameter groups of a unit, as `watch_units` shows them."""
    return list(_param_groups(unit))


def held_by(group: Any) -> Held:
    """Return what a parameter group holds."""
    params = group.fsdp_params
    unsharded = [param._unsharded_param for param in params if hasattr(param, "_unsharded_param")]
    sums = [param.unsharded_accumulated_grad for param in params if param.unsharded_accumulated_grad is not None]
    partial = [] if group._partial_reduce_output is None else [group._partial_reduce_output]
    return Held(
        shards=tuple(param._sharded_param_data for param in params),
        sharded_gradients=(*(p.sharded_param.grad for p in params if p.sharded_param.grad is not None), *partial),
        unsharded=tuple(unsharded),
        unsharded_gradients=(*(p.grad for p in unsharded if p.grad is not None), *sums),
        offloaded=isinstance(group.offload_policy, CPUOffloadPolicy),
    )


@contextmanager
def watch_units(around: Around) -> Iterator[None]:
    """Enter `around` whenever FSDP2 gathers, frees or reduces a unit of any model (`FSDPParamGroup`, `FSDPParam`)."""
    with ExitStack() as stack:
        for name, moment in _GROUP_METHODS.items():
            method = getattr(_fsdp_param_group.FSDPParamGroup, name, None)
            stack.enter_context(replaced(_fsdp_param_group.FSDPParamGroup, name, _inside(method, around, moment)))
        make = getattr(_fsdp_param.FSDPParam, "init_all_gather_outputs", None)
        reduce = getattr(_fsdp_param_group, "foreach_reduce", None)
        stack.enter_context(
            replaced(_fsdp_param.FSDPParam, "init_all_gather_outputs", _inside(make, around, "hold", of_group=False))
        )
        stack.enter_context(
            replaced(_fsdp_param_group, "foreach_reduce", _inside(reduce, around, "reduce", of_group=False))
        )
        yield


def _inside(method: Any, around: Around, moment: Moment, *, of_group: bool = True) -> Callable[..., Any]:
    def watched(*args: Any, **kwargs: Any) -> Any:
        with around(moment, args[0] if of_group else None):
            return method(*args, **kwargs)

    return watched


@contextmanager
def watch_propagation(around: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
    """Enter `around` while DTensor computes a result's shape on fake tensors of the global shape (a private method)."""
    name = "_propagate_tensor_meta_non_cached"
    method = getattr(ShardingPropagator, name, None)

    def watched(*args: Any, **kwargs: Any) -> Any:
        with around():
            return cast(Any, method)(*args, **kwargs)

    with replaced(ShardingPropagator, name, watched):
        yield


@contextmanager
def watch_resizes(resized: Callable[[torch.UntypedStorage], None]) -> Iterator[None]:
    """Call `resized` after every `UntypedStorage.resize_`, which no dispatch mode sees."""
    storage = cast(Any, torch.UntypedStorage)
    own = "resize_" in storage.__dict__
    before = storage.resize_

    def resize_(self: torch.UntypedStorage, size: int) -> Any:
        result = before(self, size)
        resized(self)
        return result

    storage.resize_ = resize_
    try:
        yield
    finally:
        if own:
            storage.resize_ = before
        else:
            del storage.resize_


def in_backward() -> bool:
    """Whether autograd is running a backward in this thread (its graph task has a number)."""
    return bool(torch._C._current_graph_task_id() != -1)


def holders(args: tuple[Any, ...]) -> tuple[int, ...]:
    """Count who holds the first of an operator's arguments: as a tensor, in Python, and its storage in both ways.

    Equal counts from the same place in the code mean equally many holders elsewhere (`Tensor._use_count`,
    `_storage_Use_Count`).

    Raises:
        UnsupportedRelease: torch does not say.
    """
    if not hasattr(torch._C, "_storage_Use_Count"):
        raise UnsupportedRelease(f"torch {torch.__version__} has no _storage_Use_Count")
    storage = args[0].untyped_storage()
    return (
        args[0]._use_count(),
        sys.getrefcount(args[0]),
        int(torch._C._storage_Use_Count(storage._cdata)),
        sys.getrefcount(storage),
    )


def is_fake(tensor: torch.Tensor) -> bool:
    """Whether a tensor has a shape and a storage but no memory."""
    return isinstance(tensor, FakeTensor)


def fakes_are_ambient() -> bool:
    """Whether a FakeTensorMode is at work around the caller."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None


def plain_tensors(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the tensors that a tensor is made of: itself, or those within a subclass, however deep."""
    if not is_wrapper(type(tensor)):
        yield tensor
        return
    names, _ = cast(Any, tensor).__tensor_flatten__()
    for name in names:  # a DTensor's mesh is among them
        part = getattr(tensor, name)
        if isinstance(part, torch.Tensor):
            yield from plain_tensors(part)


def is_wrapper(kind: type) -> bool:
    """Whether tensors of a class are made of other tensors, on which their operators run in the end."""
    return hasattr(kind, "__tensor_flatten__")
