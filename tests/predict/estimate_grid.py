"""Configurations at which the estimate is held against the trace, and the table of what differs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from shardwise.catalogue.clusters import find_cluster
from shardwise.catalogue.models import model_from_config
from shardwise.predict.estimate import estimate
from shardwise.predict.trace import trace
from shardwise.spec.cluster import Cluster
from shardwise.spec.footprint import CATEGORIES, Category, Footprint, Instant
from shardwise.spec.layout import Mesh, Offload, Prefetch, ReduceScatter, Units
from shardwise.spec.method import Lora
from shardwise.spec.model_spec import ModelSpec
from shardwise.spec.plan import Dtypes, Plan
from shardwise.spec.workload import Workload

SHAPES: dict[str, dict[str, Any]] = {
    "llama": {
        "model_type": "llama",
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_hidden_layers": 12,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
    },
    "llama-mha": {
        "model_type": "llama",
        "hidden_size": 1024,
        "intermediate_size": 2816,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "vocab_size": 32000,
    },
    "qwen2": {
        "model_type": "qwen2",
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_hidden_layers": 10,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "vocab_size": 151936,
        "tie_word_embeddings": True,
    },
    "qwen2-wide": {
        "model_type": "qwen2",
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 8,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "vocab_size": 151936,
    },
    "gpt2": {
        "model_type": "gpt2",
        "n_embd": 1280,
        "n_layer": 12,
        "n_head": 20,
        "n_positions": 1024,
        "vocab_size": 50257,
    },
    "gemma": {
        "model_type": "gemma",
        "hidden_size": 2048,
        "intermediate_size": 16384,
        "num_hidden_layers": 6,
        "num_attention_heads": 8,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "vocab_size": 64000,
    },
    "gemma2": {
        "model_type": "gemma2",
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "vocab_size": 64000,
        "sliding_window": 1024,
    },
    "mistral": {
        "model_type": "mistral",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 6,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 32768,
        "sliding_window": None,
    },
}
"""Small models of realistic proportions."""

BF16 = Dtypes(
    frozen_storage=None,
    trained_storage="fp32",
    param="bf16",
    reduce="fp32",
    output="fp32",
    buffer=None,
    loss_scaling=False,
)
FROZEN = BF16.model_copy(update={"frozen_storage": "bf16"})
LORA = Lora(rank=64)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One configuration."""

    name: str
    """What it is about."""
    workload: Workload
    """What is computed."""
    plan: Plan
    """How it is laid out."""
    cluster: Cluster
    """On what."""


def shape(name: str, **fields: Any) -> ModelSpec:
    """Return one of the small models, with some fields of its configuration changed."""
    return model_from_config({**SHAPES[name], **fields}, name=name)


def plan_of(*, lora: bool = False, cluster: Cluster, **fields: Any) -> Plan:
    """Return a plan like the planner's on this cluster, with some fields changed."""
    gpu = cluster.gpu is not None
    mesh = fields.pop("mesh", Mesh(shard=cluster.world))
    dtypes = fields.pop("dtypes", FROZEN if lora else BF16)
    background = gpu or (mesh.shard > 1 and mesh.replicate == 1 and dtypes.reduce == dtypes.trained_storage)
    usual: dict[str, Any] = {
        "strategy": "FULL_SHARD",
        "reshard_after_forward": True,
        "prefetch": Prefetch(forward=0 if gpu else 2, backward=1 if gpu else 2, async_all_gather=True),
        "reduce_scatter": ReduceScatter(
            buffers=2 if background and not gpu else 1, separate_group=False, asynchronous=background
        ),
        "activation_checkpointing": "none",
        "attention": "sdpa",
        "micro_batch": 1,
        "accumulation_steps": 1,
        "optimizer_implementation": "fused" if gpu else "foreach",
    }
    return Plan(mesh=mesh, dtypes=dtypes, **{**usual, **fields})


def case(
    name: str,
    model: str,
    cluster: str,
    *,
    seq_len: int = 2048,
    lora: Lora | None = None,
    padded: bool = False,
    config: dict[str, Any] | None = None,
    **fields: Any,
) -> Case:
    """Return a configuration; `fields` are those of its plan."""
    found = find_cluster(cluster)
    return Case(
        name=name,
        workload=Workload(model=shape(model, **(config or {})), seq_len=seq_len, lora=lora, padded=padded),
        plan=plan_of(lora=lora is not None, cluster=found, **fields),
        cluster=found,
    )


def _ahead(forward: int, backward: int) -> Prefetch:
    return Prefetch(forward=forward, backward=backward, async_all_gather=True)


def _held(buffers: int) -> ReduceScatter:
    return ReduceScatter(buffers=buffers, separate_group=False, asynchronous=True)


A100, H100, A10, CPU = "8xA100-SXM-80GB", "2x8xH100-SXM-80GB", "8xA10", "4xcpu"
KEEP = {"strategy": "SHARD_GRAD_OP", "reshard_after_forward": False}
CHUNKED = {"loss_head": "chunked"}
FULL = {"activation_checkpointing": "full"}


def hybrid(replicate: int, shard: int, tensor: int = 1) -> dict[str, Any]:
    """Return the fields of a hybrid plan."""
    return {"strategy": "HYBRID_SHARD", "mesh": Mesh(replicate=replicate, shard=shard, tensor=tensor)}


def replicas(count: int) -> dict[str, Any]:
    """Return the fields of a plan that shards nothing."""
    return {"strategy": "NO_SHARD", "mesh": Mesh(replicate=count)}


def all_cases() -> list[Case]:
    """Return every configuration."""
    bf16_reduce = BF16.model_copy(update={"reduce": "bf16"})
    bf16_all = BF16.model_copy(update={"reduce": "bf16", "trained_storage": "bf16", "optimizer_state": "bf16"})
    bf16_stored = BF16.model_copy(update={"trained_storage": "bf16"})
    fp16 = FROZEN.model_copy(update={"param": "fp16", "frozen_storage": "fp16", "loss_scaling": True})
    fp32 = BF16.model_copy(update={"param": "fp32"})
    return [
        # strategies
        case("full shard", "llama", A100),
        case("full shard, 64 ranks", "llama", "8x8xH100-SXM-80GB"),
        case("shard grad op", "llama", A100, **KEEP, **FULL),
        case("reshard to 2", "llama-mha", A100, reshard_after_forward=2, **FULL),
        case("reshard to 4", "llama", H100, reshard_after_forward=4, **FULL, **CHUNKED),
        case("hybrid", "llama", H100, **hybrid(2, 8), **FULL, **CHUNKED),
        case("hybrid, zero 2", "llama-mha", H100, **{**hybrid(2, 8), **KEEP, "strategy": "HYBRID_SHARD_ZERO2"}),
        case("hybrid, bf16 reduction", "llama", H100, **hybrid(2, 8), dtypes=bf16_reduce, **FULL, **CHUNKED),
        case("replicas", "llama-mha", A100, **replicas(8), **FULL),
        case("replicas, bf16 reduction", "llama-mha", A100, **replicas(8), dtypes=bf16_reduce, **CHUNKED),
        case("one rank", "llama-mha", "1xA100-SXM-80GB", **replicas(1), **FULL),
        # checkpointing and loss heads
        case("full checkpointing", "llama", A100, **FULL, micro_batch=2),
        case("selective checkpointing", "llama", A100, activation_checkpointing="selective"),
        case("every second block", "llama", A100, activation_checkpointing="every_2", micro_batch=2),
        case("every third block", "llama-mha", A100, activation_checkpointing="every_3", micro_batch=4, **CHUNKED),
        case("chunked", "llama", A100, **CHUNKED),
        case("chunked, full", "llama", A100, **CHUNKED, **FULL),
        case("chunked, selective", "qwen2", A100, **CHUNKED, activation_checkpointing="selective"),
        case("small chunks", "qwen2-wide", A100, loss_head="chunked", loss_chunk=256, **FULL),
        case("bf16 logits", "llama", A100, dtypes=BF16.model_copy(update={"output": "bf16"}), **FULL),
        # depths and buffers
        case("prefetch 1, 1", "llama", A100, prefetch=_ahead(1, 1), **FULL, **CHUNKED),
        case("prefetch 2, 2", "mistral", A100, prefetch=_ahead(2, 2), **FULL, **CHUNKED),
        case("prefetch 0, 0", "llama", A100, prefetch=_ahead(0, 0), **FULL, **CHUNKED),
        case("prefetch 3, 0", "llama-mha", A100, prefetch=_ahead(3, 0), **FULL, **CHUNKED, seq_len=512),
        case("three buffers", "mistral", A100, reduce_scatter=_held(3), **FULL, **CHUNKED),
        # accumulation
        case("accumulate", "llama", A100, accumulation_steps=4, **FULL),
        case("defer all", "llama", A100, accumulation_steps=4, accumulation_mode="defer_all", **FULL, **CHUNKED),
        case(
            "defer all, bf16", "llama-mha", A100, accumulation_steps=3, accumulation_mode="defer_all", dtypes=bf16_all
        ),
        case(
            "defer replicas",
            "llama",
            H100,
            **hybrid(2, 8),
            accumulation_steps=4,
            accumulation_mode="defer_replicate",
            **FULL,
            **CHUNKED,
        ),
        # dtypes and optimizers
        case("all bf16", "llama", A100, dtypes=bf16_all, **FULL),
        case("bf16 stored, fp32 states", "llama", A100, dtypes=bf16_stored, **FULL, **CHUNKED),
        case("fp32", "llama-mha", A100, dtypes=fp32),
        case("fp32 stored, bf16 states", "llama", A100, dtypes=BF16.model_copy(update={"optimizer_state": "bf16"})),
        case("foreach", "mistral", A100, optimizer_implementation="foreach", **FULL, **CHUNKED, seq_len=1024),
        case("for loop", "mistral", A100, optimizer_implementation="for_loop", **FULL, **CHUNKED),
        case("sgd", "llama", A100, optimizer="sgd", optimizer_implementation="foreach", **FULL),
        # units of their own
        case("own ends", "llama", A100, units=Units(embedding="own", head="own"), **FULL, **CHUNKED),
        case("own embedding", "llama-mha", A100, units=Units(embedding="own"), **FULL),
        case("own head, kept", "llama", A100, units=Units(head="own"), **KEEP, **FULL),
        case("own ends, tied", "qwen2", A100, units=Units(embedding="own", head="own"), **FULL, **CHUNKED),
        # offload
        case("offload all", "llama", A10, offload=Offload(parameters=True, optimizer=True), **FULL, **CHUNKED),
        case("offload states", "llama", A10, offload=Offload(optimizer=True), **FULL, **CHUNKED),
        case("offload activations", "llama", A10, offload=Offload(activations=True), **CHUNKED),
        case("offload activations, full", "llama", A10, offload=Offload(activations=True), **FULL, **CHUNKED),
        # LoRA
        case("lora", "qwen2-wide", A10, lora=LORA, **FULL),
        case("lora, no checkpoints", "qwen2-wide", A10, lora=LORA, seq_len=1024),
        case("lora, chunked", "qwen2-wide", A10, lora=LORA, **FULL, **CHUNKED, micro_batch=2),
        case("lora, fp16", "qwen2-wide", A10, lora=LORA, dtypes=fp16, **FULL),
        case("lora, kept", "mistral", A10, lora=LORA, **KEEP, **FULL, **CHUNKED),
        case("lora, dropout", "mistral", A10, lora=Lora(rank=16, dropout=0.1), **CHUNKED, seq_len=1024),
        case("lora, attention only", "mistral", A10, lora=Lora(rank=8, targets=("q_proj", "v_proj")), **CHUNKED),
        case("lora, accumulate", "llama", A10, lora=LORA, accumulation_steps=4, **FULL, **CHUNKED),
        case("lora, every second", "mistral", A10, lora=LORA, activation_checkpointing="every_2", **CHUNKED),
        case("lora, offload", "mistral", A10, lora=LORA, offload=Offload(parameters=True, optimizer=True), **FULL),
        case("lora, hybrid", "mistral", H100, lora=LORA, **hybrid(2, 8), **FULL, **CHUNKED),
        case("lora, saved head", "llama", A10, lora=Lora(rank=16, modules_to_save=("lm_head",)), **FULL),
        # families
        case("qwen2", "qwen2", A100, micro_batch=2, seq_len=1024),
        case("qwen2, full", "qwen2", A100, **FULL, **CHUNKED, seq_len=4096),
        case("gpt2", "gpt2", A100, micro_batch=4, seq_len=1024),
        case("gpt2, full", "gpt2", A100, micro_batch=4, seq_len=1024, **FULL, **CHUNKED),
        case("gpt2, replicas", "gpt2", A100, seq_len=1024, **replicas(8)),
        case("gemma", "gemma", A100),
        case("gemma, full", "gemma", A100, **FULL, **CHUNKED),
        case("gemma2", "gemma2", A100, attention="eager"),
        case("gemma2, full", "gemma2", A100, attention="eager", **FULL, **CHUNKED),
        case("mistral", "mistral", A100, seq_len=4096),
        case("mistral, eager attention", "mistral", A100, attention="eager", seq_len=1024),
        case("padded rows", "llama", A100, padded=True, micro_batch=2, **CHUNKED),
        # tensor axis
        case("tensor 2", "llama", A100, mesh=Mesh(shard=4, tensor=2)),
        case("tensor 4, full", "llama", H100, mesh=Mesh(shard=4, tensor=4), **FULL),
        case("tensor 2, sequence", "llama", A100, mesh=Mesh(shard=4, tensor=2, sequence_parallel=True), **FULL),
        case("tensor 2, hybrid", "llama-mha", H100, **hybrid(2, 4, 2), **FULL, **CHUNKED),
        # CPU processes
        case("cpu", "llama-mha", CPU, seq_len=512),
        case("cpu, full", "llama-mha", CPU, seq_len=512, **FULL, **CHUNKED),
        case("cpu, two ranks, kept", "llama-mha", "2xcpu", seq_len=512, **KEEP, **FULL),
        case("cpu, replicas", "llama-mha", CPU, seq_len=512, **replicas(4), **FULL),
        case("cpu, accumulate", "llama-mha", CPU, seq_len=512, accumulation_steps=4, **FULL),
        case("cpu, lora", "llama-mha", CPU, seq_len=512, lora=Lora(rank=16), **FULL, **CHUNKED),
        case("cpu, hybrid", "llama-mha", CPU, seq_len=512, **hybrid(2, 2), **FULL, **CHUNKED),
    ]


@dataclass(frozen=True, kw_only=True)
class Difference:
    """How one estimate differs from its trace."""

    name: str
    """The configuration."""
    traced: Instant
    """The trace's highest instant."""
    estimated: Instant
    """The estimate's."""
    phases: dict[str, float]
    """Relative difference of each phase's peak."""
    largest: float
    """Relative difference of the largest contiguous buffer."""

    @property
    def total(self) -> float:
        """Relative difference of the peaks."""
        return self.estimated.allocated / self.traced.allocated - 1

    @property
    def terms(self) -> dict[Category, float]:
        """Difference of each category at the peak, relative to the total."""
        return {
            category: (self.estimated.live.get(category, 0) - self.traced.live.get(category, 0)) / self.traced.allocated
            for category in CATEGORIES
            if category != "offloaded"
        }


def compare(one: Case) -> Difference:
    """Estimate and trace one configuration."""
    estimated = estimate(one.workload, one.plan, one.cluster).footprint
    traced = trace(one.workload, one.plan, one.cluster).footprint
    return Difference(
        name=one.name,
        traced=traced.peak,
        estimated=estimated.peak,
        phases=_by_phase(estimated, traced),
        largest=estimated.largest_buffer.bytes / traced.largest_buffer.bytes - 1,
    )


def _by_phase(estimated: Footprint, traced: Footprint) -> dict[str, float]:
    found = {}
    for instant in traced.peaks:
        other = estimated.of_phase(instant.phase)
        if other is not None:
            found[instant.phase] = other.allocated / instant.allocated - 1
    return found


def table(differences: Sequence[Difference]) -> str:
    """Return a line per configuration and one per category, in percent."""
    lines = [f"{'':28} {'trace MiB':>10} {'estimate':>10} {'peak':>7}  by phase, where, largest terms"]
    for one in differences:
        phases = " ".join(f"{phase[:4]} {value:+.1%}" for phase, value in one.phases.items())
        terms = sorted(one.terms.items(), key=lambda term: -abs(term[1]))[:3]
        shown = " ".join(f"{category} {value:+.1%}" for category, value in terms if abs(value) >= 0.005)
        where = f"{one.traced.phase[:4]}:{one.traced.where} / {one.estimated.phase[:4]}:{one.estimated.where}"
        lines.append(
            f"{one.name:28} {one.traced.allocated / 2**20:10.1f} {one.estimated.allocated / 2**20:10.1f} "
            f"{one.total:+7.2%}  {phases} largest {one.largest:+.1%}  {where}  {shown}"
        )
    totals = [abs(one.total) for one in differences]
    lines.append(f"{len(totals)} configurations: median {median(totals):.2%}, worst {max(totals):.2%}")
    lines += by_term(differences)
    return "\n".join(lines)


def by_term(differences: Iterable[Difference]) -> list[str]:
    """Return a line per category: median and worst difference at the peak, relative to the total."""
    lines = [f"{'term':24} {'median':>7} {'worst':>7}"]
    for category in CATEGORIES:
        if category == "offloaded":
            continue
        values = [abs(one.terms[category]) for one in differences]
        lines.append(f"{category:24} {median(values):7.2%} {max(values):7.2%}")
    return lines
