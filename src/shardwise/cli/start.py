"""From a configuration to a prepared run, shown: shared by `shardwise train` and plain torchrun."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from shardwise.machine.prepare import PreparedRun, prepare_run, run_name
from shardwise.report.terminal import print_plan
from shardwise.spec.job import Job
from shardwise.spec.reader import read_job


def prepare_and_show(
    config: Path, overrides: Sequence[str], *, nproc: int | None, under_torchrun: bool = False
) -> PreparedRun:
    """Read, check, plan and write the run folder; print plan, unit table and data.

    Raises:
        BadInput: before anything is written.
    """
    job = read_job(config, overrides)

    def resume_line(resolved: Job) -> str:
        kept = [item for item in overrides if not item.startswith(("output=", "output_dir=", "resume="))]
        tail = [str(config), *kept, f"output={resolved.output}"]
        if under_torchrun:
            return shlex.join(["torchrun", f"--nproc_per_node={nproc}", "train.py", *tail, "resume=auto"])
        count = [] if nproc is None else ["--nproc", str(nproc)]
        return shlex.join(["shardwise", "train", *tail, *count, "--resume", "auto"])

    run = prepare_run(job, name=run_name(config), nproc=nproc, command=resume_line)
    console = Console(soft_wrap=True)
    preview = run.preview
    print_plan(
        console, preview.plan, preview.job, preview.units, f"{preview.devices.world} ranks: {preview.devices.why}"
    )
    for line in run.data_lines:
        console.print(line, highlight=False)
    for warning in preview.warnings():
        console.print(warning, highlight=False)
    console.print(f"{run.info.total_steps} steps; run folder: {run.folder.path}", highlight=False)
    return run
