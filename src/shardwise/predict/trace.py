"""What a plan needs, from the real model: sharded as training shards it, run in fake tensors, every byte followed.

    report = trace(workload, plan, cluster)

No GPU, no weights and no other ranks: a fake process group of the planned world, on a mesh of CPUs (fake tensors of
GPUs abort the process where torch has no CUDA). Blocks of a kind are alike, so a few of each are traced and every place
of the step is brought to the real depth (`depth`). For GPUs, what they do otherwise is traced in the place of what the
CPU does (`shims`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from shardwise.engine.compat import UnsupportedRelease
from shardwise.measure.landmarks import OPTIMIZER
from shardwise.measure.storages import Segment, peaks
from shardwise.predict.depth import Depths, DepthsDiffer, depths_of, extend
from shardwise.predict.fake import FakeRank, fake_rank
from shardwise.predict.shims import Shim, shims_of
from shardwise.predict.trace_run import Observed, bucket_at_full_depth, observe
from shardwise.spec.cluster import Cluster
from shardwise.spec.footprint import PHASES, Category, Footprint, Instant, LargestBuffer
from shardwise.spec.plan import Plan
from shardwise.spec.plan_rules import broken_rules
from shardwise.spec.problems import BadInput, Problem
from shardwise.spec.report import Report
from shardwise.spec.workload import Workload

USE_ESTIMATE = "use the estimate"


def trace(workload: Workload, plan: Plan, cluster: Cluster, *, wrapped: bool = True) -> Report:
    """Return what tensors of rank 0 occupy under a plan; `machine_memory` adds what card and host hold beside.

    Args:
        workload: What is computed.
        plan: How it is laid out.
        cluster: What the plan is for.
        wrapped: By FSDP2, as training does it. False: one process with the plain model, as other programs run it, whose
            weights are stored in the dtype that it computes in.

    Raises:
        BadInput: the plan cannot be laid out on this model, or not be traced, with the reason.
        RuntimeError: this process has a process group.
    """
    check(plan, cluster, wrapped=wrapped)
    tracer = _Tracer(
        workload=workload,
        plan=plan.model_copy(update={"compile": False}),
        cluster=cluster,
        shims=shims_of(plan, cluster),
        depths=depths_of(workload.model.blocks, plan),
        wrapped=wrapped,
    )
    with fake_rank(plan.mesh, padded=_masked(workload, plan)) as rank:
        seen = tracer.run(rank)
    order = {phase: place for place, phase in enumerate(PHASES)}
    highest = sorted(map(_named, peaks(seen.segments)), key=lambda instant: order[instant.phase])
    return Report(
        instrument="trace",
        plan=plan,
        footprint=Footprint(peaks=tuple(highest), largest_buffer=seen.largest),
        notes=(*seen.notes, *_notes(workload, plan, cluster, tracer.shims)),
    )


def _named(instant: Instant) -> Instant:
    """Leave out what there is none of."""
    return replace(instant, live={category: size for category, size in instant.live.items() if size})


def check(plan: Plan, cluster: Cluster, *, wrapped: bool = True) -> None:
    """Refuse what cannot be, and what cannot be traced.

    Raises:
        BadInput: naming it.
    """
    problems = list(broken_rules(plan, cluster.device_type))
    if plan.optimizer == "adamw_8bit":
        reason = "cannot be traced: torchao compiles its update, which fake tensors do not go through"
        problems.append(Problem(field="optimizer", value=plan.optimizer, reason=reason, fix=USE_ESTIMATE))
    if not wrapped and plan.mesh.world > 1:
        reason = "is one process where the model is not wrapped"
        problems.append(Problem(field="mesh", value=plan.mesh.world, reason=reason, allowed="1"))
    stored = {plan.dtypes.trained_storage, plan.dtypes.frozen_storage or plan.dtypes.param}
    if not wrapped and stored != {plan.dtypes.param}:
        reason = "weights have to be stored in the dtype of the computation where the model is not wrapped"
        problems.append(Problem(field="dtypes.param", value=plan.dtypes.param, reason=reason))
    if problems:
        raise BadInput(problems)


def _masked(workload: Workload, plan: Plan) -> bool:
    """Whether attention gets a mask: rows differ in length, or are padded to be split along the sequence."""
    cut = plan.mesh.sequence_parallel and workload.seq_len % plan.mesh.tensor != 0
    return (workload.padded or cut) and plan.attention != "flash_attention_2"


@dataclass(frozen=True, kw_only=True)
class _Seen:
    """What was seen, at the real depth."""

    segments: Sequence[Segment]
    largest: LargestBuffer
    notes: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class _Tracer:
    """One model under one plan."""

    workload: Workload
    plan: Plan
    cluster: Cluster
    shims: Sequence[Shim]
    depths: Depths
    wrapped: bool

    def run(self, rank: FakeRank) -> _Seen:
        """Trace as few blocks as say what all need; all of them where two depths do not compare."""
        layers = self.workload.model.layers
        if not self.depths.cut:
            return self._whole(rank, "")
        try:
            base = self._observe(rank, self.depths.blocks())
            longer = {run: self._observe(rank, self.depths.blocks(run)).segments for run in self.depths.cut}
            segments = extend(self.depths, base.segments, longer, self.workload.model.block_list)
        except DepthsDiffer as error:
            return self._whole(rank, f"traced at full depth, as shorter models do not compare ({error})")
        numbers = self.depths.blocks()
        note = f"traced with {len(numbers)} of {layers} blocks and brought to the real depth"
        return _Seen(
            segments=[*self._resting(rank, base, segments)],
            largest=self._at_real_depth(base.largest),
            notes=(note,),
        )

    def _whole(self, rank: FakeRank, note: str) -> _Seen:
        seen = self._observe(rank, None)
        return _Seen(segments=seen.segments, largest=seen.largest, notes=(note,) if note else ())

    def _observe(self, rank: FakeRank, blocks: Sequence[int] | None) -> Observed:
        try:
            return observe(
                self.workload,
                self.plan,
                self.cluster,
                rank=rank,
                shims=self.shims,
                blocks=blocks,
                wrapped=self.wrapped,
            )
        except (BadInput, UnsupportedRelease):
            raise
        except Exception as error:
            model = self.workload.model.name
            first = (str(error).strip().splitlines() or [""])[0]
            reason = f"cannot be traced: {type(error).__name__}: {first}"
            raise BadInput(Problem(field="model", value=model, reason=reason, fix=USE_ESTIMATE)) from error

    def _resting(self, rank: FakeRank, base: Observed, segments: Sequence[Segment]) -> Iterator[Segment]:
        """An optimizer whose states rest elsewhere brings a bucket at a time to work, however deep the model is."""
        if not base.bucket:
            yield from segments
            return
        real = bucket_at_full_depth(self.workload, self.plan, self.cluster, rank)
        at_base = next(s for s in base.segments if s.key.where == OPTIMIZER)
        for segment in segments:
            if segment.key.where != OPTIMIZER:
                yield segment
                continue
            peak: dict[Category, int] = dict(segment.start)
            for category in {*at_base.peak, *at_base.start}:
                fetched = at_base.peak.get(category, 0) - at_base.start.get(category, 0)
                peak[category] = peak.get(category, 0) + fetched * real // base.bucket
            yield replace(segment, peak=peak)

    def _at_real_depth(self, largest: LargestBuffer) -> LargestBuffer:
        name = self.workload.model.block_list
        return replace(largest, where=self.depths.real_name(largest.where, name))


def _notes(workload: Workload, plan: Plan, cluster: Cluster, shims: Sequence[Shim]) -> Iterator[str]:
    if cluster.gpu is not None:
        yield f"as on {cluster.gpu.name}: {', '.join(shim.name for shim in shims)}"
    if plan.attention == "flash_attention_2":
        yield "flash_attention_2 is traced as torch's own flash attention, which takes the same memory without padding"
    if plan.compile:
        yield "traced without compiling: a compiled block saves less, up to what it computes again by itself"
    if any(kind.mlp.experts for kind in workload.model.kinds):
        yield "experts by grouped matrix products, whose memory does not depend on which tokens go where"
