"""The sections of docs/accuracy.md about time; make_accuracy.py makes the page."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import median

from pages import filled

from shardwise.catalogue.fabrics import known_fabrics
from shardwise.trials import throughput_figures, throughput_text
from shardwise.trials.choices import errors_otherwise
from shardwise.trials.figures import Errors, skipped
from shardwise.trials.ranking import ranked, together
from shardwise.trials.refit_time import FITTED, TimesLeftOut
from shardwise.trials.throughput_checks import TimeCheck, asks_throughput
from shardwise.trials.throughput_text import Findings, named_errors

WORST = 12
"""Rows that the page names as furthest off."""
BARE = 0.05
"""Share of a step from which on bare communication is called more than a little."""
ANSWERS = 0.01
"""Share of a step by which a constant must be able to change it for a row to say something of the constant."""

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
- TT-089 is TT-091 compiled, which brought 16 % and is predicted to bring 6 %.
- FMSA-002 and FMSA-004: two GPUs, whose link the source does not name; NVLink is assumed.
- FQL-033: the same program on A100 (FQL-031, FQL-032) is predicted well; we know no reason.
- FQL, QWEN: adapters double the number of pointwise operations. Their tensors of some ten MB stay in the card's cache,
  whose speed is not modelled, and predictions are too slow.
"""


def throughput(found: Findings) -> Iterator[str]:
    """Yield errors, order and the rows that are furthest off or skipped."""
    checks = found.checks
    yield "## Throughput"
    yield ""
    yield "Absolute relative errors; bias is the median of the signed ones, above 0 where predictions are too fast."
    yield ""
    yield from error_table(
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
    yield _flat(checks)
    yield ""
    yield "### Order of plans"
    yield ""
    yield filled(
        """Pairs of rows of one source that differ in one decision and by more than 5 %, and how many of them are
        predicted in the right order. A sanity check and no more: nearly all of these decisions change what is computed
        or how large the pieces are, and few pairs, or none, differ in the sharding alone."""
    )
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
    asked = sum(asks_throughput(check.row) for check in checks)
    yield filled(
        f"""Of {len(checks)} rows {asked} are determined well enough for this (`use` in
        [the measurements](../bench/measurements/README.md)). Of these are left out:"""
    )
    yield ""
    for reason, count in skipped(checks).items():
        sources = sorted({check.row.family for check in checks if check.skipped_because == reason})
        yield f"- {count} rows of {', '.join(sources)}: {reason}"


def _flat(checks: Sequence[TimeCheck]) -> str:
    short = throughput_figures.of_flat_rule(checks, by_parameters=True)
    assert short is not None
    return filled(
        f"""The flat rule takes every program to turn {throughput_figures.FLAT_SHARE:.0%} of its card's dense peak in
        the dtype of computation (bf16, also where linear layers are in fp8) into the model's FLOPs, counted as for MFU:
        matrix products and the whole square of attention, nothing that is computed again. The shorter rule, 6 FLOPs per
        parameter and token (4 where adapters train) and no attention, is off by {short.median:.1%} in the middle
        and {short.p90:.1%} at p90, most where rows are long."""
    )


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


def rests(found: Findings) -> Iterator[str]:
    """Yield what was settled with the rows in sight, and what they cannot tell."""
    checks = throughput_figures.compared(found.checks)
    yield "## What it rests on"
    yield ""
    yield from _reach(checks)
    yield ""
    yield "### Constants"
    yield ""
    yield filled(
        f"""Bounds are what the sources in `src/shardwise/predict/pace/constants.py` and `.../links/constants.py` give.
        Values were set by hand within them: those of products and attention from single kernels, then moved where steps
        of these rows asked for it; those of links by {len(known_fabrics().curves)} published curves of collectives
        alone (`src/shardwise/catalogue/fabrics.yaml`), not by these rows. Answering: rows whose step changes by more
        than {ANSWERS:.0%} somewhere within the bounds. Without one source: the lowest and highest value of the fits
        that leave one out, which make the mean error of the remaining sources smallest, each source counting the
        same."""
    )
    yield ""
    yield from _constants(found)
    yield ""
    yield filled(
        """A constant that no row answers to is not tested here. One that fits push to a bound stands for something that
        is not modelled, or matters little: the error is nearly as small at other values. The fits do worse on the
        source that they leave out than the values in use do, as is to be expected of values that were set with all
        sources in sight: the figures with constants fitted without each source are the more cautious ones."""
    )
    yield ""
    yield "### Beside the constants"
    yield ""
    yield filled(
        """Leaving out a source holds out these constants and nothing else. Tables beside them stay as they are: the
        speed of older attention kernels and of attention's backward (`ATTENTION_KERNELS`, `BACKWARD`), what cards reach
        of their peak (`achieved` in the catalogue), and by which kernel the program of a row computed attention. They
        have sources that are none of these rows, and were made with these rows in sight. Two stand on less: the share
        that a card of 500 W reaches is worked out from two other cards by a power law, and the rule for MPT's kernel,
        from that program's default, is about rows of one source alone, which names no kernel row by row. All rows,
        with one of these choices made otherwise, or one of the constants that rows spoke for:"""
    )
    yield ""
    yield from error_table(
        {
            "as it is": throughput_figures.of_times(checks),
            **errors_otherwise(checks),
        }
    )


def _reach(checks: Sequence[TimeCheck]) -> Iterator[str]:
    sources = throughput_figures.by_source(checks)
    widest, largest = max(sources.items(), key=lambda one: one[1].rows)
    bare = [check.timed.timeline.exposed_s / check.timed.timeline.step_s for check in checks if check.timed]
    middle = median(figure.median for figure in sources.values())
    yield from _points(
        f"""{largest.rows} of the {len(checks)} rows are of one source, {widest}: one program at one time. The errors of
        all rows are mostly its errors; the middle of the sources' medians is {middle:.1%}.""",
        f"""Hardly any communication is predicted to be bare: more than {BARE:.0%} of the step in
        {sum(share > BARE for share in bare) or "none"} of the rows, {max(bare):.1%} at most. So they test how fast
        cards compute and what hidden collectives cost them, and not how much stays exposed; that rests on the
        collectives that others measured ([links.md](links.md)), on schedules worked out by hand
        ([schedule.md](schedule.md)), on the lab and on reported effects.""",
        """Laws were added when errors of these rows showed that something was missing: the traffic of products that
        hides behind nothing, the slowest of many machines, FSDP1's flat gradients and its casts, attention by kernels
        of their time. Each has a physical reason and, but for the slowest machine, a source that is none of these rows;
        but they were looked for because of them.""",
    )


def _points(*texts: str) -> Iterator[str]:
    yield from (filled(f"- {text}", further="  ") for text in texts)


def _constants(found: Findings) -> Iterator[str]:
    yield "| constant | in use | bounds | answering rows | without one source |"
    yield "|---|--:|--:|--:|--:|"
    for one in FITTED:
        answering = sum(answer.moved(one) > ANSWERS for answer in found.answers)
        low, high = _fitted(found.left_out, one.name)
        bounds, fitted = f"{one.low:.3g} to {one.high:.3g}", f"{low:.3g} to {high:.3g}"
        yield f"| `{one.name}` | {one.value:.3g} | {bounds} | {answering} | {fitted if answering else ''} |"


def _fitted(left: TimesLeftOut | None, name: str) -> tuple[float, float]:
    assert left is not None
    values = [one.values[name] for one in left.sources]
    return min(values), max(values)


def error_table(groups: Mapping[str, Errors | None]) -> Iterator[str]:
    """Yield error figures by name; nothing of names without rows."""
    yield "| rows | count | median | p90 | bias |"
    yield "|---|--:|--:|--:|--:|"
    for name, figure in groups.items():
        if figure is not None:
            yield f"| {name} | {figure.rows} | {figure.median:.1%} | {figure.p90:.1%} | {figure.bias:+.1%} |"
