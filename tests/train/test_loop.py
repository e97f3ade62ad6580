"""The loop on live ranks: stop, resume, record."""

from __future__ import annotations

import json

import pytest
import torch

from harness.ranks import run_ranks
from harness.runs import make_run, metrics, train, write_rows
from shardwise.spec.problems import BadInput


def _assert_same(one, other):
    assert one["weights"].keys() == other["weights"].keys()
    for name, weight in one["weights"].items():
        assert torch.equal(weight, other["weights"][name]), name
    for mine, theirs in zip(one["moments"], other["moments"], strict=True):
        assert all(torch.equal(torch.as_tensor(mine[key]), torch.as_tensor(theirs[key])) for key in mine)


@pytest.mark.parametrize("fields", [{}, {"use_lora": False, "lora_dropout": 0.0}], ids=["lora", "full"])
def test_stopped_and_resumed_is_bitwise_the_uninterrupted_run(tiny, tmp_path, fields):
    whole_folder, cut_folder = tmp_path / "whole", tmp_path / "cut"
    whole_folder.mkdir()
    cut_folder.mkdir()
    whole = run_ranks(train, 2, make_run(whole_folder, tiny("llama"), **fields))
    stopped = run_ranks(train, 2, make_run(cut_folder, tiny("llama"), **fields), 3)
    assert [(r["state"], r["step"]) for r in stopped] == [("stopped", 3)] * 2

    resumed_run = make_run(cut_folder, tiny("llama"), resume="auto", **fields)
    assert resumed_run.info.resume_from.endswith("step-000003")
    resumed = run_ranks(train, 2, resumed_run)
    assert resumed[0]["state"] == "finished"
    assert resumed[0]["samples_seen"] == whole[0]["samples_seen"]
    _assert_same(resumed[0], whole[0])
    assert resumed[0]["last_loss"] == whole[0]["last_loss"]
    assert resumed[0]["first_loss"] == whole[0]["first_loss"], "the loss before training must survive a resume"


def test_another_layout_continues_the_same_training(tiny, tmp_path):
    """Two ranks under FULL_SHARD, then one rank that keeps its weights gathered and recomputes activations."""
    whole_folder, cut_folder = tmp_path / "whole", tmp_path / "cut"
    whole_folder.mkdir()
    cut_folder.mkdir()
    fields = {"lora_dropout": 0.0, "learning_rate": 1e-3}
    whole = run_ranks(train, 2, make_run(whole_folder, tiny("llama"), **fields))
    run_ranks(train, 2, make_run(cut_folder, tiny("llama"), fsdp={"strategy": "FULL_SHARD"}, **fields), 3)
    layout = {"fsdp": {"strategy": "SHARD_GRAD_OP"}, "micro_batch": 2, "activation_checkpointing": "full"}
    resumed = run_ranks(train, 1, make_run(cut_folder, tiny("llama"), world=1, resume="auto", **layout, **fields))
    assert (resumed[0]["step"], resumed[0]["samples_seen"]) == (6, whole[0]["samples_seen"])
    for name, weight in whole[0]["weights"].items():
        torch.testing.assert_close(resumed[0]["weights"][name], weight, atol=1e-5, rtol=0)


def test_a_stop_within_a_slow_step_gives_that_step_up(tiny, tmp_path):
    """torchrun waits 30 s: a step of many micro-batches may take longer than that."""
    whole_folder, cut_folder = tmp_path / "whole", tmp_path / "cut"
    whole_folder.mkdir()
    cut_folder.mkdir()
    whole = run_ranks(train, 2, make_run(whole_folder, tiny("llama")))
    stopped = run_ranks(train, 2, make_run(cut_folder, tiny("llama")), None, 3)
    assert [(r["state"], r["step"]) for r in stopped] == [("stopped", 3)] * 2
    resumed = run_ranks(train, 2, make_run(cut_folder, tiny("llama"), resume="auto"))
    _assert_same(resumed[0], whole[0])


def test_metrics_of_a_resumed_run_hold_each_step_once(tiny, tmp_path):
    prepared = make_run(tmp_path, tiny("llama"))
    run_ranks(train, 2, prepared, 3)
    with prepared.folder.metrics.open("a") as file:  # a killed run got further than its checkpoint
        file.write(json.dumps({"step": 4, "loss": 99.0}) + "\n" + '{"step": 5, "lo')
    run_ranks(train, 2, make_run(tmp_path, tiny("llama"), resume="auto"))
    lines = metrics(prepared)
    assert [line["step"] for line in lines if "loss" in line] == [1, 2, 3, 4, 5, 6]
    assert [line["step"] for line in lines if "held_out_loss" in line] == [0, 6]
    assert all(line.get("loss") != 99.0 for line in lines)


def test_recorded_numbers_are_those_of_the_job(tiny, tmp_path):
    prepared = make_run(tmp_path, tiny("llama"), schedule="linear", warmup_steps=2, steps=4)
    results = run_ranks(train, 2, prepared)
    steps = [line for line in metrics(prepared) if "loss" in line]
    rates = [line["learning_rate"] for line in steps]
    assert rates == pytest.approx([1e-2 / 3, 2e-2 / 3, 1e-2, 0.5e-2])
    assert all(line["memory"] == "RSS" and line["memory_bytes"] > 0 for line in steps)
    assert all(line["trained_tokens"] > 0 and line["grad_norm"] > 0 for line in steps)
    assert results[0]["last_loss"] < results[0]["first_loss"]


def test_checkpoints_come_every_n_steps_and_the_newest_stay(tiny, tmp_path):
    prepared = make_run(tmp_path, tiny("llama"), checkpoint={"every": 2, "keep": 2})
    run_ranks(train, 2, prepared)
    assert sorted(path.name for path in prepared.folder.checkpoints.iterdir()) == ["step-000004", "step-000006"]


@pytest.mark.parametrize("rows", [1, 3, 5])
def test_any_number_of_rows_gives_equal_steps_on_all_ranks(tiny, tmp_path, rows):
    write_rows(tmp_path / "rows.jsonl", rows)
    prepared = make_run(
        tmp_path,
        tiny("llama"),
        world=4,
        data={"path": str(tmp_path / "rows.jsonl")},
        global_batch=4,
        steps=None,
        epochs=2.0,
    )
    results = run_ranks(train, 4, prepared)
    assert {r["step"] for r in results} == {2 * -(-rows // 4)}
    for other in results[1:]:
        _assert_same(results[0], other)


def test_another_job_may_not_use_the_folder(tiny, tmp_path):
    run_ranks(train, 2, make_run(tmp_path, tiny("llama"), steps=1))
    with pytest.raises(BadInput, match=r"already holds this run.*--resume auto"):
        make_run(tmp_path, tiny("llama"), steps=1)
    with pytest.raises(BadInput, match="holds another run: lora_rank was 3, now 4"):
        make_run(tmp_path, tiny("llama"), steps=1, lora_rank=4, resume="auto")


def test_a_folder_with_other_files_is_refused_and_untouched(tiny, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.tex").write_text("years of work")
    with pytest.raises(BadInput, match="holds files that are not a run"):
        make_run(tmp_path, tiny("llama"))
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["thesis.tex"]


def test_a_checkpoint_of_another_model_is_refused_before_ranks_start(tiny, tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    first = make_run(tmp_path / "a", tiny("llama"), steps=1)
    run_ranks(train, 2, first)
    checkpoint = str(first.folder.checkpoints / "step-000001")
    with pytest.raises(BadInput, match="belongs to another training: the base model's weights"):
        make_run(tmp_path / "b", tiny("llama", layers=2), steps=1, resume=checkpoint)
    assert not (tmp_path / "b" / "run").exists()


def test_a_stop_in_the_last_step_leaves_evaluation_and_export_to_the_resumed_run(tiny, tmp_path):
    prepared = make_run(tmp_path, tiny("llama"))
    stopped = run_ranks(train, 2, prepared, 6)
    assert [(r["state"], r["step"]) for r in stopped] == [("stopped", 6)] * 2
    resumed = run_ranks(train, 2, make_run(tmp_path, tiny("llama"), resume="auto"))
    assert [(r["state"], r["step"]) for r in resumed] == [("finished", 6)] * 2
    assert resumed[0]["last_loss"] is not None
    assert [line["step"] for line in metrics(prepared) if "held_out_loss" in line] == [0, 6]
