"""`shardwise config`: what a configuration really means; starts nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def config(
    file: Annotated[Path, typer.Argument(help="The YAML configuration.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="key=value, over the file.")] = None,
    nproc: Annotated[int | None, typer.Option(min=1, help="Plan for this many ranks.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for machines.")] = False,
) -> None:
    """Print the resolved configuration, the plan and the unit table; start nothing."""
    from shardwise.spec.reader import job_to_yaml, read_job

    job = read_job(file, overrides or [])
    from shardwise.machine.prepare import preview

    seen = preview(job, nproc=nproc)
    if as_json:
        import json

        units = None if seen.units is None else seen.units.model_dump(mode="json")
        text = {
            "job": seen.job.model_dump(mode="json"),
            "plan": {**seen.plan.model_dump(mode="json"), "fingerprint": seen.plan.fingerprint()},
            "units": units,
            "world": seen.devices.world,
        }
        print(json.dumps(text, indent=1))
        return
    from rich.console import Console

    from shardwise.report.terminal import print_plan

    print(job_to_yaml(seen.job))
    print_plan(
        Console(soft_wrap=True), seen.plan, seen.job, seen.units, f"{seen.devices.world} ranks: {seen.devices.why}"
    )
    print("not looked at here: data, output, resume")
    for warning in seen.warnings():
        print(warning)
    if seen.units is None:
        print(f"unit table: model not here ({job.model.path})")
