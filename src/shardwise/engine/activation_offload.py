"""Activations that blocks save for backward wait in host memory.

Around each block's forward, autograd's saved tensors pass through two hooks. The first copies a tensor's whole storage
to pinned host memory on a stream beside the computation; the original is let go at the end of the next block's forward.
The second brings it back in backward: the first tensor that a block asks for fetches all of that block, and starts the
way back of the block before it. The last block's activations are still there when backward begins, and are used as they
are. On a CPU there is nowhere to go: tensors stay where they are and are counted.

What stays on the device: parameters, which FSDP2 frees and gathers itself; what every block is given beside the hidden
states (rotary tables, masks), of which there is one copy; a block's buffers; storages under SMALLEST; tensor
subclasses; and what selective checkpointing keeps, which is no saved tensor. Under full checkpointing a block saves its
input only.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from shardwise.engine.compat import is_plain, is_view_of_parameter

SMALLEST = 1024
"""Storages of fewer bytes stay on the device."""

_INSTALLED = "shardwise_activation_offload"
"""Attribute of a block that holds its ActivationOffload."""


class SideStream:
    """Copies beside the computation's stream of one GPU, in order."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def to_host(self, there: torch.Tensor) -> torch.Tensor:
        """Start a copy of bytes that the computation has been asked to write; returns where they will be."""
        host = torch.empty(there.numel(), dtype=torch.uint8, pin_memory=True)
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            host.copy_(there, non_blocking=True)
        return host

    def from_host(self, hosts: list[torch.Tensor]) -> list[torch.Tensor]:
        """Start copies back. Their memory is the computation's: the copies wait until it has been given up there."""
        back = [torch.empty(host.numel(), dtype=torch.uint8, device=self.device) for host in hosts]
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            for there, host in zip(back, hosts, strict=True):
                there.copy_(host, non_blocking=True)
        return back

    def mark(self) -> torch.cuda.Event:
        """Return what has happened when all copies started so far are done."""
        event: torch.cuda.Event = self.stream.record_event()
        return event

    def wait(self, event: torch.cuda.Event) -> None:
        """Let the computation go on only after `event`; the caller does not wait."""
        torch.cuda.current_stream(self.device).wait_event(event)


class ActivationOffload:
    """The way of one model's activations to the host and back."""

    def __init__(self) -> None:
        self.bytes_packed = 0
        """Bytes given to the host since the start; on a CPU, those that would have been."""
        self.last: weakref.ref[_Trip] | None = None
        self.ahead: _Trip | None = None
        self.side: SideStream | None = None

    def begin(self, stays: set[StorageWeakRef]) -> _Trip:
        """Start the trip of one block's activations."""
        if self.ahead is not None:
            self.ahead.wait()  # fetched and never asked for: its memory is in use until the copies into it are done
        trip = _Trip(offload=self, stays=stays, previous=self.last)
        self.last = weakref.ref(trip)
        return trip

    def to_host(self, there: torch.Tensor) -> torch.Tensor:
        """Send bytes to the host; on a CPU they are there."""
        if self.side is None:
            self.side = side_stream(there.device)
        return there if self.side is None else self.side.to_host(there)


def side_stream(device: torch.device) -> SideStream | None:
    """Return where copies run beside the computation; None on a CPU, where there is nowhere to go."""
    return SideStream(device) if device.type == "cuda" else None


def offload_activations(blocks: nn.ModuleList) -> None:
    """Send what every block saves for backward to the host; after checkpoint wrapping, before `fully_shard`.

    Works by hooks on the blocks, so names and classes of modules stay. FSDP2's own hooks lie around them.
    """
    offload = ActivationOffload()
    for block in blocks:
        _Around(block, offload)


def activation_offload_of(block: nn.Module) -> ActivationOffload | None:
    """Return how a live block's activations travel; None when they stay."""
    installed: ActivationOffload | None = getattr(block, _INSTALLED, None)
    return installed


class _Around:
    """The hooks around one block's forward."""

    def __init__(self, block: nn.Module, offload: ActivationOffload) -> None:
        self.offload = offload
        self.open: list[tuple[_Trip, saved_tensors_hooks]] = []
        setattr(block, _INSTALLED, offload)
        block.register_forward_pre_hook(self.enter, with_kwargs=True)
        block.register_forward_hook(self.leave, always_call=True)

    def enter(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        shared = [*_tensors((args[1:], kwargs)), *block.buffers()]
        trip = self.offload.begin({identity(tensor.untyped_storage()) for tensor in shared})
        hooks = saved_tensors_hooks(trip.pack, trip.unpack)
        hooks.__enter__()
        self.open.append((trip, hooks))

    def leave(self, block: nn.Module, args: tuple[Any, ...], output: object) -> None:
        if self.open:
            trip, hooks = self.open.pop()
            hooks.__exit__()
            trip.depart()


def identity(storage: torch.UntypedStorage) -> StorageWeakRef:
    """A key that is equal for one storage however tensors look at it, and stays its own after the storage is freed."""
    return StorageWeakRef(storage)  # type: ignore[no-untyped-call]


def _tensors(value: object) -> Iterator[torch.Tensor]:
    """Yield the plain tensors in nested tuples, lists and dicts."""
    if isinstance(value, torch.Tensor):
        if is_plain(value):
            yield value
    elif isinstance(value, tuple | list):
        for element in value:
            yield from _tensors(element)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))


@dataclass(kw_only=True)
class _Cargo:
    """One storage that a block saves, perhaps as several tensors."""

    there: torch.Tensor | None
    """Its bytes on the device, while they are there."""
    host: torch.Tensor
    """Its bytes on the host."""
    wanted: int = 0
    """Saved tensors that have not been asked for yet."""


@dataclass(frozen=True, kw_only=True)
class _Packed:
    """A saved tensor: where it lies in its storage."""

    cargo: _Cargo
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


@dataclass(kw_only=True, eq=False)
class _Trip:
    """What one forward of one block saves."""

    offload: ActivationOffload
    stays: set[StorageWeakRef]
    """Storages that stay on the device."""
    previous: weakref.ref[_Trip] | None
    """The block before; it lives as long as its graph."""
    cargo: dict[StorageWeakRef, _Cargo] = field(default_factory=dict)
    departed: torch.cuda.Event | None = None
    """All copies to the host are done."""
    arrived: torch.cuda.Event | None = None
    """All copies back are done; None when there are none for which the computation has not waited."""
    asked: bool = False
    """Backward has asked for a tensor."""

    def pack(self, tensor: torch.Tensor) -> torch.Tensor | _Packed:
        """What autograd keeps in the place of `tensor`."""
        storage = tensor.untyped_storage()
        key = identity(storage)
        plain = is_plain(tensor) and not is_view_of_parameter(tensor)
        if not plain or storage.nbytes() < SMALLEST or key in self.stays:
            return tensor.detach()  # with its history, an output would keep its own graph alive
        cargo = self.cargo.get(key)
        if cargo is None:
            there = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
            cargo = self.cargo[key] = _Cargo(there=there, host=self.offload.to_host(there))
            self.offload.bytes_packed += storage.nbytes()
        cargo.wanted += 1
        return _Packed(
            cargo=cargo,
            dtype=tensor.dtype,
            size=tensor.size(),
            stride=tensor.stride(),
            offset=int(tensor.storage_offset()),
        )

    def unpack(self, packed: torch.Tensor | _Packed) -> torch.Tensor:
        """The saved tensor again."""
        if isinstance(packed, torch.Tensor):
            return packed
        self.ask()
        cargo = packed.cargo
        if cargo.there is None:  # a second backward over the same graph
            self.fetch([cargo])
            self.wait()
        assert cargo.there is not None
        tensor = torch.empty(0, dtype=packed.dtype, device=cargo.there.device)
        tensor.set_(cargo.there.untyped_storage(), packed.offset, packed.size, packed.stride)
        cargo.wanted -= 1
        if cargo.wanted <= 0:
            cargo.there = None
        return tensor

    def depart(self) -> None:
        """The block's forward is over: let go what the block before has sent."""
        side = self.offload.side
        if side is None:
            return
        self.departed = side.mark()
        before = self.previous() if self.previous is not None else None
        if before is not None and before.departed is not None and not before.asked:
            side.wait(before.departed)  # the computation may write where the copies have read
            for cargo in before.cargo.values():
                cargo.there = None

    def ask(self) -> None:
        """On the first tensor asked for: have all of this block here, and the block before on its way."""
        if self.asked:
            return
        self.asked = True
        if self.departed is not None and self.offload.side is not None:
            self.offload.side.wait(self.departed)  # what is still here may be given up below
        self.fetch(list(self.cargo.values()))
        self.wait()
        before = self.previous() if self.previous is not None else None
        if before is not None and not before.asked:
            before.fetch(list(before.cargo.values()))

    def fetch(self, cargo: list[_Cargo]) -> None:
        """Start the way back of what is not here."""
        missing = [one for one in cargo if one.there is None]
        hosts, side = [one.host for one in missing], self.offload.side
        for one, there in zip(missing, hosts if side is None else side.from_host(hosts), strict=True):
            one.there = there
        if missing and side is not None:
            self.arrived, self.offload.ahead = side.mark(), self

    def wait(self) -> None:
        """Let the computation wait for what is on its way back."""
        if self.arrived is not None and self.offload.side is not None:
            self.offload.side.wait(self.arrived)
        self.arrived = None
        if self.offload.ahead is self:
            self.offload.ahead = None
