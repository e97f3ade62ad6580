"""Count the collectives that really run: below FSDP2, DTensor, clipping and direct calls, forward and backward."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from shardwise.engine.compat import Operator, TorchDispatchMode, UnsupportedRelease, group_ranks, operator_argument
from shardwise.engine.exchange import GATHER_TAG, REDUCE_TAG
from shardwise.spec.collectives import CollectiveKind, Collectives, Key

RESULT = "result"
"""In the table below: the operator's result is the payload."""

COLLECTIVES: dict[str, tuple[CollectiveKind, str]] = {
    "c10d::_allgather_base_": ("all_gather", "output_tensor"),
    "c10d::allgather_": ("all_gather", "output_tensors"),
    "c10d::allgather_coalesced_": ("all_gather", "output_lists"),
    "c10d::allgather_into_tensor_coalesced_": ("all_gather", "outputs"),
    "c10d::_reduce_scatter_base_": ("reduce_scatter", "input_tensor"),
    "c10d::reduce_scatter_": ("reduce_scatter", "input_tensors"),
    "c10d::reduce_scatter_tensor_coalesced_": ("reduce_scatter", "inputs"),
    "c10d::alltoall_": ("all_to_all", "input_tensors"),
    "c10d::alltoall_base_": ("all_to_all", "input"),
    "c10d::allreduce_": ("all_reduce", "tensors"),
    "c10d::allreduce_coalesced_": ("all_reduce", "tensors"),
    "c10d::broadcast_": ("broadcast", "tensors"),
    "c10d::reduce_": ("reduce", "tensors"),
    "c10d::gather_": ("gather", "input_tensors"),
    "c10d::scatter_": ("scatter", "output_tensors"),
    "c10d::send": ("send", "tensors"),
    "c10d::recv_": ("recv", "tensors"),
    "c10d::recv_any_source_": ("recv", "tensors"),
    "c10d::barrier": ("barrier", ""),
    "c10d::monitored_barrier_": ("barrier", ""),
    "_c10d_functional::all_gather_into_tensor": ("all_gather", RESULT),
    "_c10d_functional::all_gather_into_tensor_out": ("all_gather", RESULT),
    "_c10d_functional::all_gather_into_tensor_coalesced": ("all_gather", RESULT),
    "_c10d_functional::reduce_scatter_tensor": ("reduce_scatter", "input"),
    "_c10d_functional::reduce_scatter_tensor_out": ("reduce_scatter", "input"),
    "_c10d_functional::reduce_scatter_tensor_coalesced": ("reduce_scatter", "inputs"),
    "_c10d_functional::all_to_all_single": ("all_to_all", "input"),
    "_c10d_functional::all_reduce": ("all_reduce", "input"),
    "_c10d_functional::all_reduce_": ("all_reduce", "input"),
    "_c10d_functional::all_reduce_coalesced": ("all_reduce", "inputs"),
    "_c10d_functional::all_reduce_coalesced_": ("all_reduce", "inputs"),
    "_c10d_functional::broadcast": ("broadcast", "input"),
    "_c10d_functional::broadcast_": ("broadcast", "input"),
    "_c10d_functional::isend": ("send", "tensor"),
    "_c10d_functional::irecv": ("recv", "tensor"),
}
"""Operator -> (kind, the argument that is the payload; "" where there is none)."""

EXCHANGES: dict[int, CollectiveKind] = {GATHER_TAG: "all_gather", REDUCE_TAG: "all_to_all"}
"""Tag of the messages of an exchange -> the collective that one message to and from every other rank makes up."""

LOCAL = ("c10d::check_for_nan", "_c10d_functional::wait_tensor", "_c10d_functional::_wrap_tensor_autograd")
"""Operators beside them that send nothing."""


class CollectiveCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A context manager that counts the collectives which this rank issues inside it; nothing stays installed.

        with CollectiveCounter(mesh) as counter:
            training_step(...)
        print(counter.collectives)

    It stands below DTensor, whose redistributions show as what they send, and follows autograd into its threads. It
    does not see threads that the caller started. Every operator passes through it, so such a step is slower; torchao's
    8-bit optimizer, which insists on compiling as one graph, fails in it.
    """

    supports_higher_order_operators = True
    """Recomputed blocks are one operator of torch.compile's."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let torch.compile compile inside: a block that is first seen uncompiled would stay so for good."""
        return True

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._axes = GroupNames(mesh)
        self._counts: Counter[Key] = Counter()
        self._exchanged: dict[tuple[str, int, int], list[int]] = {}

    @property
    def collectives(self) -> Collectives:
        """What was counted so far; messages of an exchange as the collective that they make up."""
        counts = Counter(self._counts)
        for (axis, tag, size), (sends, receives) in self._exchanged.items():
            ranks = self._axes.size(axis)
            if sends == receives and sends % (ranks - 1) == 0:
                counts[EXCHANGES[tag], axis, size * ranks] += sends // (ranks - 1)
            else:
                counts += Counter({("send", axis, size): sends, ("recv", axis, size): receives})
        return Collectives.of(counts)

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operator and count it when it is a collective; DTensor takes its own apart first.

        UnsupportedRelease for a collective that is not in the table: a count without it would be wrong.
        """
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        if isinstance(func, Operator):
            self._count(func, args, kwargs or {}, result)
        return result

    def _count(self, operator: Operator, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: object) -> None:
        name: str = operator.name()  # type: ignore[no-untyped-call]
        if name not in COLLECTIVES:
            if operator.namespace in ("c10d", "_c10d_functional") and name not in LOCAL:
                raise UnsupportedRelease(f"torch {torch.__version__}: {name} is not known here, it cannot be counted")
            return
        kind, payload = COLLECTIVES[name]
        group = operator_argument(operator, "process_group", args, kwargs)
        if group is None:
            group = operator_argument(operator, "group_name", args, kwargs)
        axis = self._axes.name(group_ranks(group))
        tag = operator_argument(operator, "tag", args, kwargs) if kind in ("send", "recv") else None
        if tag in EXCHANGES:
            size = _bytes(operator_argument(operator, payload, args, kwargs))
            self._exchanged.setdefault((axis, tag, size), [0, 0])[kind == "recv"] += 1
            return
        sent = result if payload == RESULT else operator_argument(operator, payload, args, kwargs)
        self._counts[kind, axis, _bytes(sent)] += 1


class GroupNames:
    """Names of process groups by the axes of a device mesh, seen from this rank."""

    def __init__(self, mesh: DeviceMesh) -> None:
        names = mesh.mesh_dim_names or ()
        self._axes = {tuple(dist.get_process_group_ranks(mesh.get_group(name))): name for name in names}
        self._sizes: dict[str, int] = {}
        self._shard = next((ranks for ranks, name in self._axes.items() if name == "shard"), ())

    def size(self, axis: str) -> int:
        """Return the number of ranks of an axis that `name` has named."""
        return self._sizes[axis]

    def name(self, ranks: tuple[int, ...]) -> str:
        """Return the axis that holds exactly these global ranks, as `Collective.axis` says."""
        found = self._name(ranks)
        self._sizes[found] = len(ranks)
        return found

    def _name(self, ranks: tuple[int, ...]) -> str:
        if ranks in self._axes:
            return self._axes[ranks]
        size = len(ranks)
        if size == dist.get_world_size():
            return "world"
        if ranks in [self._shard[start : start + size] for start in range(0, len(self._shard), size)]:
            return f"shard/{size}"
        return "ranks " + ",".join(map(str, ranks))


def _bytes(payload: object) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in _tensors(payload))


def _tensors(payload: object) -> Iterator[torch.Tensor]:
    if isinstance(payload, torch.Tensor):
        yield payload
    elif isinstance(payload, list | tuple):
        for part in payload:
            yield from _tensors(part)
