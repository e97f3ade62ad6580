"""Answers made by hand, for the tests of how they are shown."""

from __future__ import annotations

from shardwise.planner.decide import Facts, decide
from shardwise.report.answer import PlanAnswer
from shardwise.spec.advice import Advice
from shardwise.spec.cluster import Cluster, Gpu, Sourced
from shardwise.spec.footprint import DeviceMemory, Footprint, HostMemory, Instant, Interval, LargestBuffer, Term
from shardwise.spec.job import Job
from shardwise.spec.model_spec import Attention, BlockKind, Mlp, ModelSpec, Tensor
from shardwise.spec.report import Report
from shardwise.spec.units import UnitRow, UnitTable
from shardwise.spec.workload import Workload

GIB = 2**30
A10 = Gpu(name="A10", usable=Sourced(bytes=22 * GIB, source="vendor"))


def model() -> ModelSpec:
    """Three blocks of a made-up model."""
    attention = Attention(heads=4, kv_heads=2, head_dim=8, value_dim=8)
    mlp = Mlp(gated=True, activation="silu", width=96)
    block = BlockKind(
        name="block", attention=attention, mlp=mlp, tensors=(Tensor(name="self_attn.q_proj.weight", shape=(32, 32)),)
    )
    return ModelSpec(
        name="made-up",
        model_type="llama",
        config={"model_type": "llama"},
        hidden=32,
        vocab=101,
        max_positions=64,
        kinds=(block,),
        blocks=(0, 0, 0),
        block_list="model.layers",
        embedding="model.embed_tokens",
        head="lm_head",
        tied=True,
        outside=(Tensor(name="model.embed_tokens.weight", shape=(101, 32)),),
        note="a stand-in",
    )


def units() -> UnitTable:
    """One block and the root."""
    row = UnitRow(
        name="model.layers.0",
        kind="Block",
        parameters=1024,
        trainable=1024,
        gathered_bytes=2048,
        stored_bytes=4096,
        stored_by_dtype={"float32": 4096},
        all_gather_bytes=2048,
        reduce_scatter_bytes=4096,
        reshard_after_forward=True,
        checkpointed=True,
    )
    return UnitTable(rows=(row,))


def interval(low: float, value: float, high: float) -> Interval:
    """An interval in GiB."""
    return Interval(low=int(low * GIB), value=int(value * GIB), high=int(high * GIB))


def footprint(
    *,
    backward: float = 10.0,
    limit: float | None = 22.0,
    total: tuple[float, float, float] | None = None,
    needed: tuple[float, float, float] | None = None,
) -> Footprint:
    """A peak of `backward` GiB at block 2, of which 0.5 GiB lie on the host besides."""
    low, value, high = total or (backward + 1, backward + 2, backward + 3)
    device = DeviceMemory(
        reserved=interval(low - 1, value - 1, high - 1),
        total=interval(low, value, high),
        needed=interval(*(needed or (low, value, high))),
        terms=(
            Term(name="live tensors", bytes=int(backward * GIB), source="estimated"),
            Term(name="CUDA context", bytes=GIB // 2, source="measured"),
        ),
        limit=None if limit is None else int(limit * GIB),
    )
    host = HostMemory(
        loading=3 * GIB, training=2 * GIB, terms=(Term(name="shards", bytes=GIB, source="x"),), limit=None
    )
    instants = (
        Instant(phase="forward", where="model.layers.2", live={"sharded_parameters": 2 * GIB, "activations": GIB}),
        Instant(
            phase="backward",
            where="model.layers.2",
            live={
                "sharded_parameters": 2 * GIB,
                "activations": int((backward - 2) * GIB),
                "offloaded": GIB // 2,
                "inputs": 0,
            },
        ),
    )
    buffer = LargestBuffer(bytes=GIB, category="logits_and_loss", where="lm_head")
    return Footprint(peaks=instants, largest_buffer=buffer, device=device if limit is not None else None, host=host)


def answer(*footprints: Footprint, advice: tuple[Advice, ...] = (), names=("estimate", "trace"), **job) -> PlanAnswer:
    """The answer of some instruments for the made-up model on 8 x A10."""
    wanted = Job.model_validate(
        {"model": {"path": "made-up"}, "fsdp": {"strategy": "FULL_SHARD"}, "seq_len": 64, **job}
    )
    facts = Facts(world=8, device_type="cuda", parameters=5000, frozen_storage=None, attention="sdpa")
    plan = decide(wanted, facts)
    reports = tuple(
        Report(instrument=name, plan=plan, footprint=found, notes=("a note",))
        for name, found in zip(names, footprints, strict=False)
    )
    return PlanAnswer(
        job=wanted,
        workload=Workload(model=model(), seq_len=64, lora=wanted.lora),
        cluster=Cluster(name="8xA10", nodes=1, per_node=8, gpu=A10),
        plan=plan,
        units=units(),
        reports=reports,
        advice=advice,
    )
