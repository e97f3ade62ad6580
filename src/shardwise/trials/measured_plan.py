"""The layout of a measured row, and the program that ran it.

What a row does not say is taken as programs of its kind have it; the rules are here, and read nothing but fields.
"""

from __future__ import annotations

from typing import Literal, TypeVar

from shardwise.spec.layout import LossHead, Mesh, Offload, OptimizerKind, Prefetch, ReduceScatter, StrategyName
from shardwise.spec.model_spec import ModelSpec
from shardwise.spec.plan import Dtypes, Plan
from shardwise.spec.runtime import Runtime, Sharding
from shardwise.spec.strict import Dtype
from shardwise.trials.measured import MeasuredDtype, MeasuredPlan, MeasuredRow

T = TypeVar("T")

LOGITS_AS_THEY_ARE = ("gpt2", "gpt_bigcode", "gpt_neox", "opt", "bloom", "falcon", "mpt")
"""Classes whose loss, in transformers 4, takes logits in the dtype of the computation; others turn them into fp32."""

_CHECKPOINTING = {"none": "none", "full": "full", "selective_op": "selective", "every_2": "every_2", "unknown": "none"}

_ATTENTION: dict[str, Literal["sdpa", "eager", "flash_attention_2"]] = {
    "flash": "flash_attention_2",
    "eager": "eager",
    "sdpa": "sdpa",
    "unknown": "sdpa",
}


def stated(value: T | None) -> T:
    """Return a value that `cases` has seen to be stated."""
    assert value is not None
    return value


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


def runtime_of(row: MeasuredRow, model: ModelSpec) -> Runtime:
    """Return the program.

    - A program that calls FlashAttention or fused losses itself takes fused norms too; compilers make them; with FSDP2
      came torch's own, which is one operation.
    - Checkpointing of transformers' Trainer (FlashAttention, one process or FSDP1) enters autograd again; programs of
      PyTorch's own parts do not.
    - Trained weights that rest in another dtype than the computation's need autocast, where FSDP does not cast them;
      so do quantised bases under that Trainer.
    - Selective checkpointing per operation, and a loss over parts of the vocabulary, are torchtitan's.
    - MPT's own code calls FlashAttention's first version, in Triton; programs of that age and somewhat younger predate
      torch's choice of cuDNN.
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
        fused_norms=plan.compile or kernels or sharding == "fsdp2",
        fused_loss=plan.loss == "fused",
        compiled=plan.compile,
        fp8_linears=plan.compute_dtype == "fp8",
        attention_kernel="triton" if plan.attention == "flash" and _is_mpt(row.model.name) else "flash",
        reentrant=full and trainer,
        every_second_matmul=plan.activation_checkpointing == "selective_op",
        upcasts_logits=model.model_type not in LOGITS_AS_THEY_ARE,
        drops_logits=True,
        keeps_cache=model.model_type == "gpt_bigcode" and trainer,
        parallel_loss=sharding == "fsdp2" and stated(plan.tensor) > 1,
        autocast=mixed or (base is not None and trainer),
        base_quantization=base,
        optimizer_bytes=plan.optimizer_state_bytes_per_param,
        step_in_backward=plan.optimizer.endswith("_in_backward"),
    )


def _is_mpt(name: str) -> bool:
    """Whether a model is one of MosaicML's, whose class no stand-in has: `mosaicml/mpt-7b`."""
    return name.rpartition("/")[2].lower().startswith("mpt-")


def plan_of(row: MeasuredRow, runtime: Runtime) -> Plan:
    """Return the layout.

    Programs with FSDP2 are of a time that updates by fused kernels, older ones by foreach operations.
    """
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
            replicate=stated(given.replicate),
            shard=stated(given.shard),
            tensor=stated(given.tensor),
            sequence_parallel=stated(given.tensor) > 1,
        ),
        reshard_after_forward=reshards,
        prefetch=Prefetch(forward=0, backward=1, async_all_gather=True),
        reduce_scatter=ReduceScatter(buffers=1, separate_group=False, asynchronous=True),
        dtypes=_dtypes(row),
        activation_checkpointing=_CHECKPOINTING[given.activation_checkpointing],
        offload=_offload(given),
        attention=_ATTENTION[given.attention],
        micro_batch=stated(given.micro_batch),
        accumulation_steps=given.accumulation or 1,
        optimizer=optimizer,
        optimizer_implementation="fused" if runtime.sharding == "fsdp2" else "foreach",
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
        output="fp32" if plan.loss == "chunked" else compute,
        buffer=None,
        loss_scaling=compute == "fp16",
    )


def _dtype(name: MeasuredDtype | None) -> Dtype:
    """Return the dtype in memory: fp8 is what matrix products read, what they make is bf16."""
    return "bf16" if name is None or name == "fp8" else name
