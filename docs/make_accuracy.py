"""Write docs/accuracy.md from the published measurements: python docs/make_accuracy.py"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

import accuracy_time
from accuracy_time import WORST, error_table
from pages import ROOT, write

from shardwise.predict.constants import GIB
from shardwise.trials import figures
from shardwise.trials.figures import skipped
from shardwise.trials.measured import read_rows
from shardwise.trials.refit import leave_one_out
from shardwise.trials.throughput_checks import check_times
from shardwise.trials.throughput_text import Findings, findings_of
from shardwise.trials.validate import RowCheck, check_rows

TARGET = Path(__file__).with_name("accuracy.md")
ROWS = ROOT / "bench" / "measurements" / "published.jsonl"

HEAD = """# How far off the predictions are

Made by `python docs/make_accuracy.py` from [published measurements](../bench/measurements/README.md); a test holds it
up to date. `shardwise validate bench/measurements/published.jsonl` prints the same and more, and takes rows of your
own.

Nothing here was measured by this project. A row is predicted from its fields alone: never from its id, its source or
its notes. What a row does not say (dropout of adapters, kind of checkpointing, kernels of norms) is taken as programs
of its kind have it, by the rules in `src/shardwise/trials/measured_plan.py`.

Memory: like is held against like, `allocated` and `active` against what tensors occupy, `reserved` and `unknown`
against what the allocator holds, `nvidia-smi` against what the card shows. What tensors occupy rests on no fitted
constant; the others rest on those of `src/shardwise/predict/constants.py`, and a replay of the allocator is yet to
come.

Throughput: tokens per second and GPU, from a simulation of one optimizer step; the constants are the same for all
rows. Where a row of several nodes does not name the network between them, one is assumed by the card (A100: 1600 Gb/s
RoCE, H100: 8 x 400 Gb/s InfiniBand), and the errors are given without those rows too.

These are not blind predictions: constants, and some laws too, were settled with these rows in sight. What each rests
on, and what a fit that leaves a source out can and cannot tell, stands [below](#what-it-rests-on). Other evidence is
steps on CPUs, predicted from a probe before they ran ([time_lab.md](time_lab.md)), and effects of changes that users
reported ([directions.md](directions.md)); both have also shown faults that were then mended.

"""

CAUSES = """
What is known of the causes:

- LIT: queries, keys and values come out of one projection in that program, whose memory the values keep whole, and
  adapters on parts of it save what they add; the classes of transformers that stand in have neither. That is 2.5 hidden
  states per block. The rows of phi-1.5 miss 2.5 more, for which we know no reason.
- TT-061 and TT-062 have the settings of TT-015, which measured 13 GiB more: versions of the program differ.
- TT-048 and TT-067: their loss is compiled, and what a compiler keeps of a block is not known by formula.
- FQL: what the allocator holds there is further above what tensors occupy than elsewhere, most with offloading.
- QWEN-069: from 4096 to 8192 tokens the figure grows by 4.9 GiB, and whole logits in fp32 alone would take 7.0.
"""


@cache
def memory() -> list[RowCheck]:
    """Return the rows with their memory."""
    return check_rows(read_rows(ROWS))


@cache
def throughput() -> Findings:
    """Return what is found out about the throughput of the rows."""
    return findings_of(check_times(read_rows(ROWS)))


def page() -> str:
    """Return the whole page."""
    found = throughput()
    return (
        HEAD
        + "\n".join([*accuracy_time.throughput(found), "", *accuracy_time.rests(found), "", *_memory(memory())])
        + "\n"
    )


def _memory(checks: Sequence[RowCheck]) -> Iterator[str]:
    yield "## Peak memory"
    yield ""
    yield "Absolute relative errors; bias is the median of the signed ones, above 0 where predictions are too high."
    yield ""
    yield from error_table(
        {
            "headline rows, allocated or active": figures.of_rows(checks, tensors=True, headline=True),
            "all rows, allocated or active": figures.of_rows(checks, tensors=True),
            "headline rows, others": figures.of_rows(checks, tensors=False, headline=True),
            "all rows, others": figures.of_rows(checks, tensors=False),
            **{f"source {name}": figure for name, figure in figures.by_source(checks).items()},
            **{f"{left.source}, constants fitted without it": left.errors for left in leave_one_out(checks)},
        }
    )
    yield ""
    yield "### Peaks that are furthest off"
    yield ""
    yield "| row | predicted, GiB | measured, GiB | statistic | error | highest instant | assumed in the row |"
    yield "|---|--:|--:|---|--:|---|---|"
    yield from (_worst(check) for check in figures.worst(checks, WORST))
    yield CAUSES
    yield "### Does it fit?"
    yield ""
    yield from _fits(checks)
    yield ""
    yield "### Peaks that are not predicted"
    yield ""
    yield from (f"- {count} rows: {reason}" for reason, count in skipped(checks).items())


def _worst(check: RowCheck) -> str:
    memory, predicted = check.memory, check.predicted
    assert memory is not None
    assert predicted is not None
    largest = sorted(predicted.peak.live.items(), key=lambda part: -part[1])[:2]
    sizes = ", ".join(f"{name.replace('_', ' ')} {size / GIB:.1f}" for name, size in largest)
    guesses = ", ".join(f"`{name}`" for name in check.row.assumed if name.startswith(("plan.", "lora.", "model.")))
    return (
        f"| {check.row.id} | {memory.predicted:.2f} | {memory.measured:.2f} | {memory.statistic} |"
        f" {memory.relative_error:+.1%} | {predicted.peak.phase.replace('_', ' ')}: {sizes} GiB | {guesses} |"
    )


def _fits(checks: Sequence[RowCheck]) -> Iterator[str]:
    table = figures.confusion(checks)
    yield "| | called fitting | called out of memory |"
    yield "|---|--:|--:|"
    yield f"| ran | {table.fits_called_fitting} | {table.fits_called_oom} |"
    yield f"| ran out of memory | {table.oom_called_fitting} | {table.oom_called_oom} |"
    wrong = ", ".join(check.row.id for check in figures.wrongly_called(checks))
    yield ""
    yield f"Called wrongly: {wrong}." if wrong else "None was called wrongly."


PAGES = {TARGET: page}
"""Page -> what makes its whole text."""


if __name__ == "__main__":
    write(PAGES)
