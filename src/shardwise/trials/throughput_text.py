"""Checked throughputs as JSON for machines and as text for people."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from shardwise.predict.constants import Constant
from shardwise.spec.timeline import Timeline
from shardwise.trials import throughput_figures as figures
from shardwise.trials.figures import Errors, skipped
from shardwise.trials.ranking import Pair, pairs_of, ranked, together
from shardwise.trials.refit_time import FITTED, Response, TimesLeftOut, leave_one_out, responses
from shardwise.trials.throughput_checks import TimeCheck

WORST = 10
"""Rows that the text names as furthest off."""

GUESSED = ("plan.", "lora.", "model.", "cluster.")
"""Where guessed fields of a row begin that can move its throughput."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Findings:
    """What is found out about the throughput of rows."""

    checks: Sequence[TimeCheck]
    """Rows."""
    answers: Sequence[Response]
    """How the compared rows answer to each constant."""
    left_out: TimesLeftOut | None
    """Sources with constants fitted without them; None of a single source."""
    pairs: Sequence[Pair]
    """Pairs of rows that differ in one decision."""


def findings_of(checks: Sequence[TimeCheck]) -> Findings:
    """Return everything that is said of checked rows; the constants are fitted anew for each source."""
    answers = responses(checks)
    return Findings(checks=checks, answers=answers, left_out=leave_one_out(answers), pairs=pairs_of(checks))


def named_errors(found: Findings) -> dict[str, Errors | None]:
    """Return the error figures of all rows together, by name; None where there is no such row."""
    checks = found.checks
    return {
        "headline": figures.of_times(checks, headline=True),
        "all": figures.of_times(checks),
        "all, no assumed network": figures.of_times(checks, assumed_networks=False),
        "each source with constants fitted without it": found.left_out.together if found.left_out else None,
        "flat 45 % of the peak, headline": figures.of_flat_rule(checks, headline=True),
        "flat 45 % of the peak, all": figures.of_flat_rule(checks),
    }


def row_as_json(check: TimeCheck) -> dict[str, Any] | None:
    """Return what is said of one row's throughput; None where nothing is asked."""
    if check.timed is None:
        return None if check.skipped_because is None else {"skipped_because": check.skipped_because}
    timeline = check.timed.timeline
    return {
        "predicted": check.timed.tokens_per_s,
        "measured": check.measured,
        "relative_error": check.relative_error,
        "headline": check.headline,
        "network_assumed": check.timed.network_assumed,
        "step_s": timeline.step_s,
        "exposed_s": timeline.exposed_s,
    }


def summary_as_json(found: Findings) -> dict[str, Any]:
    """Return the figures over all rows."""
    checks, left = found.checks, found.left_out
    by_field = ranked(found.pairs)
    return {
        "compared": len(figures.compared(checks)),
        "skipped": skipped(checks),
        "headline": errors_as_json(figures.of_times(checks, headline=True)),
        "all": errors_as_json(figures.of_times(checks)),
        "without_assumed_networks": errors_as_json(figures.of_times(checks, assumed_networks=False)),
        "by_source": {name: asdict(figure) for name, figure in figures.by_source(checks).items()},
        "by_card": {name: asdict(figure) for name, figure in figures.by_card(checks).items()},
        "flat_rule": {
            "share_of_peak": figures.FLAT_SHARE,
            "headline": errors_as_json(figures.of_flat_rule(checks, headline=True)),
            "all": errors_as_json(figures.of_flat_rule(checks)),
        },
        "leave_one_source_out": {
            "all": errors_as_json(left.together if left else None),
            "sources": [
                {"source": one.source, "constants": dict(one.values), **asdict(one.errors)}
                for one in (left.sources if left else ())
            ],
        },
        "ranking": {
            **asdict(together(by_field.values())),
            "by_field": {name: asdict(count) for name, count in by_field.items()},
            "wrong": [[pair.slow.row.id, pair.fast.row.id] for pair in found.pairs if not pair.right],
        },
    }


def errors_as_json(figure: Errors | None) -> dict[str, Any] | None:
    """Return error figures for machines; None of none."""
    return None if figure is None else asdict(figure)


def lines(found: Findings) -> Iterator[str]:
    """Yield everything for people."""
    checks = found.checks
    rows = figures.compared(checks)
    assumed = sum(figures.has_assumed_network(check) for check in rows)
    yield f"throughput: {len(rows)} rows to compare; of {assumed} the network between nodes is assumed by the card"
    if not rows:
        return
    yield ""
    yield "tokens per second and GPU, relative error"
    yield from error_table({name: figure for name, figure in named_errors(found).items() if figure is not None})
    for title, groups in (("by source", figures.by_source(checks)), ("by card", figures.by_card(checks))):
        yield ""
        yield title
        yield from error_table(groups)
    if found.left_out:
        yield ""
        yield "by source, constants fitted without it"
        yield from error_table({one.source: one.errors for one in found.left_out.sources})
        for one in found.left_out.sources:
            yield f"  {one.source}: {constants_text(FITTED, one.values)}"
    yield ""
    yield from _ranking(found.pairs)
    yield ""
    yield "furthest off"
    for check in figures.furthest(checks, WORST):
        yield from (f"  {line}" for line in row_lines(check))
    for reason, count in skipped(checks).items():
        yield f"skipped {count}: {reason}"


def error_table(groups: Mapping[str, Errors]) -> Iterator[str]:
    """Yield error figures by name."""
    width = max((len(name) for name in groups), default=0)
    yield f"  {'':{width}}  rows  median     p90    bias"
    for name, figure in groups.items():
        yield f"  {name:{width}}  {figure.rows:4}  {figure.median:6.1%}  {figure.p90:6.1%}  {figure.bias:+6.1%}"


def constants_text(constants: Sequence[Constant], values: Mapping[str, float]) -> str:
    """Return values of constants with their units."""
    by_name = {constant.name: constant for constant in constants}
    texts = []
    for name, value in values.items():
        text = f"{value / 2**20:.0f} MiB" if by_name[name].unit == "bytes" else f"{value:.3g}"
        texts.append(f"{name} {text}")
    return ", ".join(texts)


def _ranking(pairs: Sequence[Pair]) -> Iterator[str]:
    by_field = ranked(pairs)
    total = together(by_field.values())
    share = f", {total.right / total.pairs:.0%}" if total.pairs else ""
    yield f"pairs that differ in one decision and by more than 5 %: {total.right} of {total.pairs} in order{share}"
    yield from (f"  {field}: {count.right} of {count.pairs}" for field, count in by_field.items())
    yield from (f"  wrong: {wrong_text(pair)}" for pair in pairs if not pair.right)


def wrong_text(pair: Pair) -> str:
    """Return what a pair was measured and predicted at."""
    assert pair.slow.timed is not None
    assert pair.fast.timed is not None
    measured = pair.fast.measured / pair.slow.measured - 1
    predicted = pair.fast.timed.tokens_per_s / pair.slow.timed.tokens_per_s - 1
    return (
        f"{pair.fast.row.id} against {pair.slow.row.id} ({pair.field}): {measured:+.1%} measured,"
        f" {predicted:+.1%} predicted"
    )


def row_lines(check: TimeCheck) -> Iterator[str]:
    """Yield a row's figures, what its step consists of, and which of its fields are guesses."""
    timed, error = check.timed, check.relative_error
    assert timed is not None
    assert error is not None
    figures_text = f"{timed.tokens_per_s:.0f} tokens/s/GPU predicted, {check.measured:.0f} measured"
    yield f"{check.row.id}: {figures_text}, {error:+.1%}"
    yield f"    {step_text(timed.timeline)}"
    guesses = guessed(check)
    if guesses:
        yield f"    assumed: {', '.join(guesses)}"


def guessed(check: TimeCheck) -> list[str]:
    """Return the fields of a row that are guesses and can move its throughput."""
    guesses = [name for name in check.row.assumed if name.startswith(GUESSED)]
    return [*guesses, "cluster.network"] if figures.has_assumed_network(check) else guesses


def step_text(step: Timeline) -> str:
    """Return what a step consists of."""
    computing, bare = step.busy["compute"] / step.step_s, step.exposed_s / step.step_s
    return f"{step.step_s:.2f} s: {computing:.0%} computing, {bare:.0%} bare communication"
