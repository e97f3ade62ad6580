"""What every rank runs, under `shardwise train` and under plain torchrun."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from shardwise.machine.detect import backend_of
from shardwise.report.run_folder import RunFolder, RunInfo
from shardwise.report.terminal import problems_text
from shardwise.spec.problems import BadInput, Problem
from shardwise.train.signals import StopSignal

FINISHED, UNVERIFIED, BAD_INPUT, STOPPED, FAILED = 0, 1, 2, 3, 4


def main_from_folder(arguments: list[str]) -> int:
    """Train the run folder that the launching process prepared; returns the exit code."""
    stop = StopSignal()
    stop.install()
    folder = RunFolder(Path(arguments[0]))
    return _guarded(folder, lambda: _train(folder, folder.read_info(), stop))


def main_from_config(arguments: list[str]) -> int:
    """Train a configuration under plain torchrun: rank 0 prepares the run, every rank then reads it."""
    stop = StopSignal()
    stop.install()
    if not arguments or "RANK" not in os.environ:
        print("usage: torchrun --nproc_per_node=N train.py config.yaml [key=value ...]", file=sys.stderr)
        return BAD_INPUT
    return _guarded(None, lambda: _prepare_and_train(arguments, stop))


def _guarded(folder: RunFolder | None, body: Callable[[], int]) -> int:
    """Turn what goes wrong into an exit code and one line; the traceback goes into the run folder."""
    try:
        return body()
    except BadInput as error:
        if folder is not None:
            print(f"rank {os.environ['RANK']}: {error}", file=sys.stderr, flush=True)
            folder.set_status("failed", 0, str(error))
        elif int(os.environ["RANK"]) == 0:
            print(problems_text(error), file=sys.stderr, flush=True)
        return BAD_INPUT
    except Exception as error:  # noqa: BLE001 - the last frame of the process: everything must become an exit code
        return _report_failure(folder, error)


def _report_failure(folder: RunFolder | None, error: Exception) -> int:
    rank = int(os.environ["RANK"])
    text = traceback.format_exc()
    first = str(error).strip().splitlines()[0] if str(error).strip() else ""
    where = ""
    if folder is not None and folder.path.is_dir():
        folder.errors.mkdir(exist_ok=True)
        (folder.errors / f"rank-{rank}.txt").write_text(text)
        where = f" (traceback: {folder.errors / f'rank-{rank}.txt'})"
        if folder.read_status()["state"] != "failed":
            folder.set_status("failed", folder.read_status()["step"], f"rank {rank}: {first}")
    else:
        print(text, file=sys.stderr)
    print(f"rank {rank} failed: {type(error).__name__}: {first}{where}", file=sys.stderr, flush=True)
    return FAILED


def _device(device_type: str) -> torch.device:
    """This rank's device."""
    return torch.device("cuda", int(os.environ["LOCAL_RANK"])) if device_type == "cuda" else torch.device("cpu")


def _connect(device_type: str, backend: str) -> torch.device:
    """Join the process group; returns this rank's device."""
    device = _device(device_type)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(backend, timeout=timedelta(minutes=30), device_id=device if device.type == "cuda" else None)
    return device


def _prepare_and_train(arguments: list[str], stop: StopSignal) -> int:
    world = int(os.environ["WORLD_SIZE"])
    device_type = "cuda" if torch.cuda.is_available() else "cpu"
    _connect(device_type, backend_of(device_type))
    handed: list[Any] = [None]
    if dist.get_rank() == 0:
        handed = [_prepare(arguments, world)]
    dist.broadcast_object_list(handed, src=0)
    if isinstance(handed[0], BadInput):
        dist.destroy_process_group()
        raise handed[0]
    folder = RunFolder(Path(handed[0]))
    info = folder.read_info()
    if info.device_type != device_type:
        raise BadInput(
            Problem(
                field="cluster",
                value=folder.read_job().cluster,
                reason=f"this torchrun has {device_type} ranks",
                fix="leave cluster out, or hide the GPUs with CUDA_VISIBLE_DEVICES=''",
            )
        )
    return _guarded(folder, lambda: _train(folder, info, stop))


def _prepare(arguments: list[str], world: int) -> str | BadInput:
    """Rank 0's part: everything that needs no rank; returns the run folder or what is wrong."""
    from shardwise.cli.start import prepare_and_show

    try:
        return str(prepare_and_show(Path(arguments[0]), arguments[1:], nproc=world, under_torchrun=True).folder.path)
    except BadInput as error:
        return error


def _train(folder: RunFolder, info: RunInfo, stop: StopSignal) -> int:
    from transformers.utils.logging import disable_progress_bar

    from shardwise.report.progress import Progress
    from shardwise.train.finish import finish
    from shardwise.train.loop import run
    from shardwise.train.metrics import memory_name
    from shardwise.train.training import start

    disable_progress_bar()  # rank 0 shows the run's own
    device = _device(info.device_type) if dist.is_initialized() else _connect(info.device_type, info.backend)
    first = dist.get_rank() == 0
    say = _print if first else _ignore
    training = start(folder, device=device, stop=stop, say=say)
    if first:
        with Progress(total=info.total_steps, start=training.step, memory_name=memory_name(device)) as progress:
            outcome = run(training, progress=progress)
    else:
        outcome = run(training, progress=None)
    if outcome.state == "stopped":
        if first:
            folder.set_status("stopped", outcome.step)
        say(
            f"stopped at step {outcome.step} of {info.total_steps}, saved as {outcome.checkpoint}; "
            f"resume with: {info.resume_command}"
        )
        code = STOPPED
    else:
        code = FINISHED if finish(training, outcome, say) else UNVERIFIED
    dist.barrier()  # torchrun ends the others as soon as one rank leaves with an exit code
    dist.destroy_process_group()
    return code


def _print(text: str) -> None:
    print(text, flush=True)


def _ignore(text: str) -> None:
    pass


def leave(code: int) -> NoReturn:
    """End this process with its exit code, whatever torchrun sends it meanwhile because another rank left first."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    leave(main_from_folder(sys.argv[1:]))
