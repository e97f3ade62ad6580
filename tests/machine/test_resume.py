"""A run continues its own training, or says why it does not."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from harness.ranks import run_ranks
from harness.runs import make_run, train, write_rows
from shardwise.spec.problems import BadInput


def _stopped(tiny, tmp_path, **fields):
    prepared = make_run(tmp_path, tiny("llama"), **fields)
    run_ranks(train, 2, prepared, 3)
    return prepared


def test_other_rows_are_refused(tiny, tmp_path):
    _stopped(tiny, tmp_path)
    write_rows(tmp_path / "rows.jsonl", 12)
    with pytest.raises(BadInput, match="the rows are no longer the same"):
        make_run(tmp_path, tiny("llama"), resume="auto")


def test_other_base_weights_are_refused(tiny, tmp_path):
    """A LoRA checkpoint holds the adapters alone: on another base they mean nothing."""
    model = shutil.copytree(tiny("llama"), tmp_path / "model")
    run_ranks(train, 2, make_run(tmp_path, model), 3)
    tensors = load_file(model / "model.safetensors")
    save_file({n: torch.randn_like(t) for n, t in tensors.items()}, model / "model.safetensors", {"format": "pt"})
    with pytest.raises(BadInput, match="the base model's weights are no longer the same"):
        make_run(tmp_path, model, resume="auto")


def test_a_checkpoint_of_another_training_is_refused(tiny, tmp_path):
    checkpoint = str(_stopped(tiny, tmp_path).folder.checkpoints / "step-000003")
    other = {"output": str(tmp_path / "other"), "resume": checkpoint}
    with pytest.raises(BadInput, match=r"belongs to another training: lora_alpha was 6\.0, now 1\.0"):
        make_run(tmp_path, tiny("llama"), lora_alpha=1.0, **other)
    with pytest.raises(BadInput, match="belongs to another training: seed was 0, now 9"):
        make_run(tmp_path, tiny("llama"), seed=9, **other)
    assert not (tmp_path / "other").exists()
    prepared = make_run(tmp_path, tiny("llama"), **other)
    assert prepared.info.resume_from == checkpoint


def test_fewer_steps_than_are_done_are_refused(tiny, tmp_path):
    checkpoint = _stopped(tiny, tmp_path).folder.checkpoints / "step-000003"
    alone = shutil.copytree(checkpoint, tmp_path / "elsewhere" / "step-000003")
    other = {"output": str(tmp_path / "other"), "resume": str(alone)}
    with pytest.raises(BadInput, match="has 3 steps done, and the job has 2"):
        make_run(tmp_path, tiny("llama"), steps=2, **other)
    prepared = make_run(tmp_path, tiny("llama"), steps=4, **other)
    assert any("could not be compared" in line for line in prepared.data_lines)


def test_lost_checkpoints_are_no_fresh_start(tiny, tmp_path):
    prepared = _stopped(tiny, tmp_path)
    shutil.rmtree(prepared.folder.checkpoints)
    prepared.folder.set_status("stopped", 3)
    with pytest.raises(BadInput, match="got to step 3 and has no checkpoint left"):
        make_run(tmp_path, tiny("llama"), resume="auto")


def test_resuming_nothing_is_said(tiny, tmp_path):
    prepared = make_run(tmp_path, tiny("llama"), resume="auto")
    assert prepared.info.resume_from is None
    assert any("no checkpoint yet: starting from the beginning" in line for line in prepared.data_lines)


def test_a_run_that_never_began_may_be_started_again(tiny, tmp_path):
    make_run(tmp_path, tiny("llama"))
    make_run(tmp_path, tiny("llama"))


@pytest.mark.parametrize("text", ["model: {pa", "model: x\nshards: 9\n", ""])
def test_a_damaged_run_folder_is_refused(tiny, tmp_path, text):
    prepared = _stopped(tiny, tmp_path)
    prepared.folder.config.write_text(text)
    with pytest.raises(BadInput, match=r"config\.yaml: is not the configuration of a run, or is damaged"):
        make_run(tmp_path, tiny("llama"), resume="auto")


def test_a_default_global_batch_is_kept_on_other_ranks(tiny, tmp_path):
    run_ranks(train, 2, make_run(tmp_path, tiny("llama"), global_batch=None), 3)
    prepared = make_run(tmp_path, tiny("llama"), world=1, global_batch=None, resume="auto")
    assert prepared.preview.plan.global_batch == 16


def test_a_model_without_a_tokenizer_is_refused(tiny, tmp_path):
    model = shutil.copytree(tiny("llama"), tmp_path / "model")
    for file in model.glob("tokenizer*"):
        file.unlink()
    with pytest.raises(BadInput, match="its tokenizer cannot be loaded"):
        make_run(tmp_path, model)


def test_a_global_batch_larger_than_the_rows_is_warned_about(tiny, tmp_path):
    prepared = make_run(tmp_path, tiny("llama"), global_batch=40, steps=1)
    assert any("a global batch of 40 rows holds only the" in line for line in prepared.data_lines)
    run_ranks(train, 2, prepared)
    (line,) = [json.loads(text) for text in prepared.folder.metrics.read_text().splitlines() if '"tokens"' in text]
    summary = json.loads((prepared.folder.data / "summary.json").read_text())
    assert line["tokens"] == summary["tokens"], "rows of padding are not tokens"


def test_two_answers_to_how_many_ranks_contradict(tiny, tmp_path):
    from shardwise.machine.detect import detect

    job = make_run(tmp_path, tiny("llama")).preview.job
    with pytest.raises(BadInput, match="cluster: '2xcpu': contradicts 3 ranks"):
        detect(job, 3)


def test_the_default_row_length_fits_the_model_and_a_longer_one_is_refused(tiny):
    from shardwise.machine.prepare import preview
    from shardwise.spec.job import Job

    given = {"model": {"path": str(tiny("llama"))}, "data": {"path": "rows.jsonl"}}
    assert preview(Job.model_validate(given), nproc=1).job.seq_len == 128
    with pytest.raises(BadInput, match="seq_len: 2048: is longer than the 128 positions"):
        preview(Job.model_validate({**given, "seq_len": 2048}), nproc=1)


def test_a_revision_of_a_local_folder_is_refused(tiny, tmp_path):
    with pytest.raises(BadInput, match=r"model\.revision: 'v9': has no effect"):
        make_run(tmp_path, tiny("llama"), model={"path": str(tiny("llama")), "revision": "v9"})


def test_inputs_that_only_moved_are_the_same(tiny, tmp_path):
    _stopped(tiny, tmp_path)
    moved = shutil.copytree(tiny("llama"), tmp_path / "moved")
    shutil.copy(tmp_path / "rows.jsonl", tmp_path / "same.jsonl")
    prepared = make_run(tmp_path, moved, resume="auto", data={"path": str(tmp_path / "same.jsonl"), "held_out": 0.3})
    assert prepared.info.resume_from is not None


def test_an_adapter_of_another_shape_is_refused(tiny, tmp_path):
    checkpoint = _stopped(tiny, tmp_path).folder.checkpoints / "step-000003"
    alone = shutil.copytree(checkpoint, tmp_path / "elsewhere" / "step-000003")
    with pytest.raises(BadInput, match="does not fit this model"):
        make_run(tmp_path, tiny("llama"), output=str(tmp_path / "other"), resume=str(alone), lora_rank=4)
