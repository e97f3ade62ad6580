"""Small prepared runs."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import torch

from shardwise.engine.names import base_name
from shardwise.machine.prepare import PreparedRun, prepare_run
from shardwise.spec.job import Job
from shardwise.state.live import reshard
from shardwise.train import loop
from shardwise.train.loop import run
from shardwise.train.signals import StopSignal
from shardwise.train.training import start


def write_rows(path: Path, rows: int = 7) -> Path:
    """Question and answer rows of uneven length."""
    with path.open("w") as file:
        for i in range(rows):
            answer = "the answer is " + "so " * (i % 5) + str(i)
            file.write(json.dumps({"instruction": f"what is {i}?", "output": answer}) + "\n")
    return path


def make_run(folder: Path, model_folder: Path, *, world: int = 2, **fields: object) -> PreparedRun:
    """Prepare a LoRA run in `folder / "run"`."""
    rows = folder / "rows.jsonl"
    if not rows.exists():
        write_rows(rows, 9)
    given: dict[str, object] = {
        "model": {"path": str(model_folder)},
        "data": {"path": str(rows), "held_out": 0.3},
        "output": str(folder / "run"),
        "use_lora": True,
        "lora_rank": 3,
        "lora_dropout": 0.1,
        "seq_len": 64,
        "global_batch": 4,
        "micro_batch": 1,
        "steps": 6,
        "learning_rate": 1e-2,
        "cluster": f"{world}xcpu",
        "log": {"tensorboard": False},
        **fields,
    }
    return prepare_run(Job.model_validate(given), name="run", nproc=None, command=lambda job: "resume me")


def train(
    rank: int, world: int, prepared: PreparedRun, stop_after: int | None = None, stop_within: int | None = None
) -> dict[str, object]:
    """Body for `run_ranks`: the product's loop; a SIGTERM to the last rank after `stop_after` steps.

    With `stop_within` it comes in the middle of the step after that many, and every step counts as slow.
    """
    stop = StopSignal()
    stop.install()
    training = start(prepared.folder, device=torch.device("cpu"), stop=stop, say=lambda text: None)
    if stop_after is not None and rank == world - 1:

        def ask_to_stop(optimizer, args, kwargs):
            if training.step + 1 == stop_after:
                signal.raise_signal(signal.SIGTERM)

        training.optimizer.register_step_post_hook(ask_to_stop)
    if stop_within is not None:
        loop.SLOW_STEP_S = 0.0
        if rank == world - 1:

            def ask_within(module, args, kwargs, output):
                if training.step == stop_within and module.training:
                    signal.raise_signal(signal.SIGTERM)

            training.model.register_forward_hook(ask_within, with_kwargs=True)
    outcome = run(training, progress=None)
    reshard(training.model)
    return {
        "state": outcome.state,
        "step": outcome.step,
        "samples_seen": training.samples_seen,
        "first_loss": outcome.first_loss,
        "last_loss": outcome.last_loss,
        "weights": {
            base_name(name): p.full_tensor().clone() for name, p in training.model.named_parameters() if p.requires_grad
        },
        "moments": [
            {key: value.full_tensor() if hasattr(value, "full_tensor") else value for key, value in state.items()}
            for state in training.optimizer.state.values()
        ],
    }


def metrics(prepared: PreparedRun) -> list[dict[str, object]]:
    """Lines of `metrics.jsonl`."""
    return [json.loads(line) for line in prepared.folder.metrics.read_text().splitlines()]
