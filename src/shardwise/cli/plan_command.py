"""`shardwise plan`: what a plan holds in memory and how long its step takes; starts nothing and needs no GPU."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shardwise.cli.plan_options import check_options, check_targets, read_instruments, read_price
from shardwise.spec.problems import BadInput, Problem

if TYPE_CHECKING:
    from shardwise.planner.by_shape import Planned
    from shardwise.report.answer import PlanAnswer
    from shardwise.spec.cluster import Cluster
    from shardwise.spec.job import Job
    from shardwise.spec.report import Instrument, Report
    from shardwise.spec.throughput import Price, Throughput


def plan(
    given: Annotated[
        list[str] | None,
        typer.Argument(metavar="[CONFIG] [KEY=VALUE]...", help="A YAML configuration; settings over it, or alone."),
    ] = None,
    model: Annotated[str | None, typer.Option(help="Catalogue name, folder, config.json, or hub id.")] = None,
    cluster: Annotated[str | None, typer.Option(help="Machines: 8xA10, 2x8xH100-SXM-80GB, 2xcpu.")] = None,
    by: Annotated[str, typer.Option(help="estimate, trace, run, or several with commas; the last decides.")] = (
        "estimate"
    ),
    table: Annotated[bool, typer.Option("--table", help="Every strategy's memory per rank, side by side.")] = False,
    scale: Annotated[str | None, typer.Option(help="Throughput on so many cards: 8,16,...,4096 (doubling).")] = None,
    price: Annotated[float | None, typer.Option(help="What a card costs per hour: cost per million tokens.")] = None,
    price_per_node: Annotated[float | None, typer.Option(help="What a machine costs per hour, instead.")] = None,
    perfetto: Annotated[Path | None, typer.Option(help="Write the step to this new file, for ui.perfetto.dev.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for machines.")] = False,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Write the plan to this new file.")] = None,
) -> None:
    """Predict a plan's memory and step time without a GPU, without weights and without data.

    Exit codes: 0 it fits (or no limit is known), 1 it does not fit, 2 bad input.
    """
    instruments = read_instruments(by)
    check_options(table=table, scale=scale, perfetto=perfetto, by=by)
    check_targets(output, perfetto)
    cost = read_price(price, price_per_node, table=table)
    planned = _planned(read_planned_job(given or [], model=model, cluster=cluster))
    fits = None
    if table:
        _table(planned, instruments, as_json=as_json)
    elif scale is not None:
        _scale(planned, scale, cost, as_json=as_json)
    else:
        fits = _answer(planned, instruments, cost, perfetto, as_json=as_json)
    if output is not None:
        _write(planned, output)
    if fits is False:
        raise typer.Exit(1)


def read_planned_job(given: Sequence[str], *, model: str | None, cluster: str | None) -> Job:
    """Read a job from a file and settings, or from settings alone; it needs no data.

    Args:
        given: At most one file, first; the rest `key=value`.
        model: `--model`, over the file's.
        cluster: `--cluster`, over the file's.

    Raises:
        BadInput: every problem found.
    """
    from shardwise.spec.reader import read_job

    words = list(given)
    file = Path(words.pop(0)) if words and ("=" not in words[0] or Path(words[0]).is_file()) else None
    if file is not None and not file.exists():
        _refuse_model_as_file(str(file))
    words += [
        f"{key}={json.dumps(value)}"
        for key, value in (("model.path", model), ("cluster", cluster))
        if value is not None
    ]
    return read_job(file, words, needs_data=False)


def _refuse_model_as_file(word: str) -> None:
    from shardwise.catalogue.models import model_names

    if word.lower() in {name.lower() for name in model_names()}:
        raise BadInput(Problem(field=word, reason="is a model, not a file", fix=f"write --model {word}"))


def _planned(job: Job) -> Planned:
    from shardwise.catalogue.models import find_model
    from shardwise.planner.by_shape import plan_by_shape

    return plan_by_shape(job, find_model(job.model.path), _cluster(job))


def _cluster(job: Job) -> Cluster:
    from shardwise.catalogue.clusters import find_cluster

    if job.cluster != "detect":
        return find_cluster(job.cluster)
    from shardwise.machine.detect import detect_cluster

    return detect_cluster()


def _answer(
    planned: Planned,
    instruments: Sequence[Instrument],
    price: Price | None,
    perfetto: Path | None,
    *,
    as_json: bool,
) -> bool | None:
    """Judge a plan, print the answer, and return whether it fits."""
    from shardwise.planner.advice import advise, by_estimate
    from shardwise.report.answer import PlanAnswer, answer_to_json

    estimated, why_not = None, ""
    try:
        estimated = by_estimate(planned)
    except BadInput as error:
        if "estimate" in instruments:
            raise
        why_not = f"no advice: the estimate {error.problems[0].reason}"
    reports = [estimated if name == "estimate" and estimated else measured_by(name, planned) for name in instruments]
    if why_not:
        reports[-1] = replace(reports[-1], notes=(*reports[-1].notes, why_not))
    answer = PlanAnswer(
        job=planned.job,
        workload=planned.workload,
        cluster=planned.cluster,
        plan=planned.plan,
        units=planned.units,
        reports=tuple(reports),
        advice=advise(planned, estimated.footprint) if estimated else (),
        throughput=_throughput(planned, reports, price, perfetto),
    )
    if perfetto is not None:
        _write_trace(answer, perfetto)
    if as_json:
        print(json.dumps(answer_to_json(answer), indent=1))
        return answer.fits
    from rich.console import Console

    from shardwise.report.footprint_table import print_answer

    print_answer(Console(soft_wrap=True), answer)
    return answer.fits


def _throughput(
    planned: Planned, reports: Sequence[Report], price: Price | None, perfetto: Path | None
) -> Throughput | None:
    """Return what the time of a step comes to, by the last report that has one; None where none has.

    Raises:
        BadInput: an option needs that time.
    """
    timelines = [report.timeline for report in reports if report.timeline is not None]
    if timelines:
        from shardwise.predict.throughput import throughput_of

        return throughput_of(timelines[-1], planned.workload, planned.plan, planned.cluster, price)
    needs = {"--price": price is not None, "--perfetto": perfetto is not None}
    names = [report.instrument for report in reports]
    if "estimate" in names:
        reason = f"needs the time of a step, and the speeds of {planned.cluster.name} are not known"
        fix = "name cards of the catalogue, or measure this machine with shardwise probe"
    else:
        reason = "needs the time of a step, which the estimate alone tells"
        fix = f"write --by {','.join((*names, 'estimate'))}"
    problems = [Problem(field=option, reason=reason, fix=fix) for option, given in needs.items() if given]
    if problems:
        raise BadInput(problems)
    return None


def _write_trace(answer: PlanAnswer, target: Path) -> None:
    from shardwise.report.perfetto import trace_events
    from shardwise.report.run_folder import write_text

    assert answer.timed is not None
    events = trace_events(answer.timed, answer.units, answer.workload.model.block_list)
    write_text(target, json.dumps(events))


def measured_by(instrument: Instrument, planned: Planned) -> Report:
    """Return what an instrument that needs torch says of a plan."""
    from shardwise.predict.machine_memory import with_machine

    if instrument == "trace":
        from shardwise.predict.trace import trace

        report = trace(planned.workload, planned.plan, planned.cluster)
    else:
        from shardwise.trials.footprint_run import footprint_run
        from shardwise.trials.processes import HostsFailed

        try:
            report = footprint_run(planned.job, planned.plan, planned.cluster)
        except HostsFailed as error:
            print(str(error), file=sys.stderr)
            raise typer.Exit(4) from None
    return with_machine(report, planned.workload, planned.cluster)


def _table(planned: Planned, instruments: Sequence[Instrument], *, as_json: bool) -> None:
    """Print the memory of every strategy side by side."""
    from shardwise.planner.advice import by_estimate
    from shardwise.planner.strategy_table import strategy_rows
    from shardwise.report.strategy_table import print_strategies, rows_to_json

    judges = {name: by_estimate if name == "estimate" else partial(measured_by, name) for name in instruments}
    rows = strategy_rows(planned, judges)
    if as_json:
        print(json.dumps(rows_to_json(rows), indent=1))
        return
    from rich.console import Console

    print_strategies(Console(soft_wrap=True), rows)


def _scale(planned: Planned, counts: str, price: Price | None, *, as_json: bool) -> None:
    """Print throughput as cards grow."""
    from shardwise.planner.scaling import read_counts, rows_per_gpu, scale
    from shardwise.report.scaling_table import print_scaling, scaling_to_json

    lines = scale(planned, read_counts(counts, planned.cluster.per_node), price=price)
    rows = float(rows_per_gpu(planned))
    if as_json:
        print(json.dumps(scaling_to_json(lines, rows), indent=1))
        return
    from rich.console import Console

    print_scaling(Console(soft_wrap=True), lines, rows)


def _write(planned: Planned, output: Path) -> None:
    from shardwise.report.run_folder import plan_text, write_text

    write_text(output, plan_text(planned.plan))
