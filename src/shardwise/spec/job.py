"""The Job: what the user asks for, after every spelling has been brought to one form.

`spec.reader` turns YAML and overrides into this. Each field is typed, documented and refused when wrong; what a field
does not say is decided by the planner and lands in the Plan.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from shardwise.spec.cluster import is_cluster_file, split_cluster
from shardwise.spec.layout import (
    AccumulationMode,
    LossHead,
    MeshChoice,
    Offload,
    OptimizerImplementation,
    OptimizerKind,
    PrefetchChoice,
    ReduceScatterChoice,
    StrategyName,
    Units,
)
from shardwise.spec.method import Lora
from shardwise.spec.strict import Dtype, PositiveInt, Strict

DETECT = "detect"
"""Every GPU of this machine, else CPU processes."""


def _cluster_text(text: str) -> str:
    if text != DETECT and not is_cluster_file(text) and not split_cluster(text).plausible:
        raise ValueError("neither detect nor the form of a cluster's name, nor a file")
    return text


class ModelChoice(Strict):
    """Which model is trained, and how its attention and weights are loaded."""

    path: str
    """Folder with `config.json` and safetensors, or a hub id (`org/name`)."""
    revision: str | None = None
    """Branch, tag or commit on the hub."""
    attention: Literal["sdpa", "eager", "flash_attention_2"] | None = None
    """Attention implementation of transformers; default: its own choice for the model, sdpa where there is one."""
    dtype: Dtype | None = None
    """Storage dtype of frozen weights; default: the checkpoint's own. What trains is stored in
    `mixed_precision.storage_dtype`."""


class DataChoice(Strict):
    """Which rows are trained on, and which are held out."""

    path: str
    """A `.json` or `.jsonl` file."""
    format: Literal["messages", "alpaca", "prompt_completion", "text"] | None = None
    """How a row is read; default: recognised from the first row's keys, and said."""
    held_out: str | Annotated[float, Field(gt=0, lt=1)] | None = None
    """Rows never trained on: a second file, or a fraction of `path` (split by prompt with `seed`)."""


class FsdpChoice(Strict):
    """How the model is sharded."""

    strategy: StrategyName | Literal["auto"] = "auto"
    """PyTorch's strategy name, or `auto`: chosen for the model and the method, with the reason printed."""
    reshard_after_forward: bool | Annotated[int, Field(ge=2)] | None = None
    """Free a unit's gathered weights after its forward, or (a number) keep them sharded over groups of that many ranks;
    must agree with the strategy, which sets it by default."""


class PrecisionChoice(Strict):
    """Dtype of each role during training."""

    param_dtype: Dtype = "fp32"
    """Dtype in which blocks are gathered and computed."""
    reduce_dtype: Dtype = "fp32"
    """Dtype of the gradient reduction."""
    storage_dtype: Literal["fp32", "bf16"] = "fp32"
    """Dtype in which what trains is stored, with its gradients: bf16 halves them and loses small updates."""
    output_dtype: Dtype = "fp32"
    """Dtype of the logits."""
    buffer_dtype: Dtype | None = None
    """Dtype of floating-point buffers other than rotary tables; default: left as loaded."""


class CheckpointChoice(Strict):
    """When the run is saved."""

    every: Annotated[int, Field(ge=0)] = 0
    """Optimizer steps between checkpoints; 0: only at the end and when stopped."""
    keep: PositiveInt = 2
    """How many of the newest checkpoints stay."""


class LogChoice(Strict):
    """What is printed and recorded while training."""

    every: PositiveInt = 1
    """Optimizer steps between lines of `metrics.jsonl`."""
    evaluate_every: Annotated[int, Field(ge=0)] = 0
    """Optimizer steps between held-out evaluations; 0: before the first step and after the last."""
    tensorboard: bool = True
    """Write TensorBoard events into the run folder."""


class Job(Strict):
    """Everything the user asks for. See `docs/configuration.md`."""

    model: ModelChoice
    """The model: a folder, a hub id, or `{path, revision, attention, dtype}`."""
    data: DataChoice | None = None
    """The data: a file, or `{path, format, held_out}`. Only `shardwise plan` does without."""
    output: str | None = None
    """Run folder; default: `runs/<name of the configuration file>`, numbered when taken."""

    use_lora: bool = False
    """Train low-rank adapters (PEFT LoRA) and keep the base frozen; otherwise every weight is trained."""
    lora_rank: PositiveInt = 16
    """Rank of the adapters."""
    lora_alpha: Annotated[float, Field(gt=0)] | None = None
    """Scale: the adapter's output is multiplied by `lora_alpha / lora_rank`; default: twice the rank."""
    lora_dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Dropout before each adapter."""
    lora_targets: Literal["all_linear"] | Annotated[list[str], Field(min_length=1)] = "all_linear"
    """Suffixes of module names that get an adapter, or `all_linear`: every linear layer but the head
    (experts stored as one tensor and routers get none)."""
    lora_modules_to_save: list[str] = Field(default=[])
    """Modules trained whole beside the adapters (PEFT's `modules_to_save`), by the last parts of their names, such as
    [lm_head], [embed_tokens] or [norm]; all_linear leaves them out. PEFT keeps the frozen original beside each, which
    takes its memory too."""

    seq_len: Annotated[int, Field(ge=2)] = 2048
    """Longest row in tokens; longer rows are cut, and counted."""
    global_batch: PositiveInt | None = None
    """Rows per optimizer step over all ranks; default: 8 per rank."""
    micro_batch: PositiveInt | None = None
    """Rows per rank per forward; default: 1, the rest is accumulated."""
    steps: PositiveInt | None = None
    """Optimizer steps; excludes `epochs`."""
    epochs: Annotated[float, Field(gt=0)] | None = None
    """Passes over the training rows; default 1 when `steps` is not given either."""
    learning_rate: Annotated[float, Field(gt=0)] | None = None
    """Peak learning rate; default: 2e-4 for LoRA, 1e-5 for full fine-tuning."""
    schedule: Literal["constant", "linear", "cosine"] = "cosine"
    """Learning rate after warm-up, counted in optimizer steps: flat, or down to zero at the last step."""
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Optimizer steps of linear warm-up."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """Decoupled decay (with sgd: added to the gradient), on weights of two or more dimensions."""
    max_grad_norm: Annotated[float, Field(gt=0)] | None = 1.0
    """Clip to this global gradient norm; null: no clipping (the norm is recorded all the same)."""
    optimizer: OptimizerKind = "adamw"
    """`adamw`, `adamw_8bit` (torchao), or `sgd`."""
    optimizer_implementation: OptimizerImplementation | None = None
    """PyTorch's implementation: `fused`, `foreach` or `for_loop`; default: fused on GPUs, foreach elsewhere."""
    optimizer_state_dtype: Literal["fp32", "bf16"] | None = None
    """Dtype in which optimizer states are kept between steps; default: that of what trains."""
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Momentum of sgd."""
    seed: Annotated[int, Field(ge=0)] = 0
    """Seed of data order, adapter initialisation and dropout."""

    fsdp: FsdpChoice = FsdpChoice()
    """Sharding: `auto`, a strategy, a list or string of options, or a mapping."""
    mixed_precision: PrecisionChoice = PrecisionChoice()
    """`fp32`, `bf16`, `fp16`, or `{param_dtype, reduce_dtype, output_dtype, buffer_dtype}`."""
    activation_checkpointing: (
        Literal["none", "full", "selective"] | Annotated[str, Field(pattern=r"^every_[1-9]\d*$")]
    ) = "none"
    """Recompute activations in backward: true or `full` for every block, `every_2` for every second one, `selective`
    for all but attention and matrix products, or false."""
    mesh: MeshChoice = MeshChoice()
    """`{replicate, shard, tensor, sequence_parallel}`."""
    units: Units = Units()
    """`{wrap, embedding, head}`."""
    prefetch: PrefetchChoice = PrefetchChoice()
    """`{forward, backward, async_all_gather}`, or one depth for both."""
    reduce_scatter: ReduceScatterChoice = ReduceScatterChoice()
    """`{buffers, separate_group, asynchronous}`."""
    offload: Offload = Offload()
    """`none`, `optimizer`, `parameters`, `activations`, a list of them, or a mapping."""
    accumulation: AccumulationMode = "reduce_each"
    """When gradients of several micro-batches are reduced."""
    loss_head: LossHead = "eager"
    """How logits become a loss."""
    loss_chunk: PositiveInt = 1024
    """Tokens per piece of a `chunked` loss head."""
    compile: bool = False
    """Compile every block with torch.compile."""
    self_checks: bool = True
    """Compare ranks while training: steps, norms, adapters' gradients, replicas' weights at checkpoints."""
    cluster: Annotated[str, AfterValidator(_cluster_text)] = DETECT
    """Where it runs: `detect` (all GPUs of this machine, else 2 CPU processes), cards of the catalogue (`8xA10`,
    `2x8xH100-SXM-80GB ib-8x400`), a cloud's machines (`2xp5.48xlarge`), `<n>xcpu`, or a file (`cluster.yaml`). Named
    cards are what plans are made for; training checks that they are here."""

    checkpoint: CheckpointChoice = CheckpointChoice()
    """`{every, keep}`, or a number of steps."""
    resume: str = "never"
    """`never`, `auto` (the newest usable checkpoint of `output`), or a checkpoint folder."""
    log: LogChoice = LogChoice()
    """`{every, evaluate_every, tensorboard}`."""
    sample: str | None = None
    """A question that the base model and the trained model answer at the end of the run, for a person to read."""

    @property
    def lora(self) -> Lora | None:
        """The adapters; None when every weight trains."""
        if not self.use_lora:
            return None
        return Lora(
            rank=self.lora_rank,
            alpha=float(2 * self.lora_rank if self.lora_alpha is None else self.lora_alpha),
            dropout=self.lora_dropout,
            targets=self.lora_targets if self.lora_targets == "all_linear" else tuple(self.lora_targets),
            modules_to_save=tuple(self.lora_modules_to_save),
        )
