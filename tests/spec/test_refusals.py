"""Every wrong input is refused with its key, its line and words that help."""

from __future__ import annotations

import pytest

from shardwise.spec import not_built
from shardwise.spec.keys import FOREIGN
from shardwise.spec.problems import BadInput
from shardwise.spec.reader import read_job, read_job_dict
from shardwise.spec.wording import FIELDS, field_problem

NEEDED = "model: m\ndata: d.jsonl\n"


def problems_of(text: str, *overrides: str) -> list:
    with pytest.raises(BadInput) as caught:
        read_job(None, overrides, text=text)
    return list(caught.value.problems)


BAD = [
    # text, field, words
    ("use_lora: 'true'", "use_lora", "write true without quotes"),
    ("use_lora: yes", "use_lora", "write true or false (here true)"),
    ("use_lora: off", "use_lora", "write true or false (here false)"),
    ("use_lora: 1", "use_lora", "must be true or false"),
    ("use_lora:", "use_lora", "has no value; it must be true or false"),
    ("log: {tensorboard: flase}", "log.tensorboard", "must be true or false"),
    ("learning_rate: '1e-4'", "learning_rate", "write 1e-4 without quotes"),
    ("learning_rate: 0", "learning_rate", "must be a number above 0"),
    ("learning_rate: .nan", "learning_rate", "must be finite"),
    ("max_grad_norm: .inf", "max_grad_norm", "must be finite"),
    ("lr: big", "lr", "must be a number above 0"),
    ("seq_len: 1", "seq_len", "must be a whole number of 2 or more"),
    ("seq_len: 2048.0", "seq_len", "write 2048"),
    ("steps: 1_000", "steps", "write 1000 without quotes"),
    ("steps: true", "steps", "must be a whole number above 0"),
    ("steps: 0", "steps", "must be a whole number above 0"),
    ("steps: 99999999999999999999", "steps", "too large"),
    ("seed: -1", "seed", "must be a whole number of 0 or more"),
    ("max_steps: -1", "max_steps", "must be a whole number above 0"),
    ("micro_batch: [1]", "micro_batch", "must be a whole number above 0"),
    ("micro_batch: {a: 1}", "micro_batch", "must be a whole number above 0"),
    ("use_lora: true\nlora_rank: 0", "lora_rank", "must be a whole number above 0"),
    ("use_lora: true\nlora_dropout: 1", "lora_dropout", "must be a number of 0 or more and below 1"),
    ("use_lora: true\nlora_targets: q_proj,v_proj", "lora_targets", "write [q_proj, v_proj]"),
    ("use_lora: true\nmodules_to_save: lm_head", "modules_to_save", "write [lm_head]"),
    ("use_lora: true\nlora_targets: []", "lora_targets", "a list of module names"),
    ("use_lora: true\nlora_targets: ['']", "lora_targets", "an item that is empty text"),
    ("use_lora: true\nlora_targets: [1]", "lora_targets", "a list of module names"),
    ("schedule: cosin", "schedule", "allowed: constant, linear, cosine; did you mean 'cosine'?"),
    ("output: 7", "output", "must be text; put text in quotes"),
    ("output: ''", "output", "is empty text"),
    ('output: "a\\0b"', "output", "not a character"),
    ("output: [a]", "output", "must be text"),
    ("resume: true", "resume", "put text in quotes"),
    ("data.held_out: 1", "data.held_out", "must be text or a number above 0 and below 1"),
    ("data.format: chatml", "data.format", "allowed: messages, alpaca, prompt_completion, text"),
    ("model.dtype: int8", "model.dtype", "allowed: fp32, bf16, fp16"),
    ("model.attention: flash", "model.attention", "flash_attention_2"),
    # fsdp
    ("fsdp: ful_shard", "fsdp", "did you mean 'full_shard'?"),
    ("fsdp: [full_shard, shard_grad_op]", "fsdp", "FULL_SHARD and SHARD_GRAD_OP"),
    ("fsdp: auto ddp", "fsdp", "contradicts itself"),
    ("fsdp: false", "fsdp", "write no_shard"),
    ("fsdp: true", "fsdp", "must name a strategy"),
    ("fsdp: []", "fsdp", "names no strategy"),
    ("fsdp: ''", "fsdp", "names no strategy"),
    ("fsdp:", "fsdp", "must be a strategy"),
    ("fsdp: [1]", "fsdp", "must be a strategy"),
    ("fsdp: {strategy: 1}", "fsdp.strategy", "allowed: FULL_SHARD"),
    ("fsdp: {reshard_after_foward: true}", "fsdp.reshard_after_foward", "did you mean 'reshard_after_forward'?"),
    ("fsdp: {seq_len: 2}", "fsdp.seq_len", "write 'seq_len' at the top level"),
    ("fsdp: {auto_wrap_policy: x}", "fsdp.auto_wrap_policy", "units.wrap"),
    # dtypes
    ("mixed_precision: none", "mixed_precision", "write fp32"),
    ("mixed_precision: no", "mixed_precision", "write fp32"),
    ("mixed_precision: fp8", "mixed_precision", "is not built yet"),
    ("mixed_precision: true", "mixed_precision", "fp32, bf16, fp16"),
    ("mixed_precision: {param_dtype: f16}", "mixed_precision.param_dtype", "did you mean 'fp16'?"),
    ("mixed_precision: {param_type: bf16}", "mixed_precision.param_type", "did you mean 'param_dtype'?"),
    ("bf16: 'true'", "bf16", "must be true or false"),
    # other values
    ("activation_checkpointing: every_0", "activation_checkpointing", "every_2"),
    ("activation_checkpointing: yes", "activation_checkpointing", "true, false, full, none, selective"),
    ("checkpoint: false", "checkpoint", "a run always ends with a checkpoint"),
    ("checkpoint: often", "checkpoint", "a whole number"),
    ("checkpoint: -1", "checkpoint", "must be a whole number of 0 or more"),
    ("log: 10", "log", "must be a mapping"),
    ("cluster: my/cluster", "cluster", "or a file (cluster.yaml)"),
    ("cluster: cluster.toml", "cluster", "or a file (cluster.yaml)"),
    ("cluster: 0x8xA10", "cluster", "8xA10"),
    ("cluster: 8x-1xA10", "cluster", "8xA10"),
    ("cluster: 2x4x8xA10", "cluster", "8xA10"),
    ("cluster: cpu", "cluster", "2xcpu"),
    ("cluster: 4090", "cluster", "put text in quotes"),
    ("cluster: 0xcpu", "cluster", "2xcpu"),
    ("cluster: detekt", "cluster", "detect"),
    ("optimizer: Muon", "optimizer", "is not built yet"),
    ("optimizer: adamq", "optimizer", "did you mean 'adamw'?"),
    ("plan: plan.yaml", "plan", "is not built yet"),
    ("quantization: nf4", "quantization", "is not built yet"),
    ("load_in_4bit: true", "load_in_4bit", "is not built yet"),
    ("on_oom: retry", "on_oom", "is not built yet"),
    ("data.packing: true", "data.packing", "is not built yet"),
    # keys
    ("lora_rnk: 4", "lora_rnk", "did you mean 'lora_rank'?"),
    ("Steps: 4", "Steps", "did you mean 'steps'?"),
    ("max_step: 4", "max_step", "did you mean 'max_steps'?"),
    ("keep: 4", "keep", "write 'checkpoint.keep'"),
    ("every: 4", "every", "write 'checkpoint.every' or 'log.every'"),
    ("reshard_after_foward: true", "reshard_after_foward", "did you mean 'fsdp.reshard_after_forward'?"),
    ("checkpoint: {evry: 4}", "checkpoint.evry", "allowed: every, keep; did you mean 'every'?"),
    ("xyzzy: 4", "xyzzy", "docs/configuration.md"),
    ("'': 4", "''", "unknown key"),
    ("1: 4", "1", "unknown key"),
    ("train: 4", "train", "must be a mapping"),
    ("train: {lr: 0}", "train.lr", "must be a number above 0"),
    ("train: {train: {lr: 1}}", "train.train", "must be a mapping"),
    ("training: {lr: 1e-4}", "training", "did you mean 'train'?"),
    (
        "gradient_accumulation_steps: 4",
        "gradient_accumulation_steps",
        "global_batch = micro_batch x accumulation x ranks",
    ),
    ("warmup_ratio: 0.1", "warmup_ratio", "warmup_steps"),
    ("deepspeed: ds.json", "deepspeed", "ZERO2"),
    ("steps: !now 3", "steps", "YAML tag"),
    # contradictions
    ("steps: 10\nepochs: 1", "epochs", "contradicts steps: 10"),
    ("steps: 10\nwarmup_steps: 11", "warmup_steps", "at most 10 steps"),
    ("micro_batch: 2\nper_device_train_batch_size: 4", "per_device_train_batch_size", "contradicts micro_batch: 2"),
    ("lr: 1e-4\ntrain: {learning_rate: 1e-5}", "train.learning_rate", "contradicts lr: 0.0001"),
    ("bf16: true\nfp16: true", "fp16", "contradicts bf16: true"),
    ("fp16: true\nmixed_precision: bf16", "mixed_precision", "contradicts fp16: true"),
    ("bf16: false\nmixed_precision: bf16", "bf16", "contradicts mixed_precision: bf16"),
    ("checkpoint: {every: 5}\nsave_steps: 6", "save_steps", "contradicts checkpoint.every: 5"),
    ("gradient_checkpointing: true\nactivation_checkpointing: none", "activation_checkpointing", "contradicts"),
    ("lora_rank: 8", "lora_rank", "has no effect without use_lora: true"),
    ("use_lora: false\nlora_alpha: 8", "lora_alpha", "has no effect without use_lora: true"),
    ("global_batch: 10\nmicro_batch: 4", "global_batch", "multiple of micro_batch"),
    ("data.held_out: d.jsonl", "data.held_out", "the file that is trained on"),
]


@pytest.mark.parametrize(("text", "field", "words"), BAD, ids=[text[:50] for text, _, _ in BAD])
def test_bad_input(text, field, words):
    (problem,) = problems_of(NEEDED + text)
    assert problem.field == field
    assert words in str(problem)
    assert problem.line is not None
    assert problem.line >= 3


@pytest.mark.parametrize(
    ("text", "field", "words"),
    [
        ("data: d", "model", "is missing"),
        ("model: m\ndata: [a, b]", "data", "not built yet"),
        ("model: m\ndata: {path: [a, b]}", "data.path", "not built yet"),
        ("model: m\ndata: {}", "data", "is missing"),
        ("model: {attention: eager}\ndata: d", "model.path", "is missing"),
        ("model: 7\ndata: d", "model", "put text in quotes"),
        ("model:\ndata: d", "model", "must be a folder or a hub id"),
        ("model: ' '\ndata: d", "model", "is empty text"),
        ('model: "\\ud800"\ndata: d', "model", "not a character"),
        ("model: {path: m, revison: main}\ndata: d", "model.revison", "did you mean 'revision'?"),
        ("model: m\nmodel: n\ndata: d", "model", "twice"),
        ("model: m\nmodel_name_or_path: n\ndata: d", "model_name_or_path", "contradicts model: m"),
        ("model: !x m\ndata: d", "model", "tag"),
    ],
)
def test_bad_model_and_data(text, field, words):
    (problem,) = problems_of(text)
    assert problem.field == field
    assert words in str(problem)


def test_everything_wrong_is_reported_together_in_the_order_of_the_file():
    text = "fsdp: ful_shard\nlora_rnk: 4\nseed: x\nsteps: 5\nepochs: 2\nsteps: 6\non_oom: retry\ndata: d\n"
    problems = problems_of(text)
    assert [(p.line, p.field) for p in problems] == [
        (None, "model"),
        (1, "fsdp"),
        (2, "lora_rnk"),
        (3, "seed"),
        (5, "epochs"),
        (6, "steps"),
        (7, "on_oom"),
    ]


def test_long_values_are_cut():
    (problem,) = problems_of(NEEDED + f"steps: {list(range(500))}")
    assert len(str(problem)) < 250


@pytest.mark.parametrize(("key", "entry"), not_built.KEYS.items())
def test_what_is_not_built_says_what_to_do(key, entry):
    assert entry.instead
    (problem,) = problems_of(NEEDED + f"{key}: something")
    assert problem.reason == "is not built yet"
    assert problem.fix == entry.instead
    for neutral in entry.neutral:
        assert read_job_dict({"model": "m", "data": "d", key: neutral}) == read_job_dict({"model": "m", "data": "d"})


@pytest.mark.parametrize("key", FOREIGN)
def test_keys_of_other_trainers_get_a_helpful_line(key):
    (problem,) = problems_of(NEEDED + f"{key}: 1")
    assert problem.fix == FOREIGN[key]


@pytest.mark.parametrize("field", FIELDS)
def test_every_field_has_words_for_what_it_accepts(field):
    problem = field_problem(field, field, object(), None)
    assert "pydantic" not in str(problem)
    assert problem.reason.startswith("must be ") or problem.allowed
