"""Two steps of one model in fake tensors, an evaluation and what a save finds, with every storage followed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from shardwise.catalogue.models import checkpoint_dtype
from shardwise.engine import scaler as scaling
from shardwise.engine.accumulation import Accumulation
from shardwise.engine.adapters import init_adapters
from shardwise.engine.apply import apply, units
from shardwise.engine.blocks import find_blocks
from shardwise.engine.checkpointing import wrap_blocks
from shardwise.engine.clip import clip_gradients
from shardwise.engine.load import skeleton_of
from shardwise.engine.loss_head import install_loss_head, token_loss
from shardwise.engine.micro_batch import run_micro_batch
from shardwise.engine.model_spec import config_of
from shardwise.engine.optimizer import build_optimizer
from shardwise.engine.precision import cast_buffers
from shardwise.engine.resting_state import RestingOptimizer, buckets
from shardwise.engine.scaler import build_scaler
from shardwise.engine.shards import local
from shardwise.measure.storages import Segment, StorageTracker
from shardwise.predict.fake import FakeBatch, FakeRank, fake_batch
from shardwise.predict.shims import Shim, as_on
from shardwise.spec.cluster import Cluster
from shardwise.spec.footprint import LargestBuffer
from shardwise.spec.plan import Plan
from shardwise.spec.workload import HELD_OUT_PER_TRAINED, Workload

REPORTED = 1
"""The step that is reported, counted from 0; the one before makes the optimizer's states."""

MICRO_BATCHES = 3
"""Micro-batches of a step that are traced: the first finds no gradients, the last reduces what was deferred, and all
between are alike."""


@dataclass(frozen=True, kw_only=True)
class Observed:
    """What one trace saw."""

    segments: tuple[Segment, ...]
    """Loading, the reported step, the evaluation and the save, in order."""
    largest: LargestBuffer
    """The largest contiguous buffer."""
    bucket: int
    """Elements of this rank's shards that the optimizer brings to work at once; 0: it works where its states rest."""


def observe(
    workload: Workload,
    plan: Plan,
    cluster: Cluster,
    *,
    rank: FakeRank,
    shims: Sequence[Shim],
    blocks: Sequence[int] | None,
    wrapped: bool = True,
) -> Observed:
    """Trace a model that has only some of its blocks.

    Args:
        workload: What is computed.
        plan: How it is laid out.
        cluster: What the plan is for.
        rank: This rank of a world that is not there.
        shims: What is different on the cluster's devices.
        blocks: Numbers of the blocks; None: all.
        wrapped: By FSDP2; False: the plain model of one process.

    Raises:
        BadInput: the plan cannot be laid out on this model.
    """
    model = _sharded(workload, plan, cluster, rank, blocks, wrapped=wrapped)
    tracker = StorageTracker()
    run = _Run(workload=workload, plan=plan, cluster=cluster, rank=rank, model=model, tracker=tracker)
    with rank.tensors, tracker, as_on(cluster, shims, tensors=rank.tensors, tracker=tracker):
        run.load()
        optimizer = _optimizer(model, plan)
        tracker.watch_optimizer(optimizer)
        scaler = build_scaler(plan, "cpu")
        run.start(optimizer, scaler)
        run.step(optimizer, scaler)
        if workload.held_out:
            run.evaluate()
        largest = tracker.largest()
    assert largest is not None
    kept = [s for s in tracker.segments() if s.key.phase in ("load", "evaluation") or s.key.step == REPORTED]
    return Observed(segments=(*kept, _at_rest(kept[-1])), largest=largest, bucket=_bucket(optimizer))


def _at_rest(last: Segment) -> Segment:
    """A save takes no memory on the device: shards and states are written one at a time, by way of the host."""
    key = replace(last.key, phase="save", where="root")
    return replace(last, key=key, visit=0, start=last.end, peak=last.end)


def _sharded(
    workload: Workload,
    plan: Plan,
    cluster: Cluster,
    rank: FakeRank,
    blocks: Sequence[int] | None,
    *,
    wrapped: bool = True,
) -> nn.Module:
    """Return the model on the meta device, laid out as training lays it out, or not wrapped."""
    frozen = plan.dtypes.frozen_storage
    skeleton = skeleton_of(
        config_of(workload.model),
        attention="sdpa" if plan.attention == "flash_attention_2" else plan.attention,
        frozen=(checkpoint_dtype(workload.model) or "bf16") if frozen == "checkpoint" else frozen,
        trained=plan.dtypes.trained_storage,
        lora=workload.lora,
        tensor=plan.mesh.tensor,
        blocks=blocks,
    )
    if wrapped:
        apply(skeleton.model, plan, rank.mesh, device_type=cluster.device_type)
    else:
        install_loss_head(skeleton.model, plan)
        wrap_blocks(find_blocks(skeleton.model).modules, plan.activation_checkpointing)
    return skeleton.model


def _optimizer(model: nn.Module, plan: Plan) -> torch.optim.Optimizer:
    return build_optimizer(model, plan, learning_rate=1e-4, weight_decay=0.01, momentum=0.9)


def _bucket(optimizer: torch.optim.Optimizer) -> int:
    if not isinstance(optimizer, RestingOptimizer):
        return 0
    sizes = [[local(parameter).numel() for parameter in group["params"]] for group in optimizer.param_groups]
    return max(sum(bucket) for group in sizes for bucket in buckets(group, int))


def bucket_at_full_depth(workload: Workload, plan: Plan, cluster: Cluster, rank: FakeRank) -> int:
    """Return what `Observed.bucket` is for the whole model; nothing of it runs."""
    return _bucket(_optimizer(_sharded(workload, plan, cluster, rank, None), plan))


@dataclass(frozen=True, kw_only=True)
class _Run:
    """A sharded model, and what is done with it."""

    workload: Workload
    plan: Plan
    cluster: Cluster
    rank: FakeRank
    model: nn.Module
    tracker: StorageTracker

    def load(self) -> None:
        """Give the shards memory."""
        with self.tracker.phase("load"):
            self.model.to_empty(device="cpu")
            if self.workload.lora is not None and self.cluster.gpu is None:
                init_adapters(self.model, 0)
            cast_buffers(self.model, self.plan.dtypes)
        self.tracker.watch(self.model)

    def start(self, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler) -> None:
        """Take the first step, which makes the optimizer's states, on gradients that are given, not computed."""
        with self.tracker.births("offloaded" if self.plan.offload.parameters else "sharded_gradients"):
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.grad = torch.zeros_like(parameter)
        if scaler.is_enabled():
            with self.tracker.births("logits_and_loss"):
                scaler.scale(torch.zeros(()))
        optimizer.step()

    def step(self, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler) -> None:
        """Do what training does for one optimizer step."""
        plan = self.plan
        waiting = self._waiting()
        optimizer.zero_grad(set_to_none=True)
        count = min(plan.accumulation_steps, MICRO_BATCHES)
        accumulation = Accumulation(self.model, plan, count)
        for number in range(count):
            batch = waiting[number] if waiting else self._batch(plan.micro_batch)
            run_micro_batch(self.model, batch, number, accumulation=accumulation, scaler=scaler, trained=1.0)
        del batch
        scaling.unscale(scaler, optimizer)
        clip_gradients(self.model.parameters(), 1.0)
        scaling.step(scaler, optimizer)

    @torch.no_grad()
    def evaluate(self) -> None:
        """Do what training does for one batch of held-out rows."""
        self.model.eval()
        batch = self._batch(HELD_OUT_PER_TRAINED * self.plan.micro_batch)
        token_loss(self.model, batch)
        del batch
        for unit in units(self.model):
            unit.reshard()
        self.model.train()

    def _waiting(self) -> list[FakeBatch]:
        """Return all batches of a step where they lie in the same memory as the model; GPUs get each when it runs."""
        if self.cluster.gpu is not None:
            return []
        return [self._batch(self.plan.micro_batch) for _ in range(self.plan.accumulation_steps)]

    def _batch(self, rows: int) -> FakeBatch:
        length, tensors = self.workload.seq_len, self.rank.tensors
        # Of each row's labels all but the first are predicted; a chunked loss head looks for those.
        tensors.trues = {rows * length: rows * (length - 1)}
        batch = fake_batch(rows, length)
        self.tracker.add((batch.input_ids, batch.attention_mask, batch.labels), "inputs")
        return batch
