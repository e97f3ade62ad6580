"""Plans drawn at random over models, clusters and every switch, for laws that hold for all of them."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from random import Random
from typing import Any, NamedTuple

from shardwise.catalogue.clusters import find_cluster
from shardwise.catalogue.models import find_model
from shardwise.predict.assemblies import assembly_of
from shardwise.spec.cluster import Cluster
from shardwise.spec.curve import Curve
from shardwise.spec.layout import Mesh, Offload, Prefetch, ReduceScatter, Units
from shardwise.spec.method import Lora
from shardwise.spec.plan import Dtypes, Plan
from shardwise.spec.problems import BadInput
from shardwise.spec.runtime import SHARDWISE
from shardwise.spec.speeds import CollectiveSpeed, DeviceSpeeds, HostSpeeds, Measured
from shardwise.spec.workload import Workload

MODELS = (
    "tinyllama-1.1b",
    "llama-2-7b",
    "llama-3.1-8b",
    "llama-2-70b",
    "llama-3.2-1b",
    "qwen2.5-0.5b",
    "qwen3-8b",
    "gemma-2b",
    "gemma-2-9b",
    "mixtral-8x7b",
    "qwen3-30b-a3b",
    "deepseek-v2-lite",
    "gpt2",
    "phi-2",
    "falcon-7b",
)
"""Dense with and without grouped queries, tied and untied, experts, latent attention, learned positions."""

CLUSTERS = (
    "1xA10",
    "8xA10",
    "8xA100-SXM-80GB",
    "2x8xA100-SXM-80GB eth-25",
    "8x8xH100-SXM-80GB",
    "18x4xGB200 nvl72",
    "8xMI300X",
    "2xcpu",
)
"""One card, PCIe, NVLink, a slow and a fast network, a rack of NVLink, xGMI, and CPU processes that were probed."""


class Drawn(NamedTuple):
    """What was drawn."""

    workload: Workload
    """What is computed."""
    plan: Plan
    """How it is laid out."""
    cluster: Cluster
    """On what."""

    def change(self, **fields: Any) -> Drawn:
        """The same with other decisions."""
        return self._replace(plan=self.plan.model_copy(update=fields))


@cache
def cluster_of(name: str) -> Cluster:
    """A cluster, the same object each time; CPU processes as a probe would find them."""
    found = find_cluster(name)
    return found if found.gpu is not None else found.model_copy(update={"measured": probed()})


def probed() -> Measured:
    """Two CPU processes: 30 GFLOP/s, 5 GB/s, and 200 MB/s between them."""

    def line(rate: float, least: float) -> Curve:
        return Curve(points=((rate * least, least), (rate * 1.0, 1.0)), source="by hand")

    kinds: tuple[Any, ...] = ("all_gather", "reduce_scatter", "all_reduce")
    return Measured(
        device=DeviceSpeeds(
            products={"fp32": line(3e10, 5e-6), "bf16": line(4e10, 5e-6)},
            memory={"fp32": line(5e9, 3e-6), "bf16": line(3e9, 3e-6)},
            issue_s=2e-6,
            post_s=2e-4,
            slowdown=1.1,
        ),
        collectives=tuple(CollectiveSpeed(kind=kind, nodes=1, per_node=2, curve=line(2e8, 3e-4)) for kind in kinds),
        host=HostSpeeds(link=None, adam_s=4e-9),
        source="by hand",
    )


@cache
def workload_of(name: str, seq_len: int, lora: Lora | None, padded: bool) -> Workload:
    """A workload, the same object each time."""
    return Workload(model=find_model(name), seq_len=seq_len, lora=lora, padded=padded)


LORAS = (None, None, None, Lora(rank=16), Lora(rank=64, dropout=0.1), Lora(rank=8, targets=("q_proj", "v_proj")))
STRATEGIES = ("FULL_SHARD", "FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2", "NO_SHARD")


def draw(random: Random, *, models: tuple[str, ...] = MODELS, clusters: tuple[str, ...] = CLUSTERS) -> Drawn:
    """Draw a workload, a cluster and a plan."""
    cluster = cluster_of(random.choice(clusters))
    workload = workload_of(
        random.choice(models), random.choice((128, 1024, 2048)), random.choice(LORAS), random.random() < 0.1
    )
    return Drawn(workload, _plan(random, cluster, workload.lora is not None), cluster)


def _plan(random: Random, cluster: Cluster, lora: bool) -> Plan:
    gpu = cluster.gpu is not None
    strategy, mesh = _mesh(random, cluster)
    reshard: bool | int = strategy in ("FULL_SHARD", "HYBRID_SHARD")
    parts = [size for size in range(2, mesh.shard) if mesh.shard % size == 0]
    if reshard and mesh.tensor == 1 and parts and random.random() < 0.3:
        reshard = random.choice(parts)
    optimizer = random.choice(("adamw", "adamw", "sgd", "adamw_8bit"))
    dtypes = _dtypes(random, lora, optimizer)
    offload = random.choice(({}, {}, {"optimizer": True}, {"parameters": True}, {"activations": True}))
    if optimizer == "adamw_8bit" and offload.get("optimizer"):
        offload = {}
    head = random.choice(("eager", "chunked", "fused" if gpu and mesh.tensor == 1 else "chunked"))
    return Plan(
        strategy=strategy,
        mesh=mesh,
        reshard_after_forward=reshard,
        units=Units(embedding=random.choice(("root", "own")), head=random.choice(("root", "own"))),
        prefetch=Prefetch(
            forward=random.randint(0, 3), backward=random.randint(0, 3), async_all_gather=gpu or random.random() < 0.7
        ),
        reduce_scatter=ReduceScatter(
            buffers=random.randint(1, 4),
            separate_group=random.random() < 0.3,
            asynchronous=gpu or random.random() < 0.7,
        ),
        dtypes=dtypes.model_copy(update={"output": "fp32"}) if head != "eager" else dtypes,
        activation_checkpointing=random.choice(("none", "full", "selective", "every_2", "every_3")),
        offload=Offload.model_validate(offload),
        attention=random.choice(("sdpa", "sdpa", "eager", "sdpa" if dtypes.param == "fp32" else "flash_attention_2")),
        micro_batch=random.choice((1, 2, 8)),
        accumulation_steps=random.choice((1, 2, 3, 8)),
        accumulation_mode=random.choice(("reduce_each", "defer_all", "defer_replicate")),
        optimizer=optimizer,
        optimizer_implementation=random.choice(("fused", "foreach", "for_loop")),
        loss_head=head,
        compile=mesh.tensor == 1 and random.random() < 0.2,
    )


def _mesh(random: Random, cluster: Cluster) -> tuple[Any, Mesh]:
    world = cluster.world
    strategy = random.choice(STRATEGIES)
    tensor = random.choice((1, 1, 1, 2, 4))
    tensor = tensor if world % tensor == 0 and cluster.gpu is not None else 1
    data = world // tensor
    if strategy == "NO_SHARD":
        return strategy, Mesh(replicate=data, tensor=tensor, sequence_parallel=_halved(random, tensor))
    replicate = 1
    if strategy.startswith("HYBRID"):
        replicate = random.choice([size for size in range(1, data + 1) if data % size == 0])
    mesh = Mesh(replicate=replicate, shard=data // replicate, tensor=tensor, sequence_parallel=_halved(random, tensor))
    return strategy, mesh


def _halved(random: Random, tensor: int) -> bool:
    return tensor > 1 and random.random() < 0.5


def _dtypes(random: Random, lora: bool, optimizer: str) -> Dtypes:
    param: Any = random.choice(("bf16", "bf16", "fp16", "fp32"))
    whole = optimizer == "adamw_8bit"
    return Dtypes(
        frozen_storage=random.choice(("bf16", "fp32")) if lora else None,
        trained_storage="fp32" if whole else random.choice(("fp32", "fp32", "bf16")),
        optimizer_state="fp32" if whole else random.choice(("fp32", "fp32", "bf16")),
        param=param,
        reduce=random.choice(("fp32", param)),
        output=random.choice(("fp32", param)),
        buffer=None,
        loss_scaling=param == "fp16",
    )


def some(seed: str, count: int, **among: tuple[str, ...]) -> Iterator[Drawn]:
    """Draw so many that a formula describes; one that it refuses is drawn again."""
    random = Random(seed)
    while count:
        drawn = draw(random, **among)
        try:
            assembly_of(drawn.workload, drawn.cluster, SHARDWISE).step(drawn.plan)
        except BadInput:
            continue
        count -= 1
        yield drawn
