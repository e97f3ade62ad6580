"""`shardwise validate`: predictions against published or own measurements."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer


def validate(
    file: Annotated[Path, typer.Argument(help="Measurements, one JSON object a line (bench/measurements/README.md).")],
    by: Annotated[
        Literal["estimate", "trace"],
        typer.Option(help="estimate: by formula; trace: the real model in fake tensors, FSDP2 and one process only."),
    ] = "estimate",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for machines.")] = False,
) -> None:
    """Predict every row of a file of measurements and print how far off the predictions are."""
    from shardwise.trials.measured import read_rows
    from shardwise.trials.validate import check_rows
    from shardwise.trials.validate_text import as_json as to_json
    from shardwise.trials.validate_text import as_text

    checks = check_rows(read_rows(file), by)
    if as_json:
        import json

        print(json.dumps(to_json(checks, by), indent=1))
    else:
        print(as_text(checks, by))
