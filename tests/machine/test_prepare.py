"""Everything is checked before anything is written or started."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from harness.runs import make_run, write_rows
from shardwise.machine.prepare import preview
from shardwise.report.run_folder import choose_folder
from shardwise.spec.job import Job
from shardwise.spec.problems import BadInput


def _write(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {"path": str(path)}


BAD = {
    "missing data": (lambda tmp: {"data": {"path": str(tmp / "rowz.jsonl")}}, r"rowz\.jsonl.*did you mean"),
    "empty data": (lambda tmp: {"data": _write(tmp / "e.jsonl")}, r"e\.jsonl"),
    "rows without labels": (
        lambda tmp: {"data": _write(tmp / "n.jsonl", {"instruction": "a", "output": ""})},
        "token to learn",
    ),
    "unknown format": (lambda tmp: {"data": _write(tmp / "u.jsonl", {"q": "a", "a": "b"})}, "u.jsonl"),
    "targets": (lambda tmp: {"lora_targets": ["wq"]}, "lora_targets: 'wq': matches no linear layer"),
    "seq_len": (lambda tmp: {"seq_len": 4096}, "seq_len: 4096: is longer than the 128 positions"),
    "global batch": (lambda tmp: {"global_batch": 5}, "global_batch: 5: is not a multiple"),
    "model": (lambda tmp: {"model": {"path": str(tmp / "nowhere")}}, "model: .*is not a folder"),
    "resume": (lambda tmp: {"resume": str(tmp / "nothing")}, "resume: .*does not exist"),
    "evaluation": (
        lambda tmp: {"data": {"path": str(tmp / "rows.jsonl")}, "log": {"evaluate_every": 3}},
        "log.evaluate_every: 3: has no effect",
    ),
    "warm-up": (
        lambda tmp: {"steps": None, "epochs": 1.0, "warmup_steps": 50},
        "warmup_steps: 50: is more than the run's",
    ),
    "output is a file": (lambda tmp: {"output": str(tmp / "rows.jsonl")}, "output: .*is a file"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_named_and_nothing_is_written(tiny, tmp_path, name):
    write_rows(tmp_path / "rows.jsonl")
    fields, words = BAD[name]
    before = {path.name for path in tmp_path.iterdir()}
    given = fields(tmp_path)
    before |= {path.name for path in tmp_path.glob("*.jsonl")}
    with pytest.raises(BadInput, match=words):
        make_run(tmp_path, tiny("llama"), **given)
    assert {path.name for path in tmp_path.iterdir()} == before


def test_a_tokenizer_larger_than_the_embedding(tiny, tmp_path):
    """Ids that the embedding has no row for would read other memory or crash."""
    folder = shutil.copytree(tiny("llama", vocab=81), tmp_path / "model")
    big = tiny("llama")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(big / name, folder / name)
    write_rows(tmp_path / "rows.jsonl")
    with pytest.raises(BadInput, match="81"):
        make_run(tmp_path, folder)


def _job(model, **fields):
    return Job.model_validate({"model": {"path": str(model)}, "data": {"path": "rows.jsonl"}, **fields})


def test_preview_reads_no_data_and_lists_the_units(tiny):
    seen = preview(_job(tiny("llama"), use_lora=True, fsdp={"strategy": "FULL_SHARD"}), nproc=4)
    assert seen.plan.mesh.shard == 4
    assert seen.units is not None
    assert [row.name for row in seen.units.rows] == ["model.layers.0", "model.layers.1", "model.layers.2", "root"]
    assert all(row.reshard_after_forward for row in seen.units.rows[:3])
    assert seen.job.learning_rate == 2e-4
    assert seen.job.global_batch == 32


def test_preview_without_the_model(tmp_path):
    seen = preview(_job(tmp_path / "absent", use_lora=True, fsdp={"strategy": "FULL_SHARD"}), nproc=8)
    assert seen.units is None
    assert seen.plan.dtypes.frozen_storage == "checkpoint"
    with pytest.raises(BadInput, match="fsdp: 'auto': needs the model's size"):
        preview(_job(tmp_path / "absent"), nproc=8)


def test_fp16_on_cpu_is_warned_about(tiny):
    seen = preview(_job(tiny("llama"), mixed_precision={"param_dtype": "fp16"}), nproc=2)
    assert any("40 times slower" in warning for warning in seen.warnings())
    assert preview(_job(tiny("llama")), nproc=2).warnings() == []


def test_default_run_folders_are_numbered(tiny, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    job = _job(tiny("llama"))
    assert str(choose_folder(job, "demo").path) == "runs/demo"
    (tmp_path / "runs" / "demo").mkdir(parents=True)
    (tmp_path / "runs" / "demo-2").mkdir()
    assert str(choose_folder(job, "demo").path) == "runs/demo-3"
    assert str(choose_folder(job.model_copy(update={"resume": "auto"}), "demo").path) == "runs/demo-2"


def test_checkpoint_tensors_without_a_place_in_the_model_are_named(tiny, tmp_path):
    folder = shutil.copytree(tiny("llama", layers=2), tmp_path / "model")
    stored = load_file(folder / "model.safetensors")
    spare = torch.ones(2)
    computed = {"model.layers.0.self_attn.rotary_emb.inv_freq": spare, "h.0.attn.bias": spare.clone()}
    save_file({**stored, **computed}, folder / "model.safetensors", {"format": "pt"})
    (tmp_path / "a").mkdir()
    assert not any("not used" in line for line in make_run(tmp_path / "a", folder).data_lines)

    extra = {f"model.layers.{index}.spare.weight": spare.clone() for index in range(2, 6)}
    for name, tensors, words in (
        ("b", {"vision.proj": spare.clone()}, "note: 1 tensor of the checkpoint is not used: vision.proj"),
        (
            "c",
            extra,
            "note: 4 tensors of the checkpoint are not used: "
            "model.layers.2.spare.weight, model.layers.3.spare.weight, model.layers.4.spare.weight, ...",
        ),
    ):
        save_file({**stored, **computed, **tensors}, folder / "model.safetensors", {"format": "pt"})
        (tmp_path / name).mkdir()
        assert words in make_run(tmp_path / name, folder).data_lines
