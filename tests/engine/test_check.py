"""What cannot run is refused before any rank starts, with what can instead."""

from __future__ import annotations

import pytest

from engine.training import make_job, make_plan
from shardwise.engine import check
from shardwise.engine.check import check_plan
from shardwise.engine.load import build_skeleton
from shardwise.engine.source import open_source
from shardwise.spec.problems import BadInput

FULL = {"fsdp": {"strategy": "FULL_SHARD"}}
LINEAR = {"units": {"wrap": ("Linear",)}}


def _refusal(tiny, world=2, device_type="cpu", **fields):
    job = make_job(tiny("llama", kv=2), global_batch=8, micro_batch=1, **FULL, **fields)
    source = open_source(job.model)
    attended = job.model_copy(update={"model": job.model.model_copy(update={"attention": None})})
    model = build_skeleton(attended, source.config, source.dtype, source).model
    plan = make_plan(attended, world)
    if job.model.attention is not None:
        plan = plan.model_copy(update={"attention": job.model.attention})
    try:
        check_plan(model, plan, device_type)
    except BadInput as bad:
        return str(bad)
    return None


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (
            {"compile": True, "mesh": {"tensor": 2}},
            "torch.compile cannot trace",
        ),
        ({**LINEAR, "activation_checkpointing": "selective"}, "units inside a block"),
        ({**LINEAR, "activation_checkpointing": "full", "compile": True}, "torch compiles nothing"),
        ({"loss_head": "fused"}, "runs on GPUs only"),
        ({"mesh": {"tensor": 4}}, "mesh.tensor"),
    ],
)
def test_refused_with_the_reason(tiny, fields, words):
    world = 4 if "mesh" in fields else 2
    assert words in _refusal(tiny, world=world, **fields)


@pytest.mark.parametrize(
    "fields",
    [
        {**LINEAR, "activation_checkpointing": "full"},
        {**LINEAR, "activation_checkpointing": "every_2", "compile": True},
        {"units": {"embedding": "own", "head": "own"}, "activation_checkpointing": "selective"},
        {"compile": True},
    ],
)
def test_what_runs_is_let_through(tiny, fields):
    assert _refusal(tiny, **fields) is None


def test_flash_attention_computes_in_half_precision_only(tiny):
    folder = str(tiny("llama", kv=2))
    flash = {"model": {"path": folder, "attention": "flash_attention_2"}}
    assert "its kernels take bf16 and fp16 only" in _refusal(tiny, device_type="cuda", **flash)
    low = {"mixed_precision": {"param_dtype": "bf16"}}
    assert _refusal(tiny, device_type="cuda", **flash, **low) is None


def test_compiling_for_cpus_needs_a_compiler(tiny, monkeypatch):
    monkeypatch.setattr(check.shutil, "which", lambda name: None)
    assert "there is no compiler here" in _refusal(tiny, compile=True)
