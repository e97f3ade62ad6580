"""Overrides replace what the file says, under any name."""

from __future__ import annotations

import pytest

from shardwise.spec.job import (
    CheckpointChoice,
    FsdpChoice,
    Job,
    ModelChoice,
    PrecisionChoice,
)
from shardwise.spec.problems import BadInput
from shardwise.spec.reader import read_job, read_job_dict

NEEDED = "model: m\ndata: d.jsonl\n"
BF16 = PrecisionChoice(param_dtype="bf16")


def job_of(text: str, *overrides: str) -> Job:
    return read_job(None, overrides, text=NEEDED + text)


def problems_of(text: str, *overrides: str) -> list:
    with pytest.raises(BadInput) as caught:
        read_job(None, overrides, text=text)
    return list(caught.value.problems)


@pytest.mark.parametrize(
    ("text", "override", "field", "value"),
    [
        ("", "micro_batch=2", "micro_batch", 2),
        ("per_device_train_batch_size: 4", "micro_batch=2", "micro_batch", 2),
        ("micro_batch: 4", "per_device_train_batch_size=2", "micro_batch", 2),
        ("train: {lr: 1}", "learning_rate=1e-4", "learning_rate", 1e-4),
        ("lr: nonsense", "lr=1e-4", "learning_rate", 1e-4),
        ("", "use_lora=true", "use_lora", True),
        ("use_lora: true", "lora_targets=[q_proj,v_proj]", "lora_targets", ["q_proj", "v_proj"]),
        ("", "model.path=n", "model", ModelChoice(path="n")),
        ("model.attention: eager", "model.path=n", "model", ModelChoice(path="n", attention="eager")),
        ("model.attention: eager", "model=n", "model", ModelChoice(path="n")),
        ("use_lora: true", "model={path: n, dtype: bf16}", "model", ModelChoice(path="n", dtype="bf16")),
        ("fsdp: [zero2]", "fsdp=full_shard", "fsdp", FsdpChoice(strategy="FULL_SHARD")),
        ("fsdp: {strategy: hybrid_shard}", "fsdp=full_shard", "fsdp", FsdpChoice(strategy="FULL_SHARD")),
        ("fsdp: full_shard", "fsdp.sharding_strategy=no_shard", "fsdp", FsdpChoice(strategy="NO_SHARD")),
        ("fsdp: full_shard", "fsdp.reshard_after_forward=true", "fsdp",
         FsdpChoice(strategy="FULL_SHARD", reshard_after_forward=True)),
        ("mixed_precision: fp16", "mixed_precision.reduce_dtype=fp16", "mixed_precision",
         PrecisionChoice(param_dtype="fp16", reduce_dtype="fp16")),
        ("fp16: true", "bf16=true", "mixed_precision", BF16),
        ("fp16: true", "fp16=false", "mixed_precision", PrecisionChoice()),
        ("save_steps: 5", "checkpoint.every=6", "checkpoint", CheckpointChoice(every=6)),
        ("checkpoint: 5", "save_steps=6", "checkpoint", CheckpointChoice(every=6)),
        ("checkpoint: {every: 5, keep: 9}", "checkpoint.every=6", "checkpoint", CheckpointChoice(every=6, keep=9)),
        ("quantization: nf4", "quantization=none", "steps", None),
        ("sample: x", "sample=What: is # this?", "sample", "What: is # this?"),
        ("sample: x", "sample=a=b", "sample", "a=b"),
        ("sample: x", "sample=", "sample", None),
        ("seed: 5", "seed=null", "seed", 0),
        ("max_grad_norm: 2", "max_grad_norm=null", "max_grad_norm", None),
    ],
)  # fmt: skip
def test_an_override_replaces_what_the_file_says(text, override, field, value):
    assert getattr(job_of(text, override), field) == value


def test_later_overrides_win_and_null_takes_a_key_out():
    assert job_of("", "steps=1", "max_steps=2").steps == 2
    job = job_of(
        "steps: 100\nuse_lora: true\nlora_rank: 8", "steps=null", "epochs=2", "use_lora=false", "lora_rank=null"
    )
    assert (job.steps, job.epochs, job.use_lora) == (None, 2.0, False)


def test_overrides_alone_make_a_job():
    assert read_job(None, ["model=m", "data=d"]) == read_job_dict({"model": "m", "data": "d"})


@pytest.mark.parametrize(
    ("override", "field", "words"),
    [
        ("micro_batch", "micro_batch", "key=value"),
        ("--lr", "--lr", "key=value"),
        ("=3", "=3", "key=value"),
        ("", "''", "key=value"),
        ("lora_rnk=3", "lora_rnk", "did you mean 'lora_rank'?"),
        ("fsdp.strateg=3", "fsdp.strateg", "did you mean 'strategy'?"),
        ("steps=0", "steps", "must be a whole number above 0"),
        ("steps='5'", "steps", "write 5 without quotes"),
        ("use_lora=yes", "use_lora", "write true or false"),
        ("lora_targets=[a", "lora_targets", "not valid YAML"),
        ("model=null", "model", "is missing"),
        ("a..b=1", "a..b", "unknown key"),
    ],
)
def test_bad_overrides(override, field, words):
    (problem,) = problems_of(NEEDED, override)
    assert problem.field == field
    assert words in str(problem)


def test_overrides_and_file_are_reported_together():
    assert [p.field for p in problems_of(NEEDED + "seed: x", "nonsense", "steps=0")] == ["nonsense", "steps", "seed"]
