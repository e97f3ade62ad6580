"""What would lower a plan's peak: every single change that can be made, judged by the estimate."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from shardwise.planner.by_shape import Planned, plan_by_shape
from shardwise.predict.estimate import estimate
from shardwise.predict.machine_memory import with_machine
from shardwise.spec.advice import Advice
from shardwise.spec.footprint import Footprint
from shardwise.spec.plan import Plan
from shardwise.spec.problems import BadInput
from shardwise.spec.reader import job_to_dict, read_job_dict
from shardwise.spec.report import Report

WORTH = 0.005
"""A change that lowers the peak by less than this share is no advice."""

Judge = Callable[[Planned], Report]
"""An instrument."""


@dataclass(frozen=True, kw_only=True)
class Change:
    """One change of a job's settings."""

    settings: tuple[str, ...]
    """`key=value`, as on the command line."""
    does: str
    """What it does."""
    costs: str
    """What it costs."""


def advise(planned: Planned, footprint: Footprint, *, judge: Judge | None = None) -> tuple[Advice, ...]:
    """Return the changes that lower a plan's peak, the one that lowers it most first.

    Each is read, decided and checked as if it were typed, so nothing is advised that would be refused. Changes are
    judged one by one: the savings of two of them do not add up.

    Args:
        planned: The plan.
        footprint: What `judge` says of it.
        judge: The instrument; None: the estimate.
    """
    judge = judge or by_estimate
    asked = job_to_dict(planned.job)
    found = []
    for change in changes(planned):
        other = _changed(planned, asked, change)
        if other is None:
            continue
        after = judge(other).footprint
        lowers = footprint.peak.allocated - after.peak.allocated
        if lowers <= WORTH * footprint.peak.allocated:
            continue
        device = after.device
        found.append(
            Advice(
                settings=change.settings,
                does=change.does,
                costs=change.costs,
                lowers=lowers,
                peak=after.peak,
                device=None if device is None else device.total,
                fits=None if device is None else device.fits,
            )
        )
    worth = [advice for advice in found if not any(_does_as_much(other, advice) for other in found)]
    return tuple(sorted(worth, key=lambda advice: (-advice.lowers, advice.settings)))


def _does_as_much(one: Advice, other: Advice) -> bool:
    """Tell whether a part of another change lowers the peak as far as all of it."""
    return set(one.settings) < set(other.settings) and one.lowers >= other.lowers


def by_estimate(planned: Planned) -> Report:
    """Return what the estimate says of a plan."""
    report = estimate(planned.workload, planned.plan, planned.cluster)
    return with_machine(report, planned.workload, planned.cluster)


def _changed(planned: Planned, asked: dict[str, object], change: Change) -> Planned | None:
    """Return the plan with one change; None where that is refused, or changes nothing."""
    try:
        job = read_job_dict(asked, change.settings, needs_data=False)
        other = plan_by_shape(job, planned.workload.model, planned.cluster)
    except BadInput:
        return None
    return None if other.plan.fingerprint() == planned.plan.fingerprint() else other


def changes(planned: Planned) -> Iterator[Change]:
    """Yield every change that goes in the direction of less memory."""
    yield from _activations(planned.plan)
    yield from _layout(planned)
    yield from _buffers(planned.plan)
    yield from _dtypes(planned.plan)
    yield from _offload(planned.plan)


def _activations(plan: Plan) -> Iterator[Change]:
    if plan.activation_checkpointing not in ("full", "every_1"):
        yield Change(
            settings=("activation_checkpointing=full",),
            does="activations of every block are computed again in backward",
            costs="about a third more computation",
        )
        if plan.activation_checkpointing == "none":
            yield Change(
                settings=("activation_checkpointing=every_2",),
                does="activations of every second block are computed again in backward",
                costs="about a sixth more computation",
            )
            yield Change(
                settings=("activation_checkpointing=selective",),
                does="all but attention and matrix products is computed again in backward",
                costs="a few percent more computation",
            )
    if plan.loss_head == "eager":
        yield Change(
            settings=("loss_head=chunked",),
            does=f"logits exist for {plan.loss_chunk} tokens at a time",
            costs="the head's products are computed twice",
        )
    if plan.micro_batch > 1:
        half = next(size for size in range(plan.micro_batch // 2, 0, -1) if plan.micro_batch % size == 0)
        yield Change(
            settings=(f"micro_batch={half}",),
            does=f"{half} instead of {plan.micro_batch} rows per forward, the same global batch",
            costs="more and smaller forwards, each with its gathers",
        )


def _layout(planned: Planned) -> Iterator[Change]:
    plan, world = planned.plan, planned.plan.mesh.replicate * planned.plan.mesh.shard
    alone = ("mesh.replicate=null", "mesh.shard=null") if plan.mesh.replicate > 1 else ()
    freed = "weights are freed after forward and gathered again"
    again = "one more all-gather per block and step"
    if world > 1 and plan.strategy == "NO_SHARD":
        sharded = "gradients, optimizer states and resting weights are sharded"
        for name, does, costs in (
            ("SHARD_GRAD_OP", sharded, "all-gather and reduce-scatter in place of the all-reduce"),
            ("FULL_SHARD", f"{sharded}; {freed}", "half more communication than an all-reduce"),
        ):
            yield Change(settings=(f"fsdp={name}", *alone), does=does, costs=costs)
    if plan.strategy == "SHARD_GRAD_OP":
        yield Change(settings=("fsdp=FULL_SHARD",), does=freed, costs=again)
    if plan.strategy == "HYBRID_SHARD_ZERO2":
        yield Change(settings=("fsdp=HYBRID_SHARD",), does=freed, costs=again)
    if plan.mesh.replicate > 1 and plan.strategy.startswith("HYBRID"):
        yield Change(
            settings=("fsdp=FULL_SHARD", *alone),
            does=f"shards over all {world} ranks, no replicas",
            costs="gathers and reductions cross between nodes",
        )
    if not isinstance(plan.reshard_after_forward, bool):
        yield Change(settings=("fsdp.reshard_after_forward=true",), does=freed, costs="gathers over all ranks again")
    for part in ("embedding", "head"):
        if getattr(plan.units, part) == "root":
            does = f"the {part} is gathered when it is used, instead of with the root for the whole step"
            yield Change(settings=(f"units.{part}=own",), does=does, costs="a gather and a reduction of its own")
    if plan.units.embedding == "root" and plan.units.head == "root":
        does = "embedding and head are gathered when they are used, instead of for the whole step"
        both = ("units.embedding=own", "units.head=own")
        yield Change(settings=both, does=does, costs="gathers and reductions of their own")


def _buffers(plan: Plan) -> Iterator[Change]:
    if plan.accumulation_steps > 1 and plan.accumulation_mode != "reduce_each":
        yield Change(
            settings=("accumulation=reduce_each",),
            does="gradients are reduced to shards after every micro-batch",
            costs="a reduction per micro-batch instead of per step",
        )
    for way in ("forward", "backward"):
        depth = getattr(plan.prefetch, way)
        if depth > 0:
            does = f"{depth - 1 or 'no'} instead of {depth} {'unit' if depth == 1 else 'units'} gathered ahead in {way}"
            costs = "gathers may not hide behind computation"
            yield Change(settings=(f"prefetch.{way}={depth - 1}",), does=does, costs=costs)
    if plan.reduce_scatter.buffers > 1:
        does = f"one reduction in flight instead of {plan.reduce_scatter.buffers}"
        yield Change(settings=("reduce_scatter.buffers=1",), does=does, costs="backward waits for each reduction")


def _dtypes(plan: Plan) -> Iterator[Change]:
    dtypes = plan.dtypes
    if dtypes.param == "fp32":
        costs = "rounding of bf16; weights and optimizer stay in fp32"
        yield Change(settings=("mixed_precision=bf16",), does="computation and gathers in 16 bits", costs=costs)
    elif dtypes.reduce == "fp32":
        change = f"mixed_precision.reduce_dtype={dtypes.param}"
        yield Change(settings=(change,), does="gradients are reduced in 16 bits", costs="rounding of sums over ranks")
    if dtypes.frozen_storage == "fp32":
        yield Change(settings=("model.dtype=bf16",), does="frozen weights rest in 16 bits", costs="their rounding")
    if dtypes.trained_storage == "fp32":
        does = "trained weights, gradients and optimizer states rest in 16 bits"
        yield Change(settings=("mixed_precision.storage_dtype=bf16",), does=does, costs="small updates are lost")
    if plan.optimizer == "adamw" and dtypes.optimizer_state == "fp32":
        yield Change(
            settings=("optimizer_state_dtype=bf16",), does="optimizer states rest in 16 bits", costs="their rounding"
        )
        yield Change(
            settings=("optimizer=adamw_8bit", "optimizer_implementation=null"),
            does="optimizer states rest in 8 bits",
            costs="their rounding, and the package torchao",
        )
    if plan.optimizer_implementation == "foreach":
        does = "the optimizer's update is one kernel without temporaries"
        yield Change(settings=("optimizer_implementation=fused",), does=does, costs="nothing on GPUs")


_OFFLOADED = {
    "optimizer": "optimizer states",
    "parameters": "shards of weights, gradients and optimizer states",
    "activations": "activations",
}


def _offload(plan: Plan) -> Iterator[Change]:
    kept = [part for part in ("optimizer", "parameters", "activations") if getattr(plan.offload, part)]
    for part, costs in (
        ("optimizer", "states cross the host link twice a step"),
        ("parameters", "weights and gradients cross the host link, and the optimizer runs on the CPU"),
        ("activations", "activations cross the host link twice"),
    ):
        if part not in kept:
            words = ", ".join([*kept, part])
            setting = f"offload=[{words}]" if kept else f"offload={part}"
            yield Change(settings=(setting,), does=f"{_OFFLOADED[part]} in host memory", costs=costs)
