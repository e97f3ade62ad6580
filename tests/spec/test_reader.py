"""Reading a Job: the example of the documentation, the round trip, and no traceback for any input."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.spec import not_built
from shardwise.spec.job import (
    CheckpointChoice,
    DataChoice,
    FsdpChoice,
    Job,
    ModelChoice,
    PrecisionChoice,
)
from shardwise.spec.keys import FOREIGN, OTHER_NAMES
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
from shardwise.spec.problems import BadInput
from shardwise.spec.reader import job_to_dict, job_to_yaml, read_job, read_job_dict
from shardwise.spec.wording import FIELDS, SECTIONS

NEEDED = "model: m\ndata: d.jsonl\n"

ARTICLE = """\
fsdp:
  - full_shard
mixed_precision: fp16
use_lora: true
lora_rank: 64
activation_checkpointing: true
"""


def job_of(text: str, *overrides: str) -> Job:
    return read_job(None, overrides, text=NEEDED + text)


def problems_of(text: str, *overrides: str) -> list:
    with pytest.raises(BadInput) as caught:
        read_job(None, overrides, text=text)
    return list(caught.value.problems)


def test_the_article_to_the_letter(tmp_path: Path):
    path = tmp_path / "config.yaml"
    path.write_text(ARTICLE + NEEDED)
    job = read_job(path)
    assert job == Job(
        model=ModelChoice(path="m"),
        data=DataChoice(path="d.jsonl"),
        fsdp=FsdpChoice(strategy="FULL_SHARD"),
        mixed_precision=PrecisionChoice(param_dtype="fp16", reduce_dtype="fp32", output_dtype="fp32"),
        use_lora=True,
        lora_rank=64,
        activation_checkpointing="full",
    )


def test_the_article_alone_lacks_model_and_data():
    assert [(p.field, p.reason) for p in problems_of(ARTICLE)] == [("model", "is missing"), ("data", "is missing")]


_names = st.text(min_size=1, max_size=12).filter(lambda text: text.strip() and "\0" not in text)
_positive = st.integers(1, 10**9)
_fractions = st.floats(0.001, 0.999)
_places = st.sampled_from(["own", "root"])
_depths = st.none() | st.integers(0, 9)


@st.composite
def _layouts(draw: st.DrawFn, strategy: str) -> dict[str, object]:
    """Fields of the layout that may stand beside a strategy."""
    sizes, flags = st.none() | st.integers(1, 64), st.booleans()
    tensor = draw(st.integers(1, 4))
    parameters = draw(flags)
    head = draw(st.sampled_from(get_args(LossHead)))
    modes = get_args(AccumulationMode) if strategy in ("HYBRID_SHARD", "auto", "NO_SHARD") else ("reduce_each",)
    mode = draw(st.sampled_from(modes))
    return {
        "mesh": MeshChoice(
            replicate=draw(st.just(1) if strategy in ("FULL_SHARD", "SHARD_GRAD_OP") else st.none() | st.just(8)),
            shard=draw(st.none() | st.just(1) if strategy == "NO_SHARD" else sizes),
            tensor=tensor,
            sequence_parallel=tensor > 1 and draw(flags),
        ),
        "units": Units(wrap=tuple(draw(st.lists(_names, max_size=2))), embedding=draw(_places), head=draw(_places)),
        "prefetch": PrefetchChoice(
            forward=draw(_depths), backward=draw(_depths), async_all_gather=draw(st.none() | flags)
        ),
        "reduce_scatter": ReduceScatterChoice(
            buffers=draw(sizes), separate_group=draw(flags), asynchronous=draw(st.none() | flags)
        ),
        "offload": Offload(optimizer=parameters or draw(flags), parameters=parameters, activations=draw(flags)),
        "accumulation": mode,
        "loss_head": head,
        "loss_chunk": draw(_positive) if head == "chunked" else 1024,
        "compile": draw(flags),
        "self_checks": draw(flags),
    }


@st.composite
def _optimizers(draw: st.DrawFn) -> dict[str, object]:
    """An optimizer with the options that it has."""
    optimizer = draw(st.sampled_from(get_args(OptimizerKind)))
    momentum = draw(_fractions) if optimizer == "sgd" and draw(st.booleans()) else 0.0
    keeps_states = optimizer == "adamw" or momentum > 0
    implementations = st.none() | st.sampled_from(get_args(OptimizerImplementation))
    return {
        "optimizer": optimizer,
        "momentum": momentum,
        "optimizer_state_dtype": draw(st.sampled_from([None, "fp32", "bf16"])) if keeps_states else None,
        "optimizer_implementation": None if optimizer == "adamw_8bit" else draw(implementations),
    }


@st.composite
def _jobs(draw: st.DrawFn) -> Job:
    strategy = draw(st.sampled_from([*get_args(StrategyName), "auto"]))
    freeing, keeping = [None, True, 2], [None, False]
    reshard = {"FULL_SHARD": freeing, "SHARD_GRAD_OP": keeping, "HYBRID_SHARD": freeing, "HYBRID_SHARD_ZERO2": keeping}
    dtypes = st.sampled_from(["fp32", "bf16", "fp16"])
    steps, epochs = draw(st.sampled_from([(None, None), (5, None), (None, 0.5)]))
    micro = draw(_positive)
    values = {
        "model": ModelChoice(path=draw(_names), revision=draw(st.none() | _names)),
        "data": DataChoice(path="d.jsonl", held_out=draw(st.none() | st.just("v.jsonl") | _fractions)),
        "output": draw(st.none() | _names),
        "global_batch": draw(st.none() | st.integers(1, 9).map(lambda n: n * micro)),
        "micro_batch": micro,
        "steps": steps,
        "epochs": epochs,
        "learning_rate": draw(st.none() | st.floats(1e-12, 1.0)),
        "warmup_steps": draw(st.integers(0, 5)),
        "max_grad_norm": draw(st.none() | st.floats(0.1, 10)),
        "fsdp": FsdpChoice(
            strategy=strategy,
            reshard_after_forward=draw(
                st.sampled_from([None] if strategy == "NO_SHARD" else reshard.get(strategy, freeing))
            ),
        ),
        "mixed_precision": PrecisionChoice(
            param_dtype=draw(dtypes),
            storage_dtype=draw(st.sampled_from(["fp32", "bf16"])),
            buffer_dtype=draw(st.none() | dtypes),
        ),
        "activation_checkpointing": draw(st.sampled_from(["none", "full", "selective", "every_3"])),
        "checkpoint": CheckpointChoice(every=draw(st.integers(0, 99)), keep=draw(_positive)),
        "resume": draw(_names),
        "sample": draw(st.none() | _names),
    }
    values |= draw(_layouts(strategy)) | draw(_optimizers())
    if values["optimizer"] == "adamw_8bit" and not values["offload"].parameters:
        values["offload"] = values["offload"].model_copy(update={"optimizer": False})
    if draw(st.booleans()):
        model = values["model"].model_copy(update={"dtype": draw(st.none() | dtypes)})
        values |= {
            "model": model,
            "use_lora": True,
            "lora_rank": draw(_positive),
            "lora_alpha": draw(st.none() | _fractions),
        }
        values["lora_targets"] = draw(st.just("all_linear") | st.lists(_names, min_size=1, max_size=3))
    return Job(**values)


@settings(max_examples=80, deadline=None)
@given(_jobs())
def test_canonical_yaml_is_read_back_equal(job):
    text = job_to_yaml(job)
    again = read_job(None, text=text)
    assert again == job
    assert job_to_yaml(again) == text


def test_canonical_yaml_shows_defaults():
    text = job_to_yaml(job_of(""))
    assert "seq_len: 2048" in text
    assert "lora" not in text.replace("use_lora: false", "")


_known = st.sampled_from(
    [*FIELDS, *SECTIONS, *OTHER_NAMES, *not_built.KEYS, *FOREIGN, "train", "path", "every", "strategy", "param_dtype"]
)
_words = st.sampled_from(
    [
        "full_shard",
        "zero3",
        "offload",
        "hsdp",
        "backward_pre",
        "parameters",
        "defer_replicate",
        "chunked",
        "sgd",
        "fp16",
        "bf16",
        "none",
        "auto",
        "yes",
        "every_2",
        "cosine",
        "8xA10",
        "2xcpu",
        "",
    ]
)
_leaves = (
    st.none() | st.booleans() | st.integers() | st.integers(0, 9) | st.floats() | _words | st.text(max_size=8)
)  # fmt: skip
_keys = _known | st.text(max_size=8)
_values = st.recursive(
    _leaves, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_keys, inner, max_size=4), max_leaves=8
)
_configs = st.dictionaries(_keys, _values, max_size=6)


def _job_or_problems(read) -> None:
    refusal = None
    try:
        job = read()
    except BadInput as error:
        refusal = error
    if refusal is None:
        assert read_job(None, text=job_to_yaml(job)) == job
        return
    assert refusal.problems
    assert all(problem.field and problem.reason for problem in refusal.problems)
    assert all(line.isprintable() for line in str(refusal).split("\n"))


@settings(max_examples=200, deadline=None)
@given(_configs, st.booleans())
def test_any_mapping_gives_a_job_or_named_problems(values, complete):
    needed = {"model": "m", "data": "d"} if complete else {}
    _job_or_problems(lambda: read_job_dict(needed | values))


@settings(max_examples=100, deadline=None)
@given(
    _configs, st.lists(st.builds("{}={}".format, _keys, st.text(max_size=6) | _words) | st.text(max_size=8), max_size=3)
)
def test_any_text_and_overrides_give_a_job_or_named_problems(values, overrides):
    from shardwise.spec.yaml_text import dump_yaml

    text = dump_yaml({"model": "m", "data": "d"} | values)
    _job_or_problems(lambda: read_job(None, overrides, text=text))


def test_reading_needs_no_heavy_import():
    code = (
        "import sys, shardwise.spec.reader, shardwise.spec.units\n"
        "print([m for m in ('torch', 'transformers', 'rich') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_planning_needs_no_data_and_training_does():
    job = read_job(None, ["model=m"], needs_data=False)
    assert job.data is None
    assert read_job(None, text=job_to_yaml(job), needs_data=False) == job
    with pytest.raises(BadInput, match="data: is missing"):
        read_job(None, ["model=m"])
    with pytest.raises(BadInput, match="data"):
        read_job(None, ["model=m", "data=3"], needs_data=False)


@settings(max_examples=40, deadline=None)
@given(_jobs())
def test_the_mapping_of_a_job_is_read_back_equal(job):
    assert read_job_dict(job_to_dict(job)) == job
