"""Plans, unit tables and problems as text for a terminal or a log."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from dataclasses import replace

from rich.console import Console
from rich.text import Text

from shardwise.report.plan_words import decisions
from shardwise.spec.job import Job
from shardwise.spec.plan import Plan
from shardwise.spec.problems import BadInput, Problem
from shardwise.spec.units import UnitGroup, UnitTable

_GIB, _MIB, _KIB = 2**30, 2**20, 2**10
_INDENT = 2
_SMALLEST_NAME = 12
_LABELS = _INDENT + len("checkpointing") + 2
_NO_FLAGS = "--"


def bytes_text(count: float) -> str:
    """Return a number of bytes in GiB (2^30), MiB (2^20) or, for very little, KiB and bytes."""
    if count >= _GIB:
        return f"{count / _GIB:.2f} GiB"
    if count >= _MIB / 10 or count == 0:
        return f"{count / _MIB:.1f} MiB"
    return f"{count / _KIB:.1f} KiB" if count >= _KIB else f"{count:.0f} B"


def problems_text(error: BadInput) -> str:
    """Return every problem, numbered when there are several; what is allowed and the remedy have lines of their own."""
    texts = [_problem_lines(problem) for problem in error.problems]
    if len(texts) == 1:
        return "\n    ".join(texts[0])
    width = len(str(len(texts)))
    numbered = [f"{number:>{width}}. " + "\n    ".join(lines) for number, lines in enumerate(texts, start=1)]
    return "\n".join([f"{len(texts)} problems:", *numbered])


def _problem_lines(problem: Problem) -> list[str]:
    lines = [str(replace(problem, allowed="", fix=""))]
    if problem.allowed:
        lines.append(f"allowed: {problem.allowed}")
    if problem.fix:
        lines.append(problem.fix)
    return lines


def print_plan(console: Console, plan: Plan, job: Job, units: UnitTable | None = None, device_note: str = "") -> None:
    """Print a plan with its reasons, and the unit table when there is one.

    Args:
        console: Where to print; colour and width are its own.
        plan: The plan.
        job: The job that it was made for.
        units: Units of the model; None when the model is not at hand.
        device_note: Where it runs, and how that was found.
    """
    for label, value in _head(job, device_note):
        print_row(console, label, value)
    console.print()
    told: set[str] = set()
    for label, value, fields in decisions(plan, job):
        print_row(console, label, value)
        told.update(fields)
        for field in fields:
            if field in plan.reasons:
                part = field.rpartition(".")[2] + " " if "." in field else ""
                print_row(console, "", part + plan.reasons[field], style="dim")
    for field, reason in plan.reasons.items():
        if field not in told:
            print_row(console, field, reason, style="dim")
    print_row(console, "fingerprint", plan.fingerprint())
    if units is not None and units.rows:
        print_units(console, units, ranks=plan.mesh.shard, tensor=plan.mesh.tensor)


def print_row(console: Console, label: str, value: str, *, style: str = "") -> None:
    """Print a label and its words, continued below where they are longer than the line."""
    width = max(console.width - _LABELS, _SMALLEST_NAME)
    lines = textwrap.wrap(value, width, break_long_words=False, break_on_hyphens=False)
    for number, line in enumerate(lines):
        start = (" " * _INDENT + (label if number == 0 else "")).ljust(_LABELS - 1) + " "
        _print_line(console, Text.assemble((start, "bold"), (_tail(line, width), style)))


def _print_line(console: Console, line: Text) -> None:
    """Print a line as it is; a terminal that is too narrow wraps it by itself."""
    console.print(line, soft_wrap=True, highlight=False)


def _head(job: Job, device_note: str) -> Iterator[tuple[str, str]]:
    yield "model", job.model.path + (f" at {job.model.revision}" if job.model.revision else "")
    if job.data is not None:
        yield "data", job.data.path
    if job.use_lora:
        alpha = job.lora_alpha if job.lora_alpha is not None else 2.0 * job.lora_rank
        targets = job.lora_targets if isinstance(job.lora_targets, str) else ", ".join(job.lora_targets)
        whole = f"; {', '.join(job.lora_modules_to_save)} trained whole" if job.lora_modules_to_save else ""
        yield "method", f"LoRA rank {job.lora_rank}, alpha {alpha:g}, dropout {job.lora_dropout:g}, on {targets}{whole}"
    else:
        yield "method", "full fine-tuning"
    if device_note:
        yield "runs on", device_note


_DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


def print_units(console: Console, units: UnitTable, *, ranks: int, tensor: int = 1) -> None:
    """Print the unit table, with equal units in one row, and what one rank stores.

    Args:
        console: Where to print.
        units: Units of the model.
        ranks: How many ranks share the shards.
        tensor: How many more share the weights that tensor parallelism splits.
    """
    groups = units.grouped()
    rows = [_cells(group) for group in groups]
    totals = [f"{units.parameters:,}", f"{units.trainable:,}", "", bytes_text(units.stored_bytes)]
    headers = ["parameters", "trainable", "gathered", "stored"]
    widths = [max(len(row[column]) for row in [headers, totals, *rows]) for column in range(len(headers))]
    names = max(console.width - _INDENT - len(_NO_FLAGS) - sum(widths) - 2 * len(widths) - 2, _SMALLEST_NAME)

    def line(name: str, flags: str, cells: list[str]) -> str:
        figures = "".join(f"  {cell:>{width}}" for cell, width in zip(cells, widths, strict=True))
        return f"{'':{_INDENT}}{_tail(name, names):<{names}}  {flags:2}{figures}"

    console.print()
    _print_line(console, Text(line("unit (each)", "", headers), "bold"))
    for group, row in zip(groups, rows, strict=True):
        _print_line(console, Text(line(group.name or "(root)", _flags(group), row)))
        _print_line(console, Text(" " * _INDENT + _kind(group), "dim"))
    _print_line(console, Text(line(f"all {len(units.rows)}", "", totals), "bold"))
    for note in _unit_notes(units, ranks, tensor):
        _print_line(console, Text(" " * _INDENT + note))


def _cells(group: UnitGroup) -> list[str]:
    row = group.row
    return [f"{row.parameters:,}", f"{row.trainable:,}", bytes_text(row.gathered_bytes), bytes_text(row.stored_bytes)]


def _kind(group: UnitGroup) -> str:
    """Return the line below a unit: what it is, its stored bytes by dtype, its largest contiguous buffer."""
    row = group.row
    what = row.kind if group.count == 1 else f"{group.count} x {row.kind}"
    stored = " + ".join(
        f"{_DTYPES.get(dtype, dtype)} {bytes_text(size)}" for dtype, size in row.stored_by_dtype.items()
    )
    return f"{what}; {stored}; largest buffer {bytes_text(row.largest_buffer_bytes)}"


def _flags(group: UnitGroup) -> str:
    freed, recomputed = group.row.reshard_after_forward, group.row.checkpointed
    return ("F" if freed else _NO_FLAGS[0]) + ("R" if recomputed else _NO_FLAGS[1])


def _unit_notes(units: UnitTable, ranks: int, tensor: int) -> Iterator[str]:
    freed = {row.reshard_after_forward for row in units.rows if row.reshard_after_forward is not False}
    groups = [size for size in freed if not isinstance(size, bool)]
    if groups:
        yield f"F: kept in groups of {groups[0]} ranks after forward, gathered there in backward"
    elif freed:
        yield "F: freed after forward and gathered again in backward"
    if any(row.checkpointed for row in units.rows):
        yield "R: activations recomputed in backward"
    share = "all" if ranks == 1 else f"1/{ranks}"
    limit = "at most " if tensor > 1 else ""
    stored = f"{bytes_text(units.stored_bytes)} = {bytes_text(units.stored_bytes / ranks)}"
    yield f"one rank stores {limit}{share} of {stored}"
    if units.largest is not None:
        name = units.largest.name or "(root)"
        yield f"biggest unit when gathered: {name}, {bytes_text(units.largest.gathered_bytes)}"


def _tail(text: str, width: int) -> str:
    """Shorten at the front, as the end of a module name tells more."""
    return text if len(text) <= width else ".." + text[len(text) - width + 2 :]
