"""Plans and problems in print: complete, narrow enough, plain outside a terminal."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from shardwise.report.plan_words import OTHER_NAMES
from shardwise.report.terminal import bytes_text, print_plan, problems_text
from shardwise.spec.job import Job
from shardwise.spec.layout import Offload, Prefetch, ReduceScatter, Units
from shardwise.spec.plan import Dtypes, Mesh, Plan
from shardwise.spec.problems import BadInput, Problem
from shardwise.spec.reader import read_job_dict
from shardwise.spec.units import UnitRow, UnitTable


def a_job(**values) -> Job:
    return read_job_dict({"model": "org/model", "data": "faq.jsonl"} | values)


DTYPES = Dtypes(frozen_storage="bf16", param="fp16", reduce="fp32", output="fp32", buffer=None, loss_scaling=True)


def a_plan(**changes) -> Plan:
    values = {
        "strategy": "FULL_SHARD",
        "mesh": Mesh(shard=2),
        "reshard_after_forward": True,
        "prefetch": Prefetch(forward=1, backward=1, async_all_gather=True),
        "reduce_scatter": ReduceScatter(buffers=2, separate_group=False, asynchronous=True),
        "dtypes": DTYPES,
        "activation_checkpointing": "full",
        "attention": "sdpa",
        "micro_batch": 2,
        "accumulation_steps": 2,
    }
    return Plan(**values | changes)


def a_table(prefix: str = "") -> UnitTable:
    block = {
        "kind": "LlamaDecoderLayer",
        "parameters": 202_383_360,
        "trainable": 4_423_680,
        "gathered_bytes": 404_766_720,
        "stored_bytes": 2**29,
        "stored_by_dtype": {"bfloat16": 2**29},
        "all_gather_bytes": 404_766_720,
        "reduce_scatter_bytes": 17_694_720,
        "reshard_after_forward": True,
        "checkpointed": True,
    }
    root = block | {
        "kind": "embedding, norm, head",
        "parameters": 1_217_658_880,
        "gathered_bytes": 3 * 2**30,
        "reshard_after_forward": False,
        "checkpointed": False,
    }
    rows = [UnitRow(name=f"{prefix}model.layers.{index}", **block) for index in range(32)]
    return UnitTable(rows=(*rows, UnitRow(name="root", **root)))


def printed(plan: Plan, job: Job, units: UnitTable | None = None, note: str = "", width: int = 80) -> str:
    out = io.StringIO()
    print_plan(Console(file=out, width=width), plan, job, units, note)
    return out.getvalue()


def test_the_plan_in_words():
    text = printed(a_plan(), a_job(use_lora=True, lora_rank=64), note="2 ranks: no GPU here")
    for words in (
        "FULL_SHARD = replicate 1 x shard 2, reshard_after_forward true",
        "global batch 8 = 2 rows x 2 ranks x 2 accumulation",
        "param fp16, reduce fp32, output fp32, with dynamic loss scaling",
        "trained weights fp32, frozen weights bf16",
        "activations of every block are recomputed",
        "LoRA rank 64, alpha 128",
        "2 ranks: no GPU here",
        "adamw, foreach implementation",
        "sdpa",
        "buffers        as loaded",
        "prefetch       1 ahead in forward, 1 in backward, gathers in the background",
        "reductions     in the background, 2 in flight",
        "other names    ZERO3: weights, gradients and optimizer states are sharded",
        a_plan().fingerprint(),
    ):
        assert words in text


def _with(part: str, **changes) -> dict[str, object]:
    return {part: getattr(a_plan(), part).model_copy(update=changes)}


CHANGES: dict[str, list[dict[str, object]]] = {
    "strategy": [{"strategy": name} for name in OTHER_NAMES if name != "FULL_SHARD"],
    "mesh.replicate": [_with("mesh", replicate=2)],
    "mesh.shard": [_with("mesh", shard=4)],
    "mesh.tensor": [_with("mesh", tensor=2)],
    "mesh.sequence_parallel": [_with("mesh", sequence_parallel=True)],
    "reshard_after_forward": [{"reshard_after_forward": value} for value in (False, 2, 4)],
    "units.wrap": [_with("units", wrap=("LlamaMLP",)), _with("units", wrap=("LlamaMLP", "LlamaAttention"))],
    "units.embedding": [_with("units", embedding="own")],
    "units.head": [_with("units", head="own")],
    "prefetch.forward": [_with("prefetch", forward=0), _with("prefetch", forward=3)],
    "prefetch.backward": [_with("prefetch", backward=0), _with("prefetch", backward=3)],
    "prefetch.async_all_gather": [_with("prefetch", async_all_gather=False)],
    "reduce_scatter.buffers": [_with("reduce_scatter", buffers=3)],
    "reduce_scatter.separate_group": [_with("reduce_scatter", separate_group=True)],
    "reduce_scatter.asynchronous": [
        _with("reduce_scatter", asynchronous=False),
        _with("reduce_scatter", asynchronous=False, buffers=1),
    ],
    "dtypes.frozen_storage": [_with("dtypes", frozen_storage=value) for value in (None, "checkpoint", "fp32")],
    "dtypes.trained_storage": [_with("dtypes", trained_storage="bf16")],
    "dtypes.optimizer_state": [_with("dtypes", optimizer_state="bf16")],
    "dtypes.param": [_with("dtypes", param="bf16")],
    "dtypes.reduce": [_with("dtypes", reduce="bf16")],
    "dtypes.output": [_with("dtypes", output="bf16")],
    "dtypes.buffer": [_with("dtypes", buffer="bf16")],
    "dtypes.loss_scaling": [_with("dtypes", loss_scaling=False)],
    "activation_checkpointing": [{"activation_checkpointing": value} for value in ("none", "selective", "every_2")],
    "offload.optimizer": [_with("offload", optimizer=True)],
    "offload.parameters": [_with("offload", parameters=True)],
    "offload.activations": [_with("offload", activations=True)],
    "attention": [{"attention": "eager"}],
    "micro_batch": [{"micro_batch": 1}],
    "accumulation_steps": [{"accumulation_steps": 1}],
    "accumulation_mode": [{"accumulation_mode": value} for value in ("defer_all", "defer_replicate")],
    "optimizer": [{"optimizer": value} for value in ("adamw_8bit", "sgd")],
    "optimizer_implementation": [{"optimizer_implementation": value} for value in ("fused", "for_loop")],
    "loss_head": [{"loss_head": value} for value in ("chunked", "fused")],
    "loss_chunk": [{"loss_head": "chunked", "loss_chunk": 64}, {"loss_head": "chunked", "loss_chunk": 65}],
    "compile": [{"compile": True}],
}
"""Field of a Plan -> changes of it; each must print something that no other does."""


def _decided(plan: Plan) -> str:
    return printed(plan, a_job()).replace(plan.fingerprint(), "")


def test_every_field_of_a_plan_has_a_change_below():
    leaves = set()
    for name, info in Plan.model_fields.items():
        inner = getattr(info.annotation, "model_fields", None)
        leaves |= {f"{name}.{leaf}" for leaf in inner} if inner else {name}
    assert leaves - {"reasons"} == set(CHANGES)


def test_every_decision_shows():
    texts = {"": _decided(a_plan())}
    for field, changes in CHANGES.items():
        for change in changes:
            texts[f"{field} {change}"] = _decided(a_plan(**change))
    assert len(set(texts.values())) == len(texts)


def test_what_is_off_takes_no_line():
    text = printed(a_plan(), a_job())
    for word in ("offload", "compile", "units", "tensor", "sequence", "communicator"):
        assert word not in text
    assert a_plan().offload == Offload()
    assert a_plan().units == Units()


@pytest.mark.parametrize(
    ("name", "strategy", "mesh", "words"),
    [
        ("DDP", "NO_SHARD", Mesh(replicate=2), "NO_SHARD = replicate 2 x shard 1, reshard_after_forward true"),
        ("ZERO2", "SHARD_GRAD_OP", Mesh(shard=2), "SHARD_GRAD_OP = replicate 1 x shard 2, reshard_after_forward false"),
        ("ZERO3", "FULL_SHARD", Mesh(shard=2), "FULL_SHARD = replicate 1 x shard 2, reshard_after_forward true"),
        ("HSDP", "HYBRID_SHARD", Mesh(replicate=2, shard=4), "HYBRID_SHARD = replicate 2 x shard 4"),
    ],
)
def test_what_other_names_become(name, strategy, mesh, words):
    assert a_job(fsdp=name).fsdp.strategy == strategy
    text = printed(a_plan(strategy=strategy, mesh=mesh, reshard_after_forward=strategy != "SHARD_GRAD_OP"), a_job())
    assert words in " ".join(text.split())
    assert f"other names    {name}" in text


def test_more_words():
    plan = a_plan(
        mesh=Mesh(shard=2, tensor=2, sequence_parallel=True),
        reshard_after_forward=True,
        units=Units(wrap=("LlamaMLP",), head="own"),
        offload=Offload(optimizer=True, parameters=True),
        optimizer="sgd",
        loss_head="chunked",
        reasons={"prefetch.forward": "1: because", "reduce_scatter.asynchronous": "off: because"},
    )
    text = " ".join(printed(plan, a_job(optimizer="sgd", momentum=0.9), width=200).split())
    for words in (
        "replicate 1 x shard 2 x tensor 2 with sequence parallel norms",
        "global batch 8 = 2 rows x 2 data ranks x 2 accumulation",
        "units LlamaMLP; embedding in the root unit, head in a unit of its own",
        "offload parameters with their gradients, optimizer states in host memory",
        "sgd with momentum 0.9, foreach implementation",
        "chunked: from the logits of 1024 tokens at a time",
        "forward 1: because",
        "asynchronous off: because",
    ):
        assert words in text


def test_every_reason_shows_once():
    fields = [*Plan.model_fields, "global_batch", "prefetch.forward", "reduce_scatter.asynchronous", "something_new"]
    reasons = {field: f"because-{field}-." for field in fields}
    text = printed(a_plan(reasons=reasons), a_job())
    for field in fields:
        assert text.count(f"because-{field}-.") == 1


def test_the_unit_table():
    text = printed(a_plan(), a_job(), a_table())
    for words in (
        "model.layers.0 .. 31",
        "32 x LlamaDecoderLayer",
        "202,383,360",
        "386.0 MiB",
        "all 33",
        "7,693,926,400",
        "one rank stores 1/2 of 16.50 GiB = 8.25 GiB",
        "biggest unit when gathered: root, 3.00 GiB",
    ):
        assert words in text
    assert "one rank stores all of 16.50 GiB" in printed(a_plan(mesh=Mesh(replicate=2)), a_job(), a_table())


def test_unit_table_of_other_layouts():
    table = a_table()
    rows = [row.model_copy(update={"reshard_after_forward": row.reshard_after_forward and 2}) for row in table.rows]
    text = printed(a_plan(mesh=Mesh(shard=4, tensor=2)), a_job(), UnitTable(rows=tuple(rows)))
    assert "F: kept in groups of 2 ranks after forward" in text
    assert "one rank stores at most 1/4 of 16.50 GiB = 4.12 GiB" in text


@pytest.mark.parametrize("width", [80, 100, 132])
def test_no_line_is_wider_than_the_terminal(width):
    job = a_job(model="/deep/" + "folder/" * 30 + "model", use_lora=True, lora_targets=["[q_proj]", "v_proj"] * 9)
    reasons = {"strategy": "a long reason with words " * 8}
    text = printed(a_plan(reasons=reasons), job, a_table("base_model.model.language_"), "2 ranks", width)
    assert max(len(line) for line in text.splitlines()) <= width
    assert "[q_proj]" in text
    assert "layers.0 .. 31" in text
    assert all(line == line.rstrip() for line in text.splitlines())


def test_narrow_terminals_lose_no_figure():
    assert "202,383,360" in printed(a_plan(), a_job(), a_table(), width=40)


def test_plain_outside_a_terminal_and_ascii():
    text = printed(a_plan(), a_job(), a_table())
    assert "\x1b" not in text
    assert text.isascii()


def test_bytes():
    assert bytes_text(0) == "0.0 MiB"
    assert bytes_text(2**10) == "1.0 KiB"
    assert bytes_text(2**20 * 1.5) == "1.5 MiB"
    assert bytes_text(2**30) == "1.00 GiB"


def test_one_problem_has_no_number():
    problem = Problem(field="fsdp", value="x", reason="is unknown", allowed="a, b", fix="did you mean 'a'?", line=3)
    assert problems_text(BadInput(problem)).splitlines() == [
        "line 3: fsdp: 'x': is unknown",
        "    allowed: a, b",
        "    did you mean 'a'?",
    ]


def test_several_problems_are_numbered():
    problems = [Problem(field=f"key{index}", reason="is missing") for index in range(11)]
    lines = problems_text(BadInput(problems)).splitlines()
    assert lines[:2] == ["11 problems:", " 1. key0: is missing"]
    assert lines[-1] == "11. key10: is missing"
