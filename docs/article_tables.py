"""What the sections of docs/article_figures.md share; make_article_figures.py makes the page."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from shardwise.trials.article_grid import CLUSTERS, METHODS, MODELS, WHOLE, Cell, Gain, step


class Section(NamedTuple):
    """What is said of one claim."""

    claim: str
    """What the article says."""
    verdict: str
    """Whether that holds, with figures."""
    lines: Iterable[str]
    """The rest."""


def whole_table(found: Mapping[Cell, Gain], rows: int, *, ratio: bool = False) -> Iterator[str]:
    """Yield a table of gains, a line per cluster; what does not fit stands in brackets."""
    yield "| cluster |" + (" ratio |" if ratio else "") + "".join(f" {model} |" for model in MODELS)
    yield "|---|" + "--:|" * (len(MODELS) + ratio)
    for cluster in CLUSTERS:
        cells = [" / ".join(_cell(found[Cell(cluster, model, method, rows)]) for method in METHODS) for model in MODELS]
        yield f"| {cluster} | " + " | ".join([*([ratio_words(cluster, rows)] if ratio else []), *cells]) + " |"


def _cell(found: Gain) -> str:
    return percent_words(found.percent) if found.fits else f"({percent_words(found.percent)})"


def percent_words(percent: float) -> str:
    """Return percent as text, without a sign on nothing."""
    return f"{percent:.0f}".replace("-0", "0")


def span(percents: Sequence[float]) -> str:
    """Return a range as text."""
    if not percents:
        return "nothing fits"
    low, high = percent_words(min(percents)), percent_words(max(percents))
    return f"{low} %" if low == high else f"{low} to {high} %"


def rows_words(rows: int) -> str:
    """Return rows per card as text."""
    return f"{rows} row{'s' if rows > 1 else ''} per card"


def ratio_words(cluster: str, rows: int) -> str:
    """Return seconds of gathers and reductions per second of computing, over all models."""
    found = []
    for model in MODELS:
        busy = step(Cell(cluster, model, WHOLE, rows)).busy
        found.append((busy["all_gather"] + busy["reduce_scatter"]) / busy["compute"])
    low, high = f"{min(found):.1f}", f"{max(found):.1f}"
    return low if low == high else f"{low} to {high}"
