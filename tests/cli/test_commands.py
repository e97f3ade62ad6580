"""The command line in this process: what it prints, and how it ends."""

from __future__ import annotations

import json
import subprocess
import sys
import time

import pytest
from typer.testing import CliRunner

from harness.runs import write_rows
from shardwise.cli.main import app
from shardwise.spec.problems import BadInput

ARTICLE = """
fsdp:
  - full_shard
mixed_precision: fp16
use_lora: true
lora_rank: 64
activation_checkpointing: true
"""


def _config(tmp_path, model, text=ARTICLE):
    write_rows(tmp_path / "rows.jsonl")
    path = tmp_path / "config.yaml"
    path.write_text(f"model: {model}\ndata: {tmp_path / 'rows.jsonl'}\n{text}")
    return str(path)


def _invoke(*arguments):
    return CliRunner().invoke(app, list(arguments), catch_exceptions=False)


def test_config_prints_job_plan_and_units_and_starts_nothing(tiny, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = _invoke("config", _config(tmp_path, tiny("llama")), "--nproc", "8")
    assert result.exit_code == 0
    for words in (
        "FULL_SHARD = replicate 1 x shard 8",
        "param fp16, reduce fp32, output fp32, with dynamic loss scaling",
        "LoRA rank 64, alpha 128",
        "global batch 64 = 1 row x 8 ranks x 8 accumulation",
        "model.layers.0 .. 2",
        "3 x LlamaDecoderLayer",
    ):
        assert words in result.output, words
    assert not (tmp_path / "runs").exists()


def test_the_nested_form_means_the_same(tiny, tmp_path):
    nested = ARTICLE.replace("activation_checkpointing: true", "train: {activation_checkpointing: true}")
    flat = _invoke("config", _config(tmp_path, tiny("llama")), "--json")
    assert json.loads(flat.output) == json.loads(
        _invoke("config", _config(tmp_path, tiny("llama"), nested), "--json").output
    )


def test_config_as_json(tiny, tmp_path):
    result = json.loads(_invoke("config", _config(tmp_path, tiny("llama")), "--json", "--nproc", "2").output)
    assert result["plan"]["strategy"] == "FULL_SHARD"
    assert result["world"] == 2
    assert len(result["plan"]["fingerprint"]) == 12
    assert sum(row["parameters"] for row in result["units"]["rows"]) > 0


def test_config_without_the_model(tmp_path):
    result = _invoke("config", _config(tmp_path, tmp_path / "absent"), "--nproc", "8")
    assert result.exit_code == 0
    assert "unit table: model not here" in result.output
    assert "as in the checkpoint" in result.output or "checkpoint" in result.output


def test_schema_errors_come_first_and_need_no_model(tmp_path):
    config = _config(tmp_path, tmp_path / "absent", "fsdp: full_shrad\nlora_rank: 0\nuse_lora: 'true'\n")
    with pytest.raises(BadInput) as caught:
        _invoke("config", config)
    assert {problem.field for problem in caught.value.problems} >= {"fsdp", "lora_rank", "use_lora"}


def test_exit_code_two_and_one_text_without_a_traceback(tiny, tmp_path, monkeypatch):
    config = _config(tmp_path, tiny("llama"), "fsdp: full_shrad\n")
    started = [sys.executable, "-c", "from shardwise.cli.main import run; run()", "train", config]
    done = subprocess.run(started, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 2
    assert "did you mean 'full_shard'?" in done.stderr
    assert "Traceback" not in done.stderr + done.stdout
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.yaml", "rows.jsonl"]


def test_help_is_quick_and_needs_no_torch():
    program = (
        "import sys; from shardwise.cli.main import app; from typer.testing import CliRunner; "
        "result = CliRunner().invoke(app, ['--help']); assert result.exit_code == 0, result.output; "
        "assert 'train' in result.output and 'config' in result.output; "
        "heavy = [name for name in ('torch', 'transformers', 'peft', 'pyarrow') if name in sys.modules]; "
        "assert not heavy, heavy"
    )
    quickest = min(_seconds(program) for _ in range(3))
    assert quickest < 1.2, f"{quickest:.2f} s"  # 0.6 s on a quiet machine; tests share theirs


def _seconds(program):
    started = time.perf_counter()
    subprocess.run([sys.executable, "-c", program], check=True)
    return time.perf_counter() - started
