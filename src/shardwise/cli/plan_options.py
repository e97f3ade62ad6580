"""Options of `shardwise plan`: what they mean, and which do not go together."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from shardwise.cli.new_file import check_new_file
from shardwise.spec.problems import BadInput, Problem, did_you_mean

if TYPE_CHECKING:
    from shardwise.spec.report import Instrument
    from shardwise.spec.throughput import Price

INSTRUMENTS: tuple[Instrument, ...] = ("estimate", "trace", "run")
"""What `--by` takes."""


def check_options(*, table: bool, scale: str | None, perfetto: Path | None, by: str) -> None:
    """Refuse options that do not go together.

    Raises:
        BadInput: naming them.
    """
    problems = []
    if table and scale is not None:
        problems.append(
            Problem(field="--scale", value=scale, reason="does not go with --table", fix="give one of them")
        )
    if perfetto is not None and (table or scale is not None):
        reason = "writes the step of one plan, not of a table"
        problems.append(Problem(field="--perfetto", value=str(perfetto), reason=reason, fix="give it alone"))
    if scale is not None and by != "estimate":
        reason = "is by estimate: other instruments need the cards"
        problems.append(Problem(field="--scale", value=scale, reason=reason, fix="remove --by"))
    if problems:
        raise BadInput(problems)


def check_targets(output: Path | None, perfetto: Path | None) -> None:
    """Refuse files that cannot be made, or are one.

    Raises:
        BadInput: naming the option and the file.
    """
    for option, target in (("--output", output), ("--perfetto", perfetto)):
        if target is not None:
            check_new_file(option, target)
    if output is not None and perfetto is not None and output.resolve() == perfetto.resolve():
        reason, fix = "is the file of --output too", "name two files"
        raise BadInput(Problem(field="--perfetto", value=str(perfetto), reason=reason, fix=fix))


def read_price(per_gpu: float | None, per_node: float | None, *, table: bool) -> Price | None:
    """Return what cards cost; None where nothing is said.

    Raises:
        BadInput: no price, two of them, or nothing that it could be of use for.
    """
    from shardwise.spec.throughput import Price

    if per_gpu is None and per_node is None:
        return None
    option, amount = ("--price", per_gpu) if per_gpu is not None else ("--price-per-node", per_node)
    assert amount is not None
    if per_gpu is not None and per_node is not None:
        reason, fix = "is of one card, and --price-per-node of a machine", "give one of them"
        raise BadInput(Problem(field=option, value=amount, reason=reason, fix=fix))
    if table:
        reason = "has no use in --table, which is about memory"
        raise BadInput(Problem(field=option, value=amount, reason=reason, fix="remove it"))
    return Price(amount=amount, per="gpu" if per_gpu is not None else "node")


def read_instruments(by: str) -> tuple[Instrument, ...]:
    """Return the instruments of `--by`, each once, in the order given.

    Raises:
        BadInput: a name that is none.
    """
    names = list(dict.fromkeys(name.strip().lower() for name in by.split(",")))
    wrong = [name for name in names if name not in INSTRUMENTS]
    if wrong:
        allowed = f"{', '.join(INSTRUMENTS)}, or several with commas"
        fix = did_you_mean(wrong[0], INSTRUMENTS)
        reason = "is not an instrument"
        raise BadInput(Problem(field="--by", value=wrong[0], reason=reason, allowed=allowed, fix=fix))
    return tuple(name for name in INSTRUMENTS for given in names if given == name)
