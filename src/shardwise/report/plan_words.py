"""The decisions of a Plan in words, a line each; what is off or as usual is left out."""

from __future__ import annotations

from collections.abc import Iterator

from shardwise.spec.job import Job
from shardwise.spec.layout import Offload, Units
from shardwise.spec.plan import Plan

OTHER_NAMES = {
    "FULL_SHARD": "ZERO3: weights, gradients and optimizer states are sharded",
    "SHARD_GRAD_OP": "ZERO2: gradients and optimizer states are sharded, and weights outside forward and backward",
    "HYBRID_SHARD": "HSDP: ZERO3 within a replica, gradients all-reduced over replicas",
    "HYBRID_SHARD_ZERO2": "HSDP with ZERO2 within a replica, gradients all-reduced over replicas",
    "NO_SHARD": "DDP: every rank holds everything, gradients are all-reduced",
}
"""Strategy -> its name elsewhere, and what that means."""

_ACCUMULATION = {
    "reduce_each": "reduced after every micro-batch, added up as shards",
    "defer_all": "added up whole on every rank (no_sync), reduced after the last micro-batch",
    "defer_replicate": "reduced to shards after every micro-batch, over replicas after the last",
}


def decisions(plan: Plan, job: Job) -> Iterator[tuple[str, str, tuple[str, ...]]]:
    """Yield (label, words, plan fields that they tell) for every decision that a person should see."""
    yield from _layout(plan)
    yield from _dtypes(plan)
    yield "batch", _batch(plan), ("global_batch", "micro_batch", "accumulation_steps")
    yield "gradients", _ACCUMULATION[plan.accumulation_mode], ("accumulation_mode",)
    yield "checkpointing", _checkpointing(plan.activation_checkpointing), ("activation_checkpointing",)
    if plan.offload != Offload():
        yield "offload", _offload(plan.offload), ("offload",)
    yield "attention", plan.attention, ("attention",)
    yield "loss", _loss(plan), ("loss_head", "loss_chunk")
    yield "optimizer", _optimizer(plan, job), ("optimizer", "optimizer_implementation")
    if plan.compile:
        yield "compile", "every block", ("compile",)


def _layout(plan: Plan) -> Iterator[tuple[str, str, tuple[str, ...]]]:
    mesh, ahead, reduction = plan.mesh, plan.prefetch, plan.reduce_scatter
    axes = f"replicate {mesh.replicate} x shard {mesh.shard}" + (f" x tensor {mesh.tensor}" if mesh.tensor > 1 else "")
    sequence = " with sequence parallel norms" if mesh.sequence_parallel else ""
    reshard = plan.reshard_after_forward
    group = "" if isinstance(reshard, bool) else " (kept in groups of so many ranks)"
    words = f"{plan.strategy} = {axes}{sequence}, reshard_after_forward {str(reshard).lower()}{group}"
    yield "strategy", words, ("strategy", "mesh", "reshard_after_forward")
    yield "other names", OTHER_NAMES[plan.strategy], ()
    if plan.units != Units():
        wrapped = ", ".join(plan.units.wrap) or "every decoder block"
        places = f"embedding in {_unit(plan.units.embedding)}, head in {_unit(plan.units.head)}"
        yield "units", f"{wrapped}; {places}", ("units",)
    gathers = "gathers in the background" if ahead.async_all_gather else "every gather is waited for"
    fields = ("prefetch", "prefetch.forward", "prefetch.backward", "prefetch.async_all_gather")
    yield "prefetch", f"{ahead.forward} ahead in forward, {ahead.backward} in backward, {gathers}", fields
    flight = f"in the background, {reduction.buffers} in flight" if reduction.asynchronous else "waited for at once"
    if not reduction.asynchronous and reduction.buffers > 1:
        flight += f" ({reduction.buffers} buffers)"
    own = ", on a communicator of their own" if reduction.separate_group else ""
    yield "reductions", flight + own, tuple(f"reduce_scatter{leaf}" for leaf in ("", ".asynchronous", ".buffers"))


def _unit(place: str) -> str:
    return "the root unit" if place == "root" else "a unit of its own"


def _dtypes(plan: Plan) -> Iterator[tuple[str, str, tuple[str, ...]]]:
    dtypes = plan.dtypes
    frozen = {None: "nothing", "checkpoint": "as in the model's files"}.get(dtypes.frozen_storage)
    stored = f"trained weights {dtypes.trained_storage}, frozen weights {frozen or dtypes.frozen_storage}"
    yield "stored", f"{stored}, optimizer states {dtypes.optimizer_state}", ()
    scaling = "with dynamic loss scaling" if dtypes.loss_scaling else "without loss scaling"
    yield "computed", f"param {dtypes.param}, reduce {dtypes.reduce}, output {dtypes.output}, {scaling}", ()
    yield "buffers", dtypes.buffer or "as loaded", ("dtypes",)


def _batch(plan: Plan) -> str:
    micro, ranks, passes = plan.micro_batch, plan.mesh.data_ranks, plan.accumulation_steps
    noun = ("data " if plan.mesh.tensor > 1 else "") + ("rank" if ranks == 1 else "ranks")
    factors = f"{micro} {'row' if micro == 1 else 'rows'} x {ranks} {noun}"
    return f"global batch {plan.global_batch} = {factors} x {passes} accumulation"


def _checkpointing(value: str) -> str:
    if value == "none":
        return "none: all activations are kept"
    if value == "selective":
        return "selective: all but attention and matrix products is recomputed in backward"
    blocks = "every block" if value in ("full", "every_1") else f"one block in {value.removeprefix('every_')}"
    return f"{value}: activations of {blocks} are recomputed in backward"


def _offload(offload: Offload) -> str:
    names = {"parameters": "parameters with their gradients", "optimizer": "optimizer states"}
    kept = [names.get(part, part) for part in ("parameters", "optimizer", "activations") if getattr(offload, part)]
    return ", ".join(kept) + " in host memory"


def _loss(plan: Plan) -> str:
    if plan.loss_head == "chunked":
        return f"chunked: from the logits of {plan.loss_chunk} tokens at a time"
    fused = "fused: head and loss in one kernel, the logits are never whole"
    return fused if plan.loss_head == "fused" else "from the whole logits of a micro-batch"


def _optimizer(plan: Plan, job: Job) -> str:
    if plan.optimizer == "adamw_8bit":
        return "adamw_8bit, torchao's implementation"
    momentum = f" with momentum {job.momentum:g}" if plan.optimizer == "sgd" and job.momentum else ""
    return f"{plan.optimizer}{momentum}, {plan.optimizer_implementation} implementation"
