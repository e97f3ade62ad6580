"""What a schedule is made from: seconds of every unit's pieces, and the switches that order them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from shardwise.spec.layout import AccumulationMode

Rules = Literal["nccl", "gloo", "fsdp1", "ddp"]
"""`nccl`: FSDP2 on GPUs; `gloo`: FSDP2 on CPUs; `fsdp1`: PyTorch's first FSDP on GPUs; `ddp`: whole weights, gradients
reduced as they come."""


@dataclass(frozen=True, kw_only=True, slots=True)
class UnitCosts:
    """One communication unit, in seconds; units that are alike share one object. 0: there is no such thing."""

    forward: float = 0.0
    """Computing its forward, collectives of the tensor axis included; where it is resharded to a smaller group, and
    copying the part that this rank keeps."""
    backward: float = 0.0
    """Computing its backward, recomputation and collectives of the tensor axis included."""
    forward_issue: float = 0.0
    """Host time for issuing its forward."""
    backward_issue: float = 0.0
    """Host time for issuing its backward."""
    fetch: float = 0.0
    """Bringing its shards from the host, before each gather over the shard axis."""
    copy_in: float = 0.0
    """Casting its shards into a gather's buffer."""
    gather: float = 0.0
    """Its all-gather in forward, on the wire."""
    regather: float = 0.0
    """Its all-gather in backward; 0: its weights are still there, or backward does not need them."""
    recopy_in: float = 0.0
    """Where backward gathers inside a smaller group (`StepCosts.regather_group`): copying this rank's part into the
    gather's buffer. It lies on the device in the dtype of computation, so nothing is fetched or cast."""
    copy_out: float = 0.0
    """Taking its weights out of a gather's buffer in forward, on the compute lane. Over a shard axis of one rank, where
    nothing is gathered, copying its weights."""
    recopy_out: float = 0.0
    """The same in backward; 0: its weights are still there, or backward does not need them."""
    reduce_copy_in: float = 0.0
    """Putting its gradients into a reduction's buffer, on the compute lane; 0: nothing trains."""
    reduce: float = 0.0
    """Its reduce-scatter, on the wire; 0: nothing is reduced over the shard axis."""
    reduce_sum: float = 0.0
    """On CPUs: adding up what came from other ranks, on the main thread, when a reduction is finished."""
    all_reduce: float = 0.0
    """Its all-reduce over the replicas."""
    store: float = 0.0
    """Taking its reduced gradients to the host."""
    travel: float = 0.0
    """Taking what its forward has saved to the host; as much to bring it back. It leaves while the next unit computes,
    and comes back from the beginning of the next unit's backward."""

    @property
    def trains(self) -> bool:
        """Whether its gradients are reduced."""
        return self.reduce_copy_in > 0 or self.reduce > 0 or self.all_reduce > 0


@dataclass(frozen=True, kw_only=True, slots=True)
class RootCosts:
    """What the root unit computes, in the order of a micro-batch; its collectives are those of `unit`."""

    unit: UnitCosts
    """Its gather, reduction and copies; `forward` and `backward` are not read."""
    embed: float = 0.0
    """Forward before the first unit: embedding, tables of positions."""
    head: float = 0.0
    """Forward behind the last unit: last norm, head (unless it is a unit of its own), loss."""
    head_backward: float = 0.0
    """Backward of that."""
    embed_backward: float = 0.0
    """Backward of the embedding."""
    embed_issue: float = 0.0
    """Host time for issuing `embed`; likewise for the others."""
    head_issue: float = 0.0
    """Of `head`."""
    head_backward_issue: float = 0.0
    """Of `head_backward`."""
    embed_backward_issue: float = 0.0
    """Of `embed_backward`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class UpdateCosts:
    """What ends a step, in seconds."""

    agree: float = 0.0
    """The agreement of all ranks before the first micro-batch (count of trained tokens), a small all-reduce."""
    clip: float = 0.0
    """Squares of all gradients and their scaling, on the device; on the host where gradients lie there."""
    clip_exchange: float = 0.0
    """Their sum over the ranks, a small all-reduce that the compute lane waits for."""
    update: float = 0.0
    """The optimizer, on the device."""
    host_update: float = 0.0
    """The optimizer on the host."""
    gather: float = 0.0
    """Gathering all updated weights, where optimizer states are sharded and weights are not (ZeRO-2), on the wire."""
    fetch: float = 0.0
    """Optimizer states brought from the host for the update, where they rest there and the update is the device's."""
    store: float = 0.0
    """And taken back."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepCosts:
    """One optimizer step."""

    units: tuple[UnitCosts, ...]
    """All units but the root, in the order of forward."""
    names: tuple[str, ...]
    """Their names, such as `model.layers.17`."""
    root: RootCosts
    """The root unit."""
    update: UpdateCosts
    """What ends the step."""
    rules: Rules
    """How it is ordered."""
    ahead: tuple[tuple[int, ...], ...]
    """Places of the units that unit i gathers ahead in forward, nearest first; the last entry is the root's."""
    behind: tuple[tuple[int, ...], ...]
    """The same in backward."""
    late: int | None = None
    """Place of the unit whose reduction comes after the root's: no gradient flows into its input."""
    buffers: int = 1
    """Reductions in flight before backward waits for the oldest."""
    separate_group: bool = False
    """Reductions have a communicator of their own; else gathers and reductions take turns on one, as issued."""
    regather_group: bool = False
    """Gathers in backward have one of their own: resharding by an integer gathers inside a smaller group."""
    background_gathers: bool = True
    """On CPUs: gathers run beside the main thread."""
    background_reductions: bool = True
    """On CPUs: reductions run beside the main thread."""
    micro_batches: int = 1
    """Forwards and backwards per step."""
    mode: AccumulationMode = "reduce_each"
    """What is reduced before the last micro-batch."""
    adding: float = 0.0
    """On CPUs: adding up shards of gradients of several micro-batches, on the main thread, after each backward but the
    first."""
    post: float = 0.0
    """On CPUs: starting one collective in the background, on the main thread."""
    tensor: float = 0.0
    """What of one micro-batch's computing is collectives over the tensor axis, which computing waits for."""
    slowdown: float = 1.0
    """Factor on computing while a collective is under way: it takes multiprocessors (GPUs) or cores (CPUs)."""
