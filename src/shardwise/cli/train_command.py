"""`shardwise train`: plan, start torchrun, train, check."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from types import FrameType
from typing import Annotated, NoReturn

import typer


def _stop_early(number: int, _frame: FrameType | None) -> NoReturn:
    print("stopped before any rank started; start it again when you like", flush=True)
    os._exit(3)


def train(
    file: Annotated[Path, typer.Argument(help="The YAML configuration.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="key=value, over the file.")] = None,
    nproc: Annotated[int | None, typer.Option(min=1, help="Number of ranks; default: every GPU, or 2 on CPU.")] = None,
    resume: Annotated[str | None, typer.Option(help="never, auto, or a checkpoint folder.")] = None,
) -> None:
    """Train a configuration on this machine and check what came out.

    Exit codes: 0 finished, 1 an export is not what was trained, 2 bad input, 3 stopped and resumable, 4 the run failed.
    """
    from shardwise.spec.reader import read_job

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _stop_early)  # torchrun takes over once there are ranks
    given = list(overrides or [])
    if resume is not None:
        given.append(f"resume={resume}")
    read_job(file, given)  # what is wrong in the file is said before the heavy imports
    from shardwise.cli.start import prepare_and_show
    from shardwise.machine.launch import launch

    run = prepare_and_show(file, given, nproc=nproc)
    raise typer.Exit(launch(run.folder, run.info))
