"""From a measured row to what the instruments take: a workload, a plan, a cluster and the program that ran it.

A row's fields are read alone: never its id, its source or its notes.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd
from typing import Any

from shardwise.catalogue.cards import find_gpu
from shardwise.catalogue.dimensions import model_from_dimensions
from shardwise.predict.adapted import LINEAR
from shardwise.predict.blocks.families import FAMILIES
from shardwise.spec.cluster import Cluster, Gpu, Sourced
from shardwise.spec.method import Lora
from shardwise.spec.model_spec import ModelSpec
from shardwise.spec.plan import Plan
from shardwise.spec.problems import BadInput
from shardwise.spec.runtime import Runtime
from shardwise.spec.workload import Workload
from shardwise.trials.measured import MeasuredLora, MeasuredRow
from shardwise.trials.measured_plan import plan_of, runtime_of, stated

LORA_DROPOUT = 0.05
"""Rows do not say it; published recipes have 0.05 or 0.1, and any is the same in memory."""

UNKNOWN_BYTES = 2**60
"""Memory of a card that the catalogue does not know: what fits on it cannot be said."""

RANK = 16
"""Rank of adapters where it is not stated."""

_PARTS = {
    "attention": ("q_proj", "k_proj", "v_proj", "o_proj"),
    "q_proj": ("q_proj", "query_key_value", "c_attn", "Wqkv"),
    "k_proj": ("k_proj", "query_key_value", "c_attn", "Wqkv"),
    "v_proj": ("v_proj", "query_key_value", "c_attn", "Wqkv"),
    "qkv_proj": ("q_proj", "k_proj", "v_proj", "query_key_value", "c_attn", "Wqkv"),
    "o_proj": ("o_proj", "attn.c_proj", "attention.dense", "self_attn.dense", "attn.out_proj"),
    "gate_proj": ("gate_proj",),
    "up_proj": ("up_proj", "fc1", "c_fc", "dense_h_to_4h", "ffn.up_proj"),
    "down_proj": ("down_proj", "fc2", "mlp.c_proj", "dense_4h_to_h", "ffn.down_proj"),
}
"""Names of a row's schema -> suffixes of modules that do that part, in the classes that stand in for rows."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A row that can be predicted."""

    workload: Workload
    """Model, adapters, length of rows."""
    plan: Plan
    """The layout."""
    cluster: Cluster
    """The machines."""
    runtime: Runtime
    """The program."""

    @property
    def knows_card(self) -> bool:
        """Whether the catalogue knows what the card holds."""
        return self.cluster.gpu is not None and self.cluster.gpu.usable.bytes < UNKNOWN_BYTES


class Skipped(Exception):
    """Why a row cannot be predicted."""


def case_of(row: MeasuredRow) -> Case:
    """Return what a row ran.

    Raises:
        Skipped: with the reason.
    """
    plan = row.plan
    _refuse(row)
    try:
        model = _model(row)
        cluster = _cluster(row)
    except BadInput as error:
        raise Skipped("; ".join(problem.reason for problem in error.problems)) from error
    lora = _lora(row.lora, model)
    runtime = runtime_of(row, model)
    return Case(
        workload=Workload(model=model, seq_len=stated(plan.seq_len), lora=lora, held_out=False),
        plan=plan_of(row, runtime),
        cluster=cluster,
        runtime=runtime,
    )


def _refuse(row: MeasuredRow) -> None:
    """Refuse what no instrument predicts.

    Raises:
        Skipped: with the reason.
    """
    plan, model = row.plan, row.model
    if plan.strategy in ("ZERO1", "MEGATRON"):
        raise Skipped(f"{plan.strategy}: no formula for its buckets and stages")
    for name, size in (("pipeline", plan.pipeline), ("context", plan.context)):
        if size is not None and size > 1:
            raise Skipped(f"{name} parallelism")
    needed: dict[str, Any] = {
        **{f"model.{name}": getattr(model, name) for name in ("layers", "hidden", "heads", "ffn", "vocab", "mlp")},
        **{f"plan.{name}": getattr(plan, name) for name in ("replicate", "shard", "tensor", "seq_len", "micro_batch")},
        "plan.storage_dtype": plan.storage_dtype,
        "plan.compute_dtype": plan.compute_dtype,
        "cluster.num_gpus": row.cluster.num_gpus,
    }
    missing = [name for name, value in needed.items() if value is None]
    if missing:
        raise Skipped(f"not stated: {', '.join(missing)}")
    if plan.storage_dtype == "fp8":
        raise Skipped("weights stored in fp8")


def _model(row: MeasuredRow) -> ModelSpec:
    """Return the shape, by the class of transformers that comes nearest: the model's own, where there is a formula and,
    for adapters, where its linear layers take them."""
    spec = _of_dimensions(row, row.model.name)
    if spec.model_type not in FAMILIES or (row.lora is not None and not _takes_adapters(spec)):
        spec = _of_dimensions(row, None).model_copy(update={"name": row.model.name})
    return spec.model_copy(update={"config": {**spec.config, **_as_rows_mean(spec.config)}})


def _takes_adapters(spec: ModelSpec) -> bool:
    """Whether blocks have plain linear layers; classes with linear layers of their own take no adapter."""
    return any(module.kind in LINEAR for kind in spec.kinds for module in kind.modules)


def _of_dimensions(row: MeasuredRow, name: str | None) -> ModelSpec:
    """Return a model of a row's sizes; `name` may mean a class that knows more than sizes say."""
    given, learned = row.model, bool(row.model.learned_positions)
    return model_from_dimensions(
        layers=stated(given.layers),
        hidden=stated(given.hidden),
        heads=stated(given.heads),
        kv_heads=given.kv_heads,
        head_dim=given.head_dim,
        ffn=stated(given.ffn),
        vocab=stated(given.vocab),
        mlp=stated(given.mlp),
        tied=bool(given.tied_embeddings),
        learned_positions=learned,
        max_positions=row.plan.seq_len if learned else None,
        name=name,
    )


def _as_rows_mean(config: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a stand-in's configuration that rows mean otherwise than its class has them by default.

    No dropout, which only old classes have. GELU as one kernel: `gelu_new` is a formula of several operations.
    """
    older = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0} if "n_embd" in config else {}
    off = {name: 0.0 for name in config if name.endswith(("pdrop", "dropout"))}
    names = ("activation_function", "hidden_act", "hidden_activation")
    acts = {name: "gelu_pytorch_tanh" for name in names if config.get(name) == "gelu_new"}
    if older and "activation_function" not in config:
        acts = {"activation_function": "gelu_pytorch_tanh"}
    return {**older, **off, **acts}


def _cluster(row: MeasuredRow) -> Cluster:
    """Return the machines; a run may use a part of one. What a card holds that the catalogue does not know is
    UNKNOWN_BYTES."""
    gpus, per_node = row.cluster.num_gpus or 1, row.cluster.gpus_per_node or 8
    per_node = min(gpus, per_node)
    if gpus % per_node:
        per_node = gcd(gpus, per_node)
    name = row.cluster.gpu or "not stated"
    try:
        card = find_gpu(name)
    except BadInput:
        card = Gpu(name=name, usable=Sourced(bytes=UNKNOWN_BYTES, source="not in the catalogue"))
    return Cluster(
        name=f"{gpus // per_node}x{per_node}x{name}",
        nodes=gpus // per_node,
        per_node=per_node,
        gpu=card,
        network=row.cluster.network,
    )


def _lora(given: MeasuredLora | None, model: ModelSpec) -> Lora | None:
    """Return the adapters. `lm_head` as a target has an adapter; `...:full` modules train whole."""
    if given is None:
        return None
    whole = [name.removesuffix(":full") for name in given.targets if name.endswith(":full")]
    names = {"embed_tokens": model.embedding.rpartition(".")[2], "lm_head": model.head.rpartition(".")[2]}
    saved = tuple(names.get(name, name) for name in whole)
    rank = given.rank or RANK
    targets: Any = "all_linear"
    if given.targets == "attention":
        targets = _suffixes(("attention",), model)
    elif isinstance(given.targets, list):
        targets = _suffixes(tuple(name for name in given.targets if not name.endswith(":full")), model)
    return Lora(rank=rank, alpha=2.0 * rank, dropout=LORA_DROPOUT, targets=targets, modules_to_save=saved)


def _suffixes(names: tuple[str, ...], model: ModelSpec) -> tuple[str, ...]:
    """Return the suffixes of the model's own modules that do the parts `names`."""
    linear = {t.name.rpartition(".")[0] for kind in model.kinds for t in kind.tensors if len(t.shape) == 2}
    wanted = [suffix for name in names for part in _PARTS.get(name, (name,)) for suffix in _PARTS.get(part, (part,))]
    found = [s for s in dict.fromkeys(wanted) if any(name == s or name.endswith(f".{s}") for name in linear)]
    if "lm_head" in names:
        found.append(model.head.rpartition(".")[2])
    if not found:
        raise Skipped(f"no module of the stand-in class {model.model_type} does {', '.join(names)}")
    return tuple(found)
