"""`shardwise validate`: predictions against published or own measurements."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer


def validate(
    file: Annotated[Path, typer.Argument(help="Measurements, one JSON object a line (bench/measurements/README.md).")],
    by: Annotated[
        Literal["estimate", "trace"],
        typer.Option(
            help="What predicts memory. estimate: by formula; trace: the real model in fake tensors, FSDP2 and one"
            " process only."
        ),
    ] = "estimate",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for machines.")] = False,
) -> None:
    """Predict memory and throughput of every row of a file of measurements and print how far off they are."""
    from shardwise.trials.measured import read_rows
    from shardwise.trials.throughput_checks import check_times
    from shardwise.trials.throughput_text import findings_of
    from shardwise.trials.validate import check_rows
    from shardwise.trials.validate_text import as_json as to_json
    from shardwise.trials.validate_text import as_text

    rows = read_rows(file)
    checks = check_rows(rows, by)
    throughput = findings_of(check_times(rows))
    if as_json:
        import json

        print(json.dumps(to_json(checks, by, throughput), indent=1))
    else:
        print(as_text(checks, by, throughput))
