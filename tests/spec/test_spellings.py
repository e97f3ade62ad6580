"""Every accepted spelling gives the Job that it should."""

from __future__ import annotations

import pytest

from shardwise.spec import not_built
from shardwise.spec.job import (
    CheckpointChoice,
    DataChoice,
    FsdpChoice,
    Job,
    LogChoice,
    ModelChoice,
    PrecisionChoice,
)
from shardwise.spec.keys import OTHER_NAMES, canonical
from shardwise.spec.reader import read_job
from shardwise.spec.wording import FIELDS, SECTIONS

NEEDED = "model: m\ndata: d.jsonl\n"


def job_of(text: str, *overrides: str) -> Job:
    return read_job(None, overrides, text=NEEDED + text)


FP16 = PrecisionChoice(param_dtype="fp16")
BF16 = PrecisionChoice(param_dtype="bf16")


@pytest.mark.parametrize(
    ("text", "field", "value"),
    [
        ("fsdp: auto", "fsdp", FsdpChoice()),
        ("fsdp: {}", "fsdp", FsdpChoice()),
        ("fsdp: full_shard auto_wrap", "fsdp", FsdpChoice(strategy="FULL_SHARD")),
        ("fsdp: auto_wrap,shard_grad_op", "fsdp", FsdpChoice(strategy="SHARD_GRAD_OP")),
        ("fsdp: [Full_Shard, auto_wrap]", "fsdp", FsdpChoice(strategy="FULL_SHARD")),
        ("fsdp: ['zero3 auto_wrap', FULL_SHARD]", "fsdp", FsdpChoice(strategy="FULL_SHARD")),
        ("fsdp: auto_wrap", "fsdp", FsdpChoice()),
        ("fsdp: DDP", "fsdp", FsdpChoice(strategy="NO_SHARD")),
        ("fsdp: ZERO2", "fsdp", FsdpChoice(strategy="SHARD_GRAD_OP")),
        ("fsdp: ZeRO-3", "fsdp", FsdpChoice(strategy="FULL_SHARD")),
        ("fsdp: ShardingStrategy.NO_SHARD", "fsdp", FsdpChoice(strategy="NO_SHARD")),
        ("fsdp: {sharding_strategy: full_shard}", "fsdp", FsdpChoice(strategy="FULL_SHARD")),
        ("fsdp: {strategy: zero2, reshard_after_forward: false}", "fsdp",
         FsdpChoice(strategy="SHARD_GRAD_OP", reshard_after_forward=False)),
        ("fsdp: {strategy: FULL_SHARD, cpu_offload: false, forward_prefetch: false}", "fsdp",
         FsdpChoice(strategy="FULL_SHARD")),
        ("mixed_precision: fp16", "mixed_precision", FP16),
        ("mixed_precision: bf16", "mixed_precision", BF16),
        ("mixed_precision: fp32", "mixed_precision", PrecisionChoice()),
        ("mixed_precision: torch.bfloat16", "mixed_precision", BF16),
        ("mixed_precision: half", "mixed_precision", FP16),
        ("mixed_precision: {param_dtype: float16, reduce_dtype: torch.float16}", "mixed_precision",
         PrecisionChoice(param_dtype="fp16", reduce_dtype="fp16")),
        ("mixed_precision: {reduce_dtype: bf16, buffer_dtype: float32}", "mixed_precision",
         PrecisionChoice(reduce_dtype="bf16", buffer_dtype="fp32")),
        ("bf16: true", "mixed_precision", BF16),
        ("fp16: true\nbf16: false", "mixed_precision", FP16),
        ("fp16: false\nbf16: false", "mixed_precision", PrecisionChoice()),
        ("bf16: true\nmixed_precision: bf16", "mixed_precision", BF16),
        ("activation_checkpointing: false", "activation_checkpointing", "none"),
        ("activation_checkpointing: every_2", "activation_checkpointing", "every_2"),
        ("gradient_checkpointing: true", "activation_checkpointing", "full"),
        ("gradient_checkpointing: true\nactivation_checkpointing: full", "activation_checkpointing", "full"),
        ("train: {activation_checkpointing: true}", "activation_checkpointing", "full"),
        ("train: {fsdp: {strategy: no_shard}}", "fsdp", FsdpChoice(strategy="NO_SHARD")),
        ("train: {lr: 1e-4}\nlearning_rate: 0.0001", "learning_rate", 1e-4),
        ("per_device_train_batch_size: 4", "micro_batch", 4),
        ("max_steps: 7", "steps", 7),
        ("num_train_epochs: 3", "epochs", 3.0),
        ("lr: 1e-4", "learning_rate", 1e-4),
        ("lr_scheduler_type: linear", "schedule", "linear"),
        ("max_seq_length: 512", "seq_len", 512),
        ("max_length: 512", "seq_len", 512),
        ("output_dir: out", "output", "out"),
        ("use_lora: true\nlora_r: 8", "lora_rank", 8),
        ("use_lora: true\nlora_alpha: 8", "lora_alpha", 8.0),
        ("use_lora: true\nlora_targets: all-linear", "lora_targets", "all_linear"),
        ("use_lora: true\nlora_targets: [q_proj, v_proj]", "lora_targets", ["q_proj", "v_proj"]),
        ("save_steps: 50", "checkpoint", CheckpointChoice(every=50)),
        ("save_steps: 50\nsave_total_limit: 3", "checkpoint", CheckpointChoice(every=50, keep=3)),
        ("checkpoint: 50", "checkpoint", CheckpointChoice(every=50)),
        ("checkpoint: 0", "checkpoint", CheckpointChoice()),
        ("checkpoint: {keep: 5}\nsave_steps: 9", "checkpoint", CheckpointChoice(every=9, keep=5)),
        ("logging_steps: 10\neval_steps: 20", "log", LogChoice(every=10, evaluate_every=20)),
        ("log.every: 3", "log", LogChoice(every=3)),
        ("validation_file: v.jsonl", "data", DataChoice(path="d.jsonl", held_out="v.jsonl")),
        ("data.held_out: 0.1", "data", DataChoice(path="d.jsonl", held_out=0.1)),
        ("model.torch_dtype: bfloat16\nuse_lora: true", "model", ModelChoice(path="m", dtype="bf16")),
        ("max_grad_norm: null", "max_grad_norm", None),
        ("max_grad_norm: 1", "max_grad_norm", 1.0),
        ("steps: null\nepochs: 2", "epochs", 2.0),
        ("optim: adamw_torch", "optimizer", "adamw"),
        ("sample: no", "sample", "no"),
        ("cluster: 4xcpu", "cluster", "4xcpu"),
        ("cluster: 8xA10", "cluster", "8xA10"),
        ("cluster: 2x8xH100-SXM-80GB ib-8x400", "cluster", "2x8xH100-SXM-80GB ib-8x400"),
        ("cluster: 4 x NVIDIA A100 80GB PCIe", "cluster", "4 x NVIDIA A100 80GB PCIe"),
        ("cluster: '4090'", "cluster", "4090"),
        ("quantization: none\npacking: false\nplan: null\non_oom: none", "steps", None),
    ],
)  # fmt: skip
def test_spellings(text, field, value):
    assert getattr(job_of(text), field) == value


@pytest.mark.parametrize("other", [name for name in OTHER_NAMES if "." not in name and name not in ("fp16", "bf16")])
def test_other_names_lead_to_something(other):
    target = canonical(other)
    assert target in FIELDS or target in SECTIONS or target in not_built.KEYS
