"""Throughput as cards grow, as terminal text and as JSON: what `shardwise plan --scale` answers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from math import log2
from typing import Any

from rich.console import Console

from shardwise.report.answer import throughput_to_json
from shardwise.report.footprint_words import gib
from shardwise.report.sentences import print_sentence
from shardwise.report.timeline_words import LANE_WORDS, number_text, seconds_text, speed_words
from shardwise.spec.cluster import Cluster
from shardwise.spec.layout import StrategyName
from shardwise.spec.plan import Plan
from shardwise.spec.throughput import Throughput
from shardwise.spec.timeline import Lane

WORTH = 1.6
"""A line bends at the first doubling of cards that gives less than this times the tokens per second."""

_COLUMNS = {"each": 8, "in all": 10, "efficiency": 10, "exposed": 7, "a step": 7, "GiB": 7}
"""Head -> width."""
_LABEL = 16
_HEADS = "tokens/s, cards"


@dataclass(frozen=True, kw_only=True, slots=True)
class ScalingPoint:
    """One layout on so many cards."""

    cluster: Cluster
    """The machines."""
    plan: Plan | None
    """The plan; None: refused."""
    throughput: Throughput | None
    """What its step comes to; None: refused."""
    exposed_s: float = 0.0
    """Seconds of a step in which something is under way and nothing is computed."""
    exposed: Mapping[Lane, float]
    """The same by lane."""
    needed: int | None = None
    """Bytes of the card; of live tensors where the card is not known."""
    fits: bool | None = None
    """Whether that is within the card's limit; None without one."""
    refused: str = ""
    """Why there is no such plan."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ScalingLine:
    """One layout on all counts of cards."""

    layout: str
    """`flat`, `hybrid` or `tensor`."""
    title: str
    """What it is, in words."""
    points: tuple[ScalingPoint, ...]
    """One per count, ascending."""

    @property
    def base(self) -> Throughput | None:
        """Of the smallest count that has a plan: what efficiency is told against."""
        return next((point.throughput for point in self.points if point.throughput is not None), None)


@dataclass(frozen=True, kw_only=True, slots=True)
class Bend:
    """The first doubling that is not worth it."""

    before: int
    """Cards before."""
    after: int
    """Cards after."""
    gain: float
    """Tokens per second of all cards after, over those before."""
    per_doubling: float
    """The same for one doubling: equal to `gain` where `after` is twice `before`."""
    lane: Lane | None
    """Whose exposed share of the step grows most; None: none grows."""
    exposed_before: float
    """That share before."""
    exposed_after: float
    """And after."""


def efficiency(point: ScalingPoint, line: ScalingLine) -> float | None:
    """Return tokens per second and card over those of the smallest count; None where there is no plan."""
    if point.throughput is None or line.base is None:
        return None
    return point.throughput.tokens_per_s_per_gpu / line.base.tokens_per_s_per_gpu


def bend_of(line: ScalingLine) -> Bend | None:
    """Return where a line bends; None: every doubling gives 1.6 times the tokens per second or more."""
    known = [(point, point.throughput) for point in line.points if point.throughput is not None]
    for (one, less), (other, more) in pairwise(known):
        gain = more.tokens_per_s / less.tokens_per_s
        per_doubling = gain ** (1 / log2(more.gpus / less.gpus))
        if per_doubling < WORTH:
            lanes = {lane: _share(other, lane) - _share(one, lane) for lane in other.exposed}
            lane = max(lanes, key=lambda name: lanes[name], default=None)
            grown = None if lane is None or lanes[lane] <= 0 else lane
            return Bend(
                before=less.gpus,
                after=more.gpus,
                gain=gain,
                per_doubling=per_doubling,
                lane=grown,
                exposed_before=0.0 if grown is None else _share(one, grown),
                exposed_after=0.0 if grown is None else _share(other, grown),
            )
    return None


def _share(point: ScalingPoint, lane: Lane) -> float:
    assert point.throughput is not None
    return point.exposed.get(lane, 0.0) / point.throughput.step_s


def bend_words(line: ScalingLine) -> str:
    """Return where a line bends and why, in one sentence."""
    known = sum(point.throughput is not None for point in line.points)
    if known < 2:
        return "there is no such plan" if known == 0 else "one count alone: there is nothing to compare it with"
    bend = bend_of(line)
    if bend is None:
        return f"no bend: every doubling gives {WORTH} times the tokens/s or more{_kept(line)}"
    verb = "loses" if bend.gain < 1 else "bends"
    doubled = bend.after == 2 * bend.before
    each = "" if doubled else f", {bend.per_doubling:.2f} times for each doubling"
    text = f"{verb} from {bend.before} to {bend.after} cards: {bend.gain:.2f} times the tokens/s{each}"
    if bend.lane is None:
        return f"{text}, though no communication is exposed more"
    grows = f"{100 * bend.exposed_before:.0f} to {100 * bend.exposed_after:.0f} % of the step"
    return f"{text}; exposed {LANE_WORDS[bend.lane]} grows from {grows}"


def _kept(line: ScalingLine) -> str:
    """Return what is left of each card's tokens at the last count."""
    last = line.points[-1] if line.points else None
    share = None if last is None else efficiency(last, line)
    if last is None or share is None:
        return ""
    return f"; at {last.cluster.world} cards {100 * share:.0f} % of each card's tokens/s are left"


def scaling_to_json(lines: Sequence[ScalingLine], rows_per_gpu: float) -> dict[str, Any]:
    """Return the answer as JSON; `docs/scaling.md` documents the schema.

    Args:
        lines: The layouts.
        rows_per_gpu: Rows that each card takes per step.
    """
    return {
        "rows_per_gpu": rows_per_gpu,
        "layouts": [
            {
                "layout": line.layout,
                "title": line.title,
                "points": [_point(point, line) for point in line.points],
                "bend": None if (bend := bend_of(line)) is None else asdict(bend),
            }
            for line in lines
        ],
    }


def _point(point: ScalingPoint, line: ScalingLine) -> dict[str, Any]:
    throughput, plan = point.throughput, point.plan
    return {
        "gpus": point.cluster.world,
        "nodes": point.cluster.nodes,
        "strategy": None if plan is None else plan.strategy,
        "mesh": None if plan is None else plan.mesh.model_dump(mode="json"),
        "micro_batch": None if plan is None else plan.micro_batch,
        "accumulation_steps": None if plan is None else plan.accumulation_steps,
        "throughput": None if throughput is None else throughput_to_json(throughput),
        "efficiency": efficiency(point, line),
        "exposed_share": None if throughput is None else point.exposed_s / throughput.step_s,
        "exposed": dict(point.exposed),
        "needed": point.needed,
        "fits": point.fits,
        "refused": point.refused,
    }


def print_scaling(console: Console, lines: Sequence[ScalingLine], rows_per_gpu: float) -> None:
    """Print a block of rows per layout, with where it bends below."""
    priced = any(point.throughput and point.throughput.price_per_gpu_hour for line in lines for point in line.points)
    heads = dict(_COLUMNS, cost=8) if priced else _COLUMNS
    first = "".join(f"  {head:>{width}}" for head, width in heads.items())
    _row(console, f"{_HEADS:<{_LABEL}}{first}", "bold")
    for line in lines:
        print_sentence(console, line.title, "bold")
        for point in line.points:
            label = f"{f'{point.cluster.world} ({_nodes(point.cluster.nodes)})':<{_LABEL}}"
            if point.throughput is None:
                print_sentence(console, f"{label}  none: {point.refused}")
                continue
            cells = zip(_cells(point, point.throughput, line, priced=priced), heads.values(), strict=True)
            _row(console, label + "".join(f"  {cell:>{width}}" for cell, width in cells))
        print_sentence(console, bend_words(line), indent="    ")
    console.print()
    for note in _notes(lines, rows_per_gpu, priced=priced):
        print_sentence(console, note, "dim")


def _row(console: Console, text: str, style: str = "") -> None:
    console.print(f"  {text}", style=style or None, soft_wrap=True, highlight=False, markup=False)


def _nodes(count: int) -> str:
    return "1 node" if count == 1 else f"{count} nodes"


def _cells(point: ScalingPoint, throughput: Throughput, line: ScalingLine, *, priced: bool) -> list[str]:
    memory = "" if point.needed is None else gib(point.needed) + ("!" if point.fits is False else "")
    cost = throughput.cost_per_million
    return [
        number_text(throughput.tokens_per_s_per_gpu),
        number_text(throughput.tokens_per_s),
        f"{100 * (efficiency(point, line) or 0.0):.0f} %",
        f"{100 * point.exposed_s / throughput.step_s:.0f} %",
        seconds_text(throughput.step_s),
        memory,
        *([number_text(cost) if cost is not None else ""] if priced else []),
    ]


def _notes(lines: Sequence[ScalingLine], rows_per_gpu: float, *, priced: bool) -> Iterator[str]:
    batch = f"each card keeps {rows_per_gpu:g} {'row' if rows_per_gpu == 1 else 'rows'} a step"
    yield f"{batch}, so the global batch grows with the cards (weak scaling)"
    yield "efficiency: tokens/s of each card against the smallest count of that layout; exposed: share of the step"
    if any(point.fits is False for line in lines for point in line.points):
        yield "GiB: what a card needs; ! does not fit"
    if priced:
        yield "cost: of a million tokens"
    point = next((point for line in lines for point in reversed(line.points) if point.plan is not None), None)
    if point is not None and point.plan is not None:
        yield speed_words(point.cluster, point.plan)


_FLAT: dict[StrategyName, str] = {
    "FULL_SHARD": "FULL_SHARD over all cards",
    "SHARD_GRAD_OP": "SHARD_GRAD_OP over all cards",
    "NO_SHARD": "NO_SHARD: every card holds everything",
}


def flat_title(strategy: StrategyName) -> str:
    """Return what a layout over all cards alike is called."""
    return _FLAT[strategy]
