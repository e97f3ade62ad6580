"""What GPUs do otherwise than the CPU on which a plan is traced. For a cluster of CPUs nothing of this is used.

Not here, as it is the same on both: the fp32 arithmetic of transformers' own norms, which is written in Python; fused
AdamW, which has no temporaries on either; the foreach lists of AdamW and of clipping.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakIdKeyDictionary

from shardwise.engine import activation_offload, loss_head, resting_state
from shardwise.engine.compat import replaced
from shardwise.engine.compat_fake import FakeTensors, Kernel, aten, shards_fetched
from shardwise.engine.shards import local
from shardwise.measure.storages import StorageTracker
from shardwise.predict.attention_kernels import Attention, backward_operators, scratch_bytes
from shardwise.predict.workspace import HANDLES, generation, workspace_bytes
from shardwise.spec.cluster import Cluster, Gpu
from shardwise.spec.plan import Plan


@dataclass(frozen=True, kw_only=True)
class Traced:
    """Where a shim works."""

    gpu: Gpu
    """The card that is meant."""
    tensors: FakeTensors
    """The fake tensors of the trace."""
    tracker: StorageTracker
    """What follows their storages."""


@dataclass(frozen=True, kw_only=True)
class Shim:
    """One thing that differs."""

    name: str
    """What it is about."""
    changes: str
    """What is traced instead of what the CPU does."""
    source: str
    """Where that is from."""
    install: Callable[[Traced], AbstractContextManager[None]]
    """Make it so, for a while."""
    applies: Callable[[Plan], bool] = lambda plan: True
    """Whether a plan is concerned."""


@contextmanager
def _attention(place: Traced) -> Iterator[None]:
    attention = Attention(generation=generation(place.gpu))
    with replaced(F, "scaled_dot_product_attention", attention):
        yield


@contextmanager
def _scratch(place: Traced) -> Iterator[None]:
    def of(kernel: str) -> Kernel:
        def takes(result: Any, args: tuple[Any, ...]) -> Any:
            # The results are there meanwhile, and the tracker sees them only afterwards.
            size = scratch_bytes(kernel, args) + sum(one.nbytes for one in result if one is not None)
            place.tracker.drop(place.tracker.stand_in(size, "temporaries", f"{kernel} attention backward"))
            return result

        return takes

    with ExitStack() as stack:
        for operator, kernel in backward_operators().items():
            stack.enter_context(place.tensors.kernel(operator, of(kernel)))
        yield


class _FusedRmsNorm(torch.autograd.Function):
    """Keeps its input and one fp32 number a row."""

    @staticmethod
    def forward(ctx: Any, given: torch.Tensor, width: int, weight: torch.Tensor | None) -> torch.Tensor:
        """Return the norm over the last `width` elements."""
        rows = given.numel() // width
        ctx.save_for_backward(given, weight, given.new_empty(rows, dtype=torch.float32))
        return torch.empty_like(given, memory_format=torch.contiguous_format)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, torch.Tensor | None]:
        """Return the gradients of input and weight."""
        given, weight, _ = ctx.saved_tensors
        wanted = weight is not None and ctx.needs_input_grad[2]
        return torch.empty_like(given), None, torch.empty_like(weight) if wanted else None


@contextmanager
def _rms_norm(_: Traced) -> Iterator[None]:
    composite = torch.rms_norm

    def rms_norm(
        input: torch.Tensor,
        normalized_shape: Sequence[int],
        weight: torch.Tensor | None = None,
        eps: float | None = None,
    ) -> torch.Tensor:
        if isinstance(input, DTensor) or (weight is not None and weight.dtype != input.dtype):
            return composite(input, list(normalized_shape), weight, eps)
        width = int(torch.Size(normalized_shape).numel())
        normed: torch.Tensor = _FusedRmsNorm.apply(input, width, weight)  # type: ignore[no-untyped-call]
        return normed

    with replaced(F, "rms_norm", rms_norm), replaced(torch, "rms_norm", rms_norm):
        yield


@contextmanager
def _dropout(_: Traced) -> Iterator[None]:
    composite, fused = F.dropout, aten("native_dropout")

    def dropout(input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
        if not training or p == 0 or inplace or isinstance(input, DTensor):
            return composite(input, p, training, inplace)
        dropped: torch.Tensor = fused(input, p, True)[0]
        return dropped

    with replaced(F, "dropout", dropout):
        yield


@contextmanager
def _layer_norm(place: Traced) -> Iterator[None]:
    def in_fp32(result: Any, _: tuple[Any, ...]) -> Any:
        normed, *statistics = result
        with place.tensors:
            return (normed, *(torch.empty(one.shape, dtype=torch.float32) for one in statistics))

    with place.tensors.kernel(aten("native_layer_norm"), in_fp32):
        yield


class _FusedLoss(torch.autograd.Function):
    """Liger's head and cross entropy: gradients are made in forward, some tokens at a time."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Return the summed loss of hidden states [tokens, width]."""
        (tokens, width), vocab = hidden.shape, weight.shape[0]
        piece = 1 << (-(-tokens // -(-vocab // width)) - 1).bit_length()
        of_input = torch.zeros_like(hidden)
        of_weight = torch.zeros_like(weight) if all(ctx.needs_input_grad) else None
        losses = hidden.new_zeros(tokens, dtype=torch.float32)
        hidden.new_empty((min(piece, tokens), vocab))
        ctx.save_for_backward(of_input, of_weight)
        return losses.sum()

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return what forward has made."""
        of_input, of_weight = ctx.saved_tensors
        return of_input, of_weight


@contextmanager
def _fused_loss(_: Traced) -> Iterator[None]:
    def fused(installed: loss_head.LossHead, _: Any, hidden: torch.Tensor, __: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = _FusedLoss.apply(hidden, cast(Any, installed.parts.head).weight)  # type: ignore[no-untyped-call]
        return loss

    with replaced(loss_head, "fused_loss", fused):
        yield


@contextmanager
def _workspace(place: Traced) -> Iterator[None]:
    for _ in range(HANDLES):
        place.tracker.stand_in(workspace_bytes(place.gpu), "temporaries", "matrix product workspace")
    yield


@contextmanager
def _shards(place: Traced) -> Iterator[None]:
    def fetch(shard: torch.Tensor) -> torch.Tensor:
        with place.tracker.births("all_gather_buffers"):
            return shard.clone()

    with shards_fetched(fetch):
        yield


@contextmanager
def _states(_: Traced) -> Iterator[None]:
    def at_work(key: str, value: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        if key == resting_state.COUNTER:
            return value
        return local(value).to(dtype=weight.dtype, copy=True)

    with replaced(resting_state, "state_at_work", at_work):
        yield


class _Trips:
    """Copies of activations to the host and back, one stream for all."""

    def __init__(self, tracker: StorageTracker) -> None:
        self._tracker = tracker

    def to_host(self, there: torch.Tensor) -> torch.Tensor:
        """Return pinned memory of the same size."""
        with self._tracker.births("offloaded"):
            return torch.empty(there.numel(), dtype=torch.uint8)

    def from_host(self, hosts: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return memory of the device for what comes back."""
        return [torch.empty(host.numel(), dtype=torch.uint8) for host in hosts]

    def mark(self) -> object:
        """Return what stands for an event."""
        return self

    def wait(self, event: object) -> None:
        """Nothing runs beside."""


@contextmanager
def _activations(place: Traced) -> Iterator[None]:
    numbers, further = WeakIdKeyDictionary(), itertools.count()

    def number(storage: torch.UntypedStorage) -> int:
        """The engine's own key is a weak reference below Python, which would hide a storage's death."""
        if storage not in numbers:
            numbers[storage] = next(further)
        return cast(int, numbers[storage])

    with (
        replaced(activation_offload, "identity", number),
        replaced(activation_offload, "side_stream", lambda device: _Trips(place.tracker)),
    ):
        yield


SHIMS: tuple[Shim, ...] = (
    Shim(
        name="attention kernels",
        changes="the fused kernel that torch takes on the card (flash; cuDNN's on Hopper and data-centre Blackwell; "
        "memory-efficient with a mask or in fp32; the plain formula where heads are shared in fp32): it keeps q, k, v, "
        "the output and an fp32 number a query",
        source="torch 2.13, ATen/native/transformers/cuda/sdp_utils.cpp: priority_order and can_use_*; shared heads in "
        "the memory-efficient kernel came later (pytorch#191085)",
        install=_attention,
    ),
    Shim(
        name="attention backward",
        changes="memory that the kernel takes while it runs: query gradients summed in fp32, and with shared heads "
        "gradients of keys and values per query head",
        source="torch 2.13, ATen/native/transformers/cuda/flash_attn/flash_api.cpp: mha_bwd; attention_backward.cu",
        install=_scratch,
    ),
    Shim(
        name="RMS norm",
        changes="F.rms_norm is one kernel that keeps its input and an fp32 number a row; on CPUs it is a chain of fp32 "
        "operations",
        source="torch 2.13, native_functions.yaml: _fused_rms_norm (CUDA; composite elsewhere)",
        install=_rms_norm,
    ),
    Shim(
        name="dropout",
        changes="one kernel that keeps a mask of a byte an element; on CPUs the scaled mask has the dtype of the input",
        source="torch 2.13, ATen/native/Dropout.cpp: is_fused_kernel_acceptable",
        install=_dropout,
    ),
    Shim(
        name="layer norm",
        changes="mean and deviation of each row are kept in fp32",
        source="torch 2.13, ATen/native/cuda/layer_norm_kernel.cu: acc_type",
        install=_layer_norm,
    ),
    Shim(
        name="matrix product workspace",
        changes=f"cuBLAS keeps a workspace for each of {HANDLES} threads: 32 MiB on Hopper, 8.125 MiB else",
        source="torch 2.13, ATen/cuda/CublasHandlePool.cpp: parseChosenWorkspaceSize; 8519680 bytes seen after one "
        "product (pytorch#95668)",
        install=_workspace,
    ),
    Shim(
        name="fused loss head",
        changes="Liger's kernel makes logits and gradients of as many tokens at a time as take the memory of all "
        "hidden states, and holds the gradients of hidden states and head from forward on",
        source="liger-kernel 0.8.5, ops/fused_linear_cross_entropy.py",
        install=_fused_loss,
        applies=lambda plan: plan.loss_head == "fused",
    ),
    Shim(
        name="offloaded shards",
        changes="shards come to the device before each gather",
        source="torch 2.13, distributed/fsdp/_fully_shard/_fsdp_param.py: all_gather_inputs",
        install=_shards,
        applies=lambda plan: plan.offload.parameters,
    ),
    Shim(
        name="offloaded optimizer states",
        changes="the states of one bucket come to the device for the update",
        source="shardwise.engine.resting_state",
        install=_states,
        applies=lambda plan: plan.offload.optimizer and not plan.offload.parameters,
    ),
    Shim(
        name="offloaded activations",
        changes="what blocks save goes to the host and comes back one block ahead",
        source="shardwise.engine.activation_offload",
        install=_activations,
        applies=lambda plan: plan.offload.activations,
    ),
)
"""Every difference that is known, with its source."""


def shims_of(plan: Plan, cluster: Cluster) -> tuple[Shim, ...]:
    """Return what is different where a plan runs; nothing on CPUs."""
    return () if cluster.gpu is None else tuple(shim for shim in SHIMS if shim.applies(plan))


@contextmanager
def as_on(cluster: Cluster, shims: Sequence[Shim], *, tensors: FakeTensors, tracker: StorageTracker) -> Iterator[None]:
    """Let what runs inside take the memory that it takes on the cluster's devices; within fake tensors and tracker."""
    with ExitStack() as stack:
        if cluster.gpu is not None:
            place = Traced(gpu=cluster.gpu, tensors=tensors, tracker=tracker)
            for shim in shims:
                stack.enter_context(shim.install(place))
        yield
