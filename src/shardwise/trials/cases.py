"""From a measured row to what the instruments take: a workload, a plan, a cluster and the program that ran it.

What a row does not say is taken as programs of its kind have it; the rules are here, one function each, and read
nothing but the row's fields: never its id, its source or its notes.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd
from typing import Any, Literal, TypeVar

from shardwise.catalogue.clusters import find_gpu
from shardwise.catalogue.dimensions import model_from_dimensions
from shardwise.predict.blocks.families import FAMILIES
from shardwise.spec.cluster import Cluster
from shardwise.spec.layout import LossHead, Mesh, Offload, OptimizerKind, Prefetch, ReduceScatter, StrategyName
from shardwise.spec.method import Lora
from shardwise.spec.model_spec import ModelSpec
from shardwise.spec.plan import Dtypes, Plan
from shardwise.spec.problems import BadInput
from shardwise.spec.runtime import Runtime, Sharding
from shardwise.spec.strict import Dtype
from shardwise.spec.workload import Workload
from shardwise.trials.measured import MeasuredDtype, MeasuredLora, MeasuredPlan, MeasuredRow

T = TypeVar("T")

LORA_DROPOUT = 0.05
"""Rows do not say it; published recipes have 0.05 or 0.1, and any is the same in memory."""

RANK = 16
"""Rank of adapters where it is not stated."""

LOGITS_AS_THEY_ARE = ("gpt2", "gpt_bigcode", "gpt_neox", "opt", "bloom", "falcon", "mpt")
"""Classes whose loss, in transformers 4, takes logits in the dtype of the computation; others turn them into fp32."""

_CHECKPOINTING = {"none": "none", "full": "full", "selective_op": "selective", "every_2": "every_2", "unknown": "none"}

_ATTENTION: dict[str, Literal["sdpa", "eager", "flash_attention_2"]] = {
    "flash": "flash_attention_2",
    "eager": "eager",
    "sdpa": "sdpa",
    "unknown": "sdpa",
}

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
    runtime = _runtime(row, model)
    return Case(
        workload=Workload(model=model, seq_len=_stated(plan.seq_len), lora=lora, held_out=False),
        plan=_plan(row, runtime),
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


def _stated(value: T | None) -> T:
    """Return a value that `_refuse` has seen to be stated."""
    assert value is not None
    return value


def _model(row: MeasuredRow) -> ModelSpec:
    """Return the shape, by the class of transformers that comes nearest: the model's own, where there is a formula."""
    spec = _of_dimensions(row, row.model.name)
    if spec.model_type not in FAMILIES:
        spec = _of_dimensions(row, None).model_copy(update={"name": row.model.name})
    return spec.model_copy(update={"config": {**spec.config, **_as_rows_mean(spec.config)}})


def _of_dimensions(row: MeasuredRow, name: str | None) -> ModelSpec:
    """Return a model of a row's sizes; `name` may mean a class that knows more than sizes say."""
    given, learned = row.model, bool(row.model.learned_positions)
    return model_from_dimensions(
        layers=_stated(given.layers),
        hidden=_stated(given.hidden),
        heads=_stated(given.heads),
        kv_heads=given.kv_heads,
        head_dim=given.head_dim,
        ffn=_stated(given.ffn),
        vocab=_stated(given.vocab),
        mlp=_stated(given.mlp),
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
    """Return the machines; a card that is not known takes the place of any, and its row has no feasibility."""
    gpus, per_node = row.cluster.num_gpus or 1, row.cluster.gpus_per_node or 8
    per_node = min(gpus, per_node)
    if gpus % per_node:
        per_node = gcd(gpus, per_node)
    name = row.cluster.gpu
    if name is None:
        raise Skipped("not stated: cluster.gpu")
    return Cluster(
        name=f"{gpus // per_node}x{per_node}x{name}", nodes=gpus // per_node, per_node=per_node, gpu=find_gpu(name)
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


def _sharding(plan: MeasuredPlan) -> Sharding:
    """Return how the program shards.

    DeepSpeed's ZeRO-3 gathers whole modules as FSDP1 does; ZeRO-2 keeps weights whole. FSDP1 without sharding gathers
    nothing.
    """
    if plan.strategy in ("NO_SHARD", "ZERO2"):
        return "none"
    if plan.fsdp_version == 1 or plan.strategy == "ZERO3":
        return "fsdp1"
    return "fsdp2"


def _runtime(row: MeasuredRow, model: ModelSpec) -> Runtime:
    """Return the program.

    - A program that calls FlashAttention or fused losses itself takes fused norms too; compilers make them.
    - Checkpointing of transformers' Trainer (FlashAttention, one process or FSDP1) enters autograd again; programs of
      PyTorch's own parts do not.
    - Trained weights that rest in another dtype than the computation's need autocast, where FSDP does not cast them;
      so do quantised bases under that Trainer.
    - Selective checkpointing per operation, and a loss over parts of the vocabulary, are torchtitan's.
    """
    plan, lora = row.plan, row.lora
    sharding = _sharding(plan)
    full = plan.activation_checkpointing == "full"
    trainer = plan.attention == "flash" and sharding != "fsdp2"
    kernels = plan.loss == "fused" or (plan.loss == "chunked" and plan.attention == "flash")
    base = lora.base_quantization if lora else None
    adapters = _dtype(lora.adapter_dtype) if lora and lora.adapter_dtype else _dtype(plan.compute_dtype)
    mixed = adapters != _dtype(plan.compute_dtype) or (sharding == "none" and plan.storage_dtype == "fp32")
    return Runtime(
        sharding=sharding,
        fused_norms=plan.compile or kernels,
        fused_loss=plan.loss == "fused",
        compiled=plan.compile,
        reentrant=full and trainer,
        every_second_matmul=plan.activation_checkpointing == "selective_op",
        upcasts_logits=model.model_type not in LOGITS_AS_THEY_ARE,
        drops_logits=True,
        keeps_cache=model.model_type == "gpt_bigcode" and trainer,
        parallel_loss=sharding == "fsdp2" and _stated(plan.tensor) > 1,
        autocast=mixed or (base is not None and trainer),
        base_quantization=base,
        optimizer_bytes=plan.optimizer_state_bytes_per_param,
        step_in_backward=plan.optimizer.endswith("_in_backward"),
    )


def _plan(row: MeasuredRow, runtime: Runtime) -> Plan:
    given = row.plan
    strategy: StrategyName
    if given.strategy in ("FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD", "NO_SHARD"):
        strategy = given.strategy
    else:
        strategy = "FULL_SHARD" if given.strategy == "ZERO3" else "SHARD_GRAD_OP"
    reshards = given.reshard_after_forward
    if reshards is None:
        reshards = strategy in ("FULL_SHARD", "HYBRID_SHARD")
    optimizer: OptimizerKind = "adamw_8bit" if "8bit" in given.optimizer else "adamw"
    return Plan(
        strategy=strategy,
        mesh=Mesh(
            replicate=_stated(given.replicate),
            shard=_stated(given.shard),
            tensor=_stated(given.tensor),
            sequence_parallel=_stated(given.tensor) > 1,
        ),
        reshard_after_forward=reshards,
        prefetch=Prefetch(forward=0, backward=1, async_all_gather=True),
        reduce_scatter=ReduceScatter(buffers=1, separate_group=False, asynchronous=True),
        dtypes=_dtypes(row),
        activation_checkpointing=_CHECKPOINTING[given.activation_checkpointing],
        offload=_offload(given),
        attention=_ATTENTION[given.attention],
        micro_batch=_stated(given.micro_batch),
        accumulation_steps=given.accumulation or 1,
        optimizer=optimizer,
        loss_head=_loss_head(given),
        compile=given.compile,
    )


def _loss_head(plan: MeasuredPlan) -> LossHead:
    """Return how logits become a loss; `fused` rows have whole logits, and their kernel is the runtime's."""
    if plan.loss != "chunked":
        return "eager"
    return "fused" if plan.attention == "flash" else "chunked"


def _offload(plan: MeasuredPlan) -> Offload:
    """Return what lies on the host; paged optimizer states are in memory that CUDA pages, beside torch's allocator."""
    both = plan.offload == "params_optimizer"
    return Offload(
        parameters=both,
        optimizer=both or plan.offload == "optimizer" or "paged" in plan.optimizer,
        activations=plan.offload == "activations",
    )


def _dtypes(row: MeasuredRow) -> Dtypes:
    plan = row.plan
    storage, compute = _dtype(plan.storage_dtype), _dtype(plan.compute_dtype)
    trained = _dtype(row.lora.adapter_dtype) if row.lora and row.lora.adapter_dtype else storage
    trains_16 = trained in ("bf16", "fp16")
    states = plan.optimizer_state_bytes_per_param
    return Dtypes(
        frozen_storage=None if row.lora is None else storage,
        trained_storage="bf16" if trains_16 else "fp32",
        optimizer_state="bf16" if (states == 4 or (states is None and trains_16)) else "fp32",
        param=compute,
        reduce=compute if plan.reduce_dtype is None else _dtype(plan.reduce_dtype),
        output=compute,
        buffer=None,
        loss_scaling=compute == "fp16",
    )


def _dtype(name: MeasuredDtype | None) -> Dtype:
    """Return the dtype in memory: fp8 is what matrix products read, what they make is bf16."""
    return "bf16" if name is None or name == "fp8" else name
