"""Host memory of one node: loading, training with what is offloaded, checkpoints, and the export at the end.

Counted is anonymous memory (RssAnon): what a process allocates. Files that are mapped (safetensors, prepared rows) are
pages of the kernel's cache, which it drops when memory is short.

What a rank does, and where it is written:

- Loading (`engine.load`, `engine.weights`): weights are made as shards, on the GPU or, on CPUs and with offloaded
  parameters, on the host. They are filled from slices of mapped files, which take nothing; only a tensor that
  transformers builds from several, all experts of a mixture, is built whole first.
- Pinned memory: torch's allocator of pinned host memory gives out powers of two (`CachingHostAllocator.h`) and keeps
  what is freed. Offloaded parameters, gradients (`_fsdp_param.py`, `_fsdp_collectives.py`), states (`resting_state`),
  activations (`activation_offload`) and the copies of a checkpoint are pinned.
- Checkpoints: torch.distributed.checkpoint keeps every tensor that it has copied from a GPU until the rank's file is
  written (`filesystem.py`); what is in host memory is written from where it is.
- Export: rank 0 gathers the whole model; then a fresh process opens it (`state.export`, `state.verify`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod

from shardwise.catalogue.models import checkpoint_dtype
from shardwise.predict.constants import HOST_CUDA, HOST_PROCESS
from shardwise.predict.terms.update import optimizer_bytes
from shardwise.predict.unit_rows import UnitKind, UnitTensor, unit_kinds
from shardwise.spec.cluster import Cluster
from shardwise.spec.footprint import HostMemory, Term
from shardwise.spec.plan import Plan
from shardwise.spec.strict import DTYPE_BYTES, Dtype
from shardwise.spec.workload import Workload

INT64_COLUMNS = 3
"""Ids, mask and labels of a batch."""

EXPERTS_DIMS = 3
"""Dims of a weight that holds all experts of a layer."""

Shards = Sequence[tuple[UnitTensor, int]]
"""Parameters of one rank, each with how often it occurs."""


def host_memory(
    workload: Workload,
    plan: Plan,
    cluster: Cluster,
    units: Sequence[UnitKind] | None = None,
    *,
    allocated: int | None = None,
    offloaded: int | None = None,
) -> HostMemory:
    """Return the host memory that one node needs.

    Args:
        workload: What is trained.
        plan: What is decided.
        cluster: The machines; ranks are spread evenly over them.
        units: The plan's units, where they are at hand.
        allocated: On CPUs: bytes that tensors of one rank occupy at the peak; None: those that are always there.
        offloaded: With GPUs: bytes of one rank in the footprint's category `offloaded`, at most; None: without
            activations.
    """
    kinds = unit_kinds(workload, plan) if units is None else units
    shards = [(tensor, kind.count) for kind in kinds for tensor in kind.tensors]
    ranks = cluster.per_node
    processes = _processes(plan, cluster)
    loading = [*processes, *_loading(shards, plan, cluster, checkpoint_dtype(workload.model))]
    batches, saving = _batches(workload, plan, ranks), _saving(shards, plan, cluster)
    if cluster.gpu is None:
        training = [*processes, *batches, *_on_cpus(shards, plan, ranks, allocated), *saving]
        exporting = [*processes, *_on_cpus(shards, plan, ranks, None)]
    else:
        training = [*processes, *batches, *_beside_gpus(workload, shards, plan, ranks, offloaded), *saving]
        exporting = training
    exporting = [*exporting, *_exporting(workload, shards, plan, cluster)]
    return HostMemory(
        loading=_total(loading),
        training=_total(training),
        exporting=_total(exporting),
        terms=(*_named("loading", loading), *_named("training", training), *_named("exporting", exporting)),
        limit=cluster.host_bytes,
    )


def _total(terms: Iterable[Term]) -> int:
    return sum(term.bytes for term in terms)


def _named(stage: str, terms: Iterable[Term]) -> list[Term]:
    return [Term(name=f"{stage}: {term.name}", bytes=term.bytes, source=term.source) for term in terms if term.bytes]


def _processes(plan: Plan, cluster: Cluster) -> list[Term]:
    """Every rank, and the process that starts them."""
    per_rank = round(HOST_PROCESS.value)
    terms = [
        Term(
            name="processes",
            bytes=(cluster.per_node + 1) * per_rank,
            source=f"measured: {HOST_PROCESS.source}, {cluster.per_node} ranks and the one that starts them",
        )
    ]
    if cluster.gpu is not None:
        terms.append(
            Term(
                name="CUDA and NCCL",
                bytes=cluster.per_node * round(HOST_CUDA.value),
                source=f"measured: {HOST_CUDA.source}",
            )
        )
    return terms


def _loading(shards: Shards, plan: Plan, cluster: Cluster, stored: Dtype | None) -> list[Term]:
    experts = (tensor for tensor, _ in shards if len(tensor.shape) == EXPERTS_DIMS)
    built = 2 * max((prod(tensor.shape) * DTYPE_BYTES[stored or tensor.dtype] for tensor in experts), default=0)
    source = "estimated: all experts of a layer in the files' dtype, stacked and then joined by every rank"
    terms = [Term(name="tensors built of several", bytes=built * cluster.per_node, source=source)]
    if cluster.gpu is None:
        held = sum(count * _bytes(tensor) for tensor, count in shards)
        terms.append(Term(name="shards", bytes=held * cluster.per_node, source="estimated: every rank its own"))
    elif plan.offload.parameters:
        held = sum(count * pinned(_bytes(tensor)) for tensor, count in shards)
        terms.append(Term(name="shards", bytes=held * cluster.per_node, source="estimated: pinned, powers of two"))
    return terms


def _on_cpus(shards: Shards, plan: Plan, ranks: int, allocated: int | None) -> list[Term]:
    """On CPUs all tensors are in host memory."""
    if allocated is not None:
        return [Term(name="tensors", bytes=allocated * ranks, source="estimated: the footprint's peak of every rank")]
    held = sum(count * _bytes(tensor) for tensor, count in shards)
    gradients = sum(count * _bytes(tensor) for tensor, count in shards if tensor.trained)
    states = sum(optimizer_bytes(shards, plan, "cpu").states.values())
    source = "estimated: shards, gradients and optimizer states; activations and gathered weights are not counted"
    return [Term(name="tensors at rest", bytes=(held + gradients + states) * ranks, source=source)]


def _beside_gpus(workload: Workload, shards: Shards, plan: Plan, ranks: int, offloaded: int | None) -> list[Term]:
    """What is offloaded, in pinned memory."""
    source = "estimated: pinned, powers of two"
    exact, terms = 0, []
    optimizer = optimizer_bytes(shards, plan, "cuda")
    states = sum(optimizer.states.values())
    if plan.offload.parameters:
        trained = [(tensor, count) for tensor, count in shards if tensor.trained]
        for name, held in (("offloaded weights", shards), ("offloaded gradients", trained)):
            exact += sum(count * _bytes(tensor) for tensor, count in held)
            size = sum(count * pinned(_bytes(tensor)) for tensor, count in held)
            terms.append(Term(name=name, bytes=size * ranks, source=source))
        exact += states
        terms.append(Term(name="optimizer states", bytes=states * ranks, source="estimated: on the host, not pinned"))
        update = Term(name="update", bytes=optimizer.temporaries * ranks, source="estimated: the optimizer's copies")
        terms.append(update)
    elif plan.offload.optimizer:
        exact += states
        size = _pinned_states(shards, plan)
        terms.append(Term(name="optimizer states", bytes=size * ranks, source=source))
    if plan.offload.activations and offloaded is not None:
        size = round(max(0, offloaded - exact) * _rounding(workload, plan))
        terms.append(Term(name="offloaded activations", bytes=size * ranks, source=source))
    return terms


def _pinned_states(shards: Shards, plan: Plan) -> int:
    """Bytes of the states of one rank, each tensor of which is pinned by itself."""
    size = DTYPE_BYTES[plan.dtypes.optimizer_state]
    states = 2 if plan.optimizer == "adamw" else 0
    return sum(count * states * pinned(tensor.rank_elements * size) for tensor, count in shards if tensor.trained)


def _rounding(workload: Workload, plan: Plan) -> float:
    """How much larger pinned activations are than they have to be.

    Under full checkpointing each is one hidden state. Else sizes are of many kinds, and rounding up to a power of two
    takes a third more on average.
    """
    if plan.activation_checkpointing not in ("full", "every_1"):
        return 4 / 3
    hidden = plan.micro_batch * workload.seq_len * workload.model.hidden * DTYPE_BYTES[plan.dtypes.param]
    return pinned(hidden) / hidden


def _batches(workload: Workload, plan: Plan, ranks: int) -> list[Term]:
    rows = plan.micro_batch * plan.accumulation_steps * ranks
    size = rows * workload.seq_len * INT64_COLUMNS * 8
    return [Term(name="rows of a step", bytes=size, source="estimated: ids, mask and labels; the rest is mapped")]


def _saving(shards: Shards, plan: Plan, cluster: Cluster) -> list[Term]:
    """Copies that a checkpoint makes of what is saved: all that trains, and the states."""
    trained = [(tensor, count) for tensor, count in shards if tensor.trained]
    size = 0
    if plan.optimizer == "adamw_8bit":
        size += sum(2 * count * 4 * tensor.rank_elements for tensor, count in trained)
    if cluster.gpu is not None and not plan.offload.parameters:
        size += sum(count * pinned(_bytes(tensor)) for tensor, count in trained)
        if plan.optimizer != "adamw_8bit" and not plan.offload.optimizer:
            size += _pinned_states(shards, plan)
    source = "estimated: what trains and its states, copied from the GPU and kept until the file is written"
    if cluster.gpu is None:
        source = "estimated: 8-bit states are saved in fp32; all else is written from where it is"
    return [Term(name="copies of a checkpoint", bytes=size * cluster.per_node, source=source)]


def _exporting(workload: Workload, shards: Shards, plan: Plan, cluster: Cluster) -> list[Term]:
    """The model on rank 0 in the dtype of its files; then, where that is not computed in, a process with another."""
    stored = plan.dtypes.frozen_storage
    if stored is None or stored == "checkpoint":
        stored = checkpoint_dtype(workload.model) or plan.dtypes.trained_storage
    gathered = workload.model.parameters * DTYPE_BYTES[stored]
    fresh = round(HOST_PROCESS.value)
    if plan.dtypes.param != stored:  # weights in the files' dtype are mapped; CPUs compute fp16 in fp32
        computed = "fp32" if plan.dtypes.param == "fp16" else plan.dtypes.param
        fresh += workload.model.parameters * DTYPE_BYTES[computed]
    source = "estimated: the larger of the gathered model and the fresh process that opens its files"
    terms = [Term(name="the whole model", bytes=max(gathered, fresh), source=source)]
    if cluster.gpu is None and plan.mesh.shard > 1:
        largest = max(prod(tensor.shape) * DTYPE_BYTES[tensor.dtype] for tensor, _ in shards)
        size = cluster.per_node * (2 * largest + largest // plan.mesh.shard) - largest
        source = "estimated: the largest tensor, gathered and joined, and its padded shard, on every rank"
        terms.append(Term(name="a tensor on its way", bytes=size, source=source))
    return terms


def _bytes(tensor: UnitTensor) -> int:
    return tensor.rank_elements * DTYPE_BYTES[tensor.dtype]


def pinned(size: int) -> int:
    """Return the bytes that torch's pinned host memory takes for `size` of them: the next power of two."""
    return 1 << (size - 1).bit_length() if size > 0 else 0
