"""`shardwise train` and plain torchrun as a person starts them: real processes, real signals."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from safetensors.torch import load_file

from harness.runs import write_rows

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent

LORA = """
data: {path: rows.jsonl, held_out: 0.3}
fsdp: full_shard
use_lora: true
lora_rank: 3
lora_dropout: 0.1
seq_len: 64
global_batch: 4
learning_rate: 1e-2
cluster: 2xcpu
checkpoint: 3
sample: what is 3?
"""


def _workplace(tmp_path, model, text=LORA):
    write_rows(tmp_path / "rows.jsonl", 40)
    (tmp_path / "config.yaml").write_text(f"model: {model}\n{text}")
    return tmp_path


def _start(folder, *arguments, program="shardwise"):
    return subprocess.Popen(
        [str(BIN / program), *arguments],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
    )


def _finish(process, timeout=120):
    output, _ = process.communicate(timeout=timeout)
    return process.returncode, output


def _wait_for_step(folder, step, timeout=90):
    """Wait until `metrics.jsonl` tells of a step."""
    until = time.monotonic() + timeout
    while time.monotonic() < until:
        if folder.is_file() and any(json.loads(line)["step"] >= step for line in folder.read_text().splitlines()[:-1]):
            return
        time.sleep(0.02)
    raise AssertionError(f"step {step} never came")


def _exported(run):
    return load_file(run / "export" / "merged" / "model.safetensors")


def _same(one, other):
    return one.keys() == other.keys() and all(one[name].equal(other[name]) for name in one)


def test_killed_or_stopped_then_resumed_exports_the_same_files(tiny, tmp_path):
    folder = _workplace(tmp_path, tiny("llama"))
    code, output = _finish(_start(folder, "train", "config.yaml", "steps=40", "output=whole"))
    assert code == 0, output
    last = output.strip().splitlines()[-1]
    assert re.fullmatch(r"held-out loss: \d\.\d\d \(before: \d\.\d\d\)", last), output
    assert "opened adapter in a fresh process: logits equal" in output
    assert "opened merged in a fresh process: logits equal" in output
    assert "before: " in output
    assert "after:  " in output

    killed = _start(folder, "train", "config.yaml", "steps=40", "output=killed")
    _wait_for_step(folder / "killed" / "metrics.jsonl", 5)
    ranks = [p for p in psutil.Process(killed.pid).children(recursive=True) if "shardwise.cli.rank" in p.cmdline()]
    assert len(ranks) == 2
    ranks[1].send_signal(signal.SIGKILL)
    code, output = _finish(killed)
    assert code == 4, output
    assert "Traceback" not in output

    stopped = _start(folder, "train", "config.yaml", "--resume", "auto", "steps=40", "output=killed")
    _wait_for_step(folder / "killed" / "metrics.jsonl", 12)
    stopped.send_signal(signal.SIGTERM)
    code, output = _finish(stopped)
    assert code == 3, output
    assert re.search(r"resumed from step-0000\d\d", output)
    command = re.search(r"stopped at step \d+ of 40.*resume with: (.*)", output).group(1)

    code, output = _finish(_start(folder, *command.split()[1:]))
    assert code == 0, output
    assert output.strip().splitlines()[-1] == last
    assert _same(_exported(folder / "killed"), _exported(folder / "whole"))
    steps = [json.loads(line) for line in (folder / "killed" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in steps if "loss" in line] == list(range(1, 41))


def test_ctrl_c_leaves_a_checkpoint(tiny, tmp_path):
    folder = _workplace(tmp_path, tiny("llama"))
    process = _start(folder, "train", "config.yaml", "steps=2000", "output=run", "checkpoint=1000")
    _wait_for_step(folder / "run" / "metrics.jsonl", 3)
    process.send_signal(signal.SIGINT)
    code, output = _finish(process)
    assert code == 3, output
    assert "Traceback" not in output
    assert len(list((folder / "run" / "checkpoints").glob("step-*"))) == 1
    assert json.loads((folder / "run" / "status.json").read_text())["state"] == "stopped"


ARTICLE = """
data: rows.jsonl
fsdp:
  - full_shard
mixed_precision: fp16
use_lora: true
lora_rank: 64
activation_checkpointing: true
"""


def test_the_articles_command(tiny, tmp_path):
    folder = _workplace(tmp_path, tiny("llama"), ARTICLE)
    arguments = ["--nproc_per_node=2", str(ROOT / "train.py"), "config.yaml", "steps=2", "seq_len=64"]
    code, output = _finish(_start(folder, *arguments, program="torchrun"))
    assert code == 0, output
    assert "FULL_SHARD = replicate 1 x shard 2" in output
    assert "40 times slower" in output
    assert re.search(r"training loss: \d\.\d\d\s*$", output)
    plan = (folder / "runs" / "config" / "plan.yaml").read_text()
    assert "param: fp16" in plan
    assert "activation_checkpointing: full" in plan
    assert (folder / "runs" / "config" / "export" / "adapter" / "adapter_model.safetensors").is_file()
    assert list((folder / "runs" / "config" / "tensorboard").glob("events*"))


def test_bad_input_under_torchrun_ends_every_rank_with_code_two(tiny, tmp_path):
    folder = _workplace(tmp_path, tiny("llama"), ARTICLE.replace("full_shard", "full_shrad"))
    before = sorted(path.name for path in folder.iterdir())
    code, output = _finish(
        _start(folder, "--nproc_per_node=2", str(ROOT / "train.py"), "config.yaml", program="torchrun")
    )
    assert code != 0
    assert output.count("did you mean 'full_shard'?") == 1
    assert set(re.findall(r"exitcode  : (-?\d+)", output)) == {"2"}
    assert sorted(path.name for path in folder.iterdir()) == before


def test_a_run_whose_numbers_explode_fails_with_one_line(tiny, tmp_path):
    folder = _workplace(tmp_path, tiny("llama"), LORA.replace("1e-2", "1e+18"))
    code, output = _finish(_start(folder, "train", "config.yaml", "steps=9", "output=run", "max_grad_norm=null"))
    assert code == 4, output
    assert "not finite" in output
    assert "Traceback" not in output
    assert "Traceback" in (folder / "run" / "errors" / "rank-0.txt").read_text()
    assert json.loads((folder / "run" / "status.json").read_text())["state"] == "failed"
