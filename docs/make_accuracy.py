"""Write docs/accuracy.md from the published measurements: python docs/make_accuracy.py"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from shardwise.predict.constants import GIB
from shardwise.trials import figures, throughput_figures, throughput_text
from shardwise.trials.figures import Errors
from shardwise.trials.measured import read_rows
from shardwise.trials.ranking import ranked, together
from shardwise.trials.refit import leave_one_out
from shardwise.trials.throughput_checks import TimeCheck, check_times
from shardwise.trials.throughput_text import Findings, findings_of, named_errors
from shardwise.trials.validate import RowCheck, check_rows
from shardwise.trials.validate_text import skipped

TARGET = Path(__file__).with_name("accuracy.md")
ROWS = Path(__file__).parent.parent / "bench" / "measurements" / "published.jsonl"

WORST = 12
"""Rows that the page names as furthest off."""

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

Throughput: tokens per second and GPU, from a simulation of one optimizer step. Its constants are those of
`src/shardwise/predict/pace/constants.py` and `src/shardwise/predict/links/constants.py`, each within bounds that its
source gives; they are the same for all rows. Where a row of several nodes does not name the network between them, one
is assumed by the card (A100: 1600 Gb/s RoCE, H100: 8 x 400 Gb/s InfiniBand), and the errors are given without those
rows too.

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


THROUGHPUT_CAUSES = """
What is known of the causes:

- LLMF-120, LLMF-121, LLMF-179, LLMF-068: the source contradicts itself. From LLMF-119 to LLMF-121 the same tokens are
  cut into shorter rows, which makes every other model and card faster and this one 9 % slower; LLMF-179 is a fifth
  slower than the same run on half and on twice as many GPUs; LLMF-068 is slower on 8 GPUs than LLMF-067 on 16.
- LLMF-020 to LLMF-026, LLMF-217, LLMF-218, LLMF-223: large models with few tokens per forward, where gathers and
  reductions are under way for a fifth to half of the step. They are hidden in the prediction, and cost more than the
  share of the device that is taken for them.
- LLMF-143, LLMF-144, LLMF-149 to LLMF-151: a model whose weights and optimizer states alone take two thirds of the
  card; on more GPUs the same model is predicted well. An allocator that runs out of memory, frees everything and
  starts again would explain it; the time of that is not modelled.
- TT-069, TT-072 and TT-073 have the same settings and differ by 7 %; so do TT-071, TT-075, TT-076, TT-078 and TT-079,
  by 16 %, which scale and gather numbers in fp8 differently and whose rows cannot say so. They are predicted alike.
- TT-095: tensor parallelism over 8 GPUs with 32 rows per forward. We know no reason.
- FMSA-002 and FMSA-004: two GPUs, whose link the source does not name; NVLink is assumed.
- FQL-033: the same program on A100 (FQL-031, FQL-032) is predicted well; we know no reason.
- FQL, QWEN: adapters double the number of pointwise operations. Their tensors of some ten MB stay in the card's cache,
  whose speed is not modelled, and predictions are too slow.
"""


def page() -> str:
    """Return the whole page."""
    rows = read_rows(ROWS)
    memory, throughput = _memory(check_rows(rows)), _throughput(findings_of(check_times(rows)))
    return HEAD + "\n".join([*throughput, "", *memory]) + "\n"


def _throughput(found: Findings) -> Iterator[str]:
    checks = found.checks
    yield "## Throughput"
    yield ""
    yield "Absolute relative errors; bias is the median of the signed ones, above 0 where predictions are too fast."
    yield ""
    yield from _table(
        {
            **named_errors(found),
            **{f"source {name}": figure for name, figure in throughput_figures.by_source(checks).items()},
            **{f"card {name}": figure for name, figure in throughput_figures.by_card(checks).items()},
            **{
                f"{left.source}, constants fitted without it": left.errors
                for left in (found.left_out.sources if found.left_out else ())
            },
        }
    )
    yield ""
    yield "The flat rule takes every program to turn 45 % of its card's dense peak in 16 bits into the model's FLOPs,"
    yield "counted as for MFU."
    yield ""
    yield "### Order of plans"
    yield ""
    yield "Pairs of rows of one source that differ in one decision and by more than 5 %, and how many of them are"
    yield "predicted in the right order."
    yield ""
    yield from _order(found)
    yield ""
    yield "### Throughputs that are furthest off"
    yield ""
    yield "| row | predicted, tokens/s/GPU | measured | error | step | assumed |"
    yield "|---|--:|--:|--:|---|---|"
    yield from (_slow(check) for check in throughput_figures.furthest(checks, WORST))
    yield THROUGHPUT_CAUSES
    yield "### Throughputs that are not predicted"
    yield ""
    yield from (f"- {count} rows: {reason}" for reason, count in throughput_text.skipped(checks).items())


def _order(found: Findings) -> Iterator[str]:
    by_field = ranked(found.pairs)
    yield "| decision | pairs | right |"
    yield "|---|--:|--:|"
    for field, count in by_field.items():
        yield f"| `{field}` | {count.pairs} | {count.right} |"
    total = together(by_field.values())
    yield f"| all | {total.pairs} | {total.right} |"
    wrong = [throughput_text.wrong_text(pair) for pair in found.pairs if not pair.right]
    if wrong:
        yield ""
        yield f"Wrong: {'; '.join(wrong)}."


def _slow(check: TimeCheck) -> str:
    timed, error = check.timed, check.relative_error
    assert timed is not None
    assert error is not None
    step = throughput_text.step_text(timed.timeline)
    guesses = ", ".join(f"`{name}`" for name in throughput_text.guessed(check))
    return f"| {check.row.id} | {timed.tokens_per_s:.0f} | {check.measured:.0f} | {error:+.1%} | {step} | {guesses} |"


def _memory(checks: Sequence[RowCheck]) -> Iterator[str]:
    yield "## Peak memory"
    yield ""
    yield "Absolute relative errors; bias is the median of the signed ones, above 0 where predictions are too high."
    yield ""
    yield from _table(
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


def _table(groups: Mapping[str, Errors | None]) -> Iterator[str]:
    yield "| rows | count | median | p90 | bias |"
    yield "|---|--:|--:|--:|--:|"
    for name, figure in groups.items():
        if figure is not None:
            yield f"| {name} | {figure.rows} | {figure.median:.1%} | {figure.p90:.1%} | {figure.bias:+.1%} |"


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


if __name__ == "__main__":
    TARGET.write_text(page())
