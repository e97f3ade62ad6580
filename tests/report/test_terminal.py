"""Plans and problems in print: complete, narrow enough, plain outside a terminal."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from shardwise.report.terminal import bytes_text, print_plan, problems_text
from shardwise.spec.job import Job
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
        a_plan().fingerprint(),
    ):
        assert words in text


@pytest.mark.parametrize(
    "changes",
    [
        {"strategy": "NO_SHARD", "mesh": Mesh(replicate=2)},
        {"reshard_after_forward": False},
        {"activation_checkpointing": "none"},
        {"activation_checkpointing": "every_2"},
        {"attention": "eager"},
        {"micro_batch": 1},
        {"accumulation_steps": 1},
        {"optimizer_implementation": "fused"},
        *(
            {"dtypes": DTYPES.model_copy(update=change)}
            for change in (
                {"frozen_storage": None},
                {"frozen_storage": "checkpoint"},
                {"param": "bf16"},
                {"reduce": "bf16"},
                {"output": "bf16"},
                {"buffer": "bf16"},
                {"loss_scaling": False},
            )
        ),
    ],
)
def test_every_decision_shows(changes):
    def without_fingerprint(plan: Plan) -> str:
        return printed(plan, a_job()).replace(plan.fingerprint(), "")

    assert without_fingerprint(a_plan(**changes)) != without_fingerprint(a_plan())


def test_every_reason_shows_once():
    fields = [*Plan.model_fields, "global_batch", "something_new"]
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
