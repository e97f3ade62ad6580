"""Write docs/article_figures.md, the article's figures and where they hold: python docs/make_article_figures.py"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from textwrap import fill
from typing import Literal, NamedTuple

from shardwise.catalogue.clusters import cards, gpu
from shardwise.predict.blocks import computation
from shardwise.predict.throughput import throughput_of
from shardwise.spec.runtime import SHARDWISE
from shardwise.spec.timeline import Timeline
from shardwise.trials.article_grid import (
    CLUSTERS,
    LORA,
    METHODS,
    MODELS,
    ROWS,
    WHOLE,
    Case,
    Gain,
    fitting,
    gains,
    planned,
    shape,
    step,
)

TARGET = Path(__file__).with_name("article_figures.md")

LOW, HIGH = 15, 25
"""Percent that the article says prefetching in backward brings."""
SAME = 1.0
"""Percent from which on a change is called faster."""
SMALL = 13.5e9
"""Parameters below which the article would keep weights gathered; those called 13B have 13.0 billion."""
OFFLOADED = ("8xA10", "8xA100-SXM-80GB", "8xH100-SXM-80GB")
TIMED = ("8xA100-SXM-80GB", "8xH100-SXM-80GB")
"""Clusters of the table of checkpointing."""

Mode = Literal["none", "selective", "full"]

HEAD = """# The article's figures

Made by `python docs/make_article_figures.py`; a test holds it up to date. The article gives figures without the models
and machines they are of. Here they are predicted over models from 7B to 70B and over cards and networks from Ethernet
to InfiniBand: speeds of the catalogue, none measured on these machines. How far predictions are off:
[accuracy.md](accuracy.md).

| the article says | and that |
|---|---|
"""

PREFETCH = """
Without it, a block's gather is issued when the block behind it has been computed, and then waits for that block's
reduction, which comes first on the communicator: backward takes computing plus gathers plus reductions. With it, both
run beside the computation, as far as there is any to cover them:

- ratio far below 1, much computing per byte: they are short, and so is what hiding them brings. More rows per card, or
  a faster link, lead there;
- ratio about 1: the most is won;
- ratio far above 1: the link is the bound with and without, and little is won. LoRA reduces next to nothing, so its
  ratio is about half: it gains less where the ratio is low, and more where it is high.

One cell: `shardwise plan --model qwen-7b --cluster 8xA100-SXM-80GB mixed_precision=bf16 activation_checkpointing=true
seq_len=2048 micro_batch=1 global_batch=8 fsdp=FULL_SHARD prefetch.backward=0`, and the same with 1.
"""


class Section(NamedTuple):
    """What is said of one claim."""

    claim: str
    """What the article says."""
    verdict: str
    """Whether that holds, with figures."""
    lines: Iterable[str]
    """The rest."""


def whole_table(found: Mapping[Case, Gain], rows: int, *, ratio: bool = False) -> Iterator[str]:
    """Yield a table of gains, a line per cluster; what does not fit stands in brackets."""
    yield "| cluster |" + (" ratio |" if ratio else "") + "".join(f" {model} |" for model in MODELS)
    yield "|---|" + "--:|" * (len(MODELS) + ratio)
    for cluster in CLUSTERS:
        cells = [" / ".join(_cell(found[Case(cluster, model, method, rows)]) for method in METHODS) for model in MODELS]
        yield f"| {cluster} | " + " | ".join([*([_ratios(cluster, rows)] if ratio else []), *cells]) + " |"


def _cell(found: Gain) -> str:
    return _percent(found.percent) if found.fits else f"({_percent(found.percent)})"


def _percent(percent: float) -> str:
    return f"{percent:.0f}".replace("-0", "0")


def span(percents: Sequence[float]) -> str:
    """Return a range as text."""
    if not percents:
        return "nothing fits"
    low, high = _percent(min(percents)), _percent(max(percents))
    return f"{low} %" if low == high else f"{low} to {high} %"


def _rows(rows: int) -> str:
    return f"{rows} row{'s' if rows > 1 else ''} per card"


def _wrapped(text: str) -> str:
    return fill(text, 120, break_long_words=False, break_on_hyphens=False)


# Prefetching


def prefetch() -> Section:
    """Return what is said of prefetching."""
    found = gains(("prefetch.backward=0",), ("prefetch.backward=1",))
    middles = {
        cluster: median(percents)
        for cluster in CLUSTERS
        if (percents := fitting(found, lambda case: (case.cluster, *case[2:]) == (cluster, WHOLE, ROWS[0])))  # noqa: B023
    }
    as_said = [cluster for cluster, middle in middles.items() if LOW <= middle <= HIGH]
    more = [cluster for cluster, middle in middles.items() if middle > HIGH]
    many = fitting(found, lambda case: (case.method, case.rows) == (WHOLE, ROWS[-1]))
    lora = fitting(found, lambda case: case.method == LORA)
    verdict = (
        f"Holds for all weights and one row of 2048 tokens per card on {', '.join(as_said) or 'none'}; more on"
        f" {', '.join(more) or 'none'}; less on {len(middles) - len(as_said) - len(more)} others. With {ROWS[-1]} rows"
        f" it is {span(many)}, with LoRA {span(lora)}"
    )
    return Section(f"Backward prefetch brings {LOW} to {HIGH} % on fast networks", verdict, _prefetch(found))


def _prefetch(found: Mapping[Case, Gain]) -> Iterator[str]:
    percents = fitting(found)
    inside = sum(LOW <= percent <= HIGH for percent in percents)
    yield _wrapped(
        "More tokens per second with `prefetch.backward=1` than with 0, in percent: all weights trained / LoRA of rank"
        " 64; checkpointing, bf16, rows of 2048 tokens; (what does not fit). Of the cells that fit,"
        f" {inside} of {len(percents)} lie between {LOW} and {HIGH} %; all together {span(percents)}. Ratio: time of"
        " gathers and reductions per time of computing, all weights."
    )
    for rows in ROWS:
        yield f"\n{_rows(rows)}:\n"
        yield from whole_table(found, rows, ratio=True)
    yield PREFETCH
    ahead = fitting(gains(("prefetch.forward=0",), ("prefetch.forward=1",)))
    deep = fitting(gains(("prefetch.forward=0",), ("prefetch.forward=2",)))
    yield _wrapped(
        f"Forward prefetch of depth 1 brings {span(ahead)} over the same grid, of depth 2 {span(deep)}: FSDP2's host"
        " runs ahead of the card and gathers the next unit anyway, unless issuing is the bound. So the article is right"
        " that it is little used, for a reason that it does not give."
    )


def _ratios(cluster: str, rows: int) -> str:
    found = []
    for model in MODELS:
        busy = step(Case(cluster, model, WHOLE, rows)).busy
        found.append((busy["all_gather"] + busy["reduce_scatter"]) / busy["compute"])
    low, high = f"{min(found):.1f}", f"{max(found):.1f}"
    return low if low == high else f"{low} to {high}"


# SHARD_GRAD_OP


def strategies() -> Section:
    """Return what is said of SHARD_GRAD_OP."""
    found = gains((), ("fsdp=SHARD_GRAD_OP",))

    def faster(method: str, small: bool, which: str) -> str:
        chosen = fitting(found, lambda case: case.method == method and (shape(case.model).parameters < SMALL) == small)
        return f"{sum(percent >= SAME for percent in chosen)} of {len(chosen)} {which} ({span(chosen)})"

    verdict = (
        f"Holds where it fits, in {len(fitting(found))} of {len(found)} cells. It is faster by {SAME:.0f} % or more in"
        f" {faster(WHOLE, True, 'up to 13B with all weights')} and {faster(LORA, True, 'with LoRA')}, but also in"
        f" {faster(WHOLE, False, 'above 13B with all weights')} and {faster(LORA, False, 'with LoRA')}: memory and the"
        " link decide, not the size"
    )
    return Section("SHARD_GRAD_OP is faster below 13B and with LoRA", verdict, _strategies(found))


def _strategies(found: Mapping[Case, Gain]) -> Iterator[str]:
    yield _wrapped(
        "It leaves gathers out and adds nothing, so it is never slower. More tokens per second than with FULL_SHARD, in"
        f" percent, all weights / LoRA, {_rows(ROWS[0])}; (where SHARD_GRAD_OP does not fit):"
    )
    yield ""
    yield from whole_table(found, ROWS[0])
    yield "\nOne cell: the command above with `fsdp=SHARD_GRAD_OP`; memory of both: add `--table`."


# Checkpointing


class Checkpointed(NamedTuple):
    """A line of the table of checkpointing."""

    saved: float
    """Percent of activations that full checkpointing saves."""
    flops: float
    """Percent of FLOPs that it adds."""
    slower: list[float]
    """Percent of a step that it adds, on several clusters and with several numbers of rows."""
    cells: str
    """The line's cells."""


def checkpointing() -> Section:
    """Return what is said of checkpointing."""
    lines = {(model, method): _checkpointed(model, method) for model in MODELS for method in METHODS}
    words = {}
    for method in METHODS:
        chosen = [line for (_, name), line in lines.items() if name == method]
        flops, saved = span([line.flops for line in chosen]), span([line.saved for line in chosen])
        slower = span([percent for line in chosen for percent in line.slower])
        words[method] = (f"{flops} more FLOPs, {slower} more time", saved)
    verdict = (
        f"Computing: holds for all weights ({words[WHOLE][0]}), not for LoRA ({words[LORA][0]}), where backward of"
        " frozen weights is half as much and one forward more weighs more. Activations: it saves more than said,"
        f" {words[WHOLE][1]} with all weights, {words[LORA][1]} with LoRA"
    )
    claim = "Checkpointing costs about 30 % more computing and saves up to 80 % of the activations"
    return Section(claim, verdict, _checkpointing(lines))


def _checkpointing(lines: Mapping[tuple[str, str], Checkpointed]) -> Iterator[str]:
    yield _wrapped(
        "`selective` keeps matrix products and attention: it costs little time and saves about half. GiB of one row of"
        " 2048 tokens on a card: what all blocks keep from forward to backward, and with `full` also what one block"
        f" makes again. Time: percent more of a step, with {' / '.join(map(str, ROWS))} rows per card, whether it fits"
        " without checkpointing or not."
    )
    yield ""
    heads = ["model, method", "none", "`selective`", "`full`", "FLOPs of `full`"]
    heads += [f"time of {mode}, {name.partition('-')[0]}" for mode in ("`selective`", "`full`") for name in TIMED]
    yield "| " + " | ".join(heads) + " |"
    yield "|---|" + "--:|" * (len(heads) - 1)
    for (model, method), line in lines.items():
        yield f"| {model}, {method} | {line.cells} |"
    yield "\nOne cell: the command above with `activation_checkpointing=none`, `selective` or `full`."


def _checkpointed(model: str, method: str) -> Checkpointed:
    case = Case(TIMED[0], model, method, 1)
    none, selective, full = _kept(case, "none"), _kept(case, "selective"), _kept(case, "full")
    plan = planned(case)
    flops = throughput_of(step(case), plan.workload, plan.plan, plan.cluster).flops
    more = 100 * flops.again / flops.model
    cells = [f"{none / 2**30:.1f}"]
    cells += [f"{size / 2**30:.1f} (-{100 * (1 - size / none):.0f} %)" for size in (selective, full)]
    cells.append(f"+{more:.0f} %")
    slower = {mode: [_slower(model, method, cluster, mode) for cluster in TIMED] for mode in ("selective", "full")}
    cells += [" / ".join(f"+{percent:.0f}" for percent in percents) for mode in slower for percents in slower[mode]]
    return Checkpointed(
        100 * (1 - full / none), more, [one for some in slower["full"] for one in some], " | ".join(cells)
    )


def _kept(case: Case, mode: Mode) -> float:
    """Return bytes that all blocks keep, and with `full` those of the block that is computed again."""
    plan = planned(case)
    computed = computation(plan.workload, SHARDWISE, device_type="cuda")
    kept = plan.workload.model.layers * computed.block(plan.plan, 0, checkpointing=mode).kept
    return kept + (computed.block(plan.plan, 0, checkpointing="none").kept if mode == "full" else 0)


def _slower(model: str, method: str, cluster: str, mode: str) -> list[float]:
    cases = [Case(cluster, model, method, rows) for rows in ROWS]
    without = [step(case, "activation_checkpointing=none").step_s for case in cases]
    with_it = [step(case, f"activation_checkpointing={mode}").step_s for case in cases]
    return [100 * (longer / shorter - 1) for longer, shorter in zip(with_it, without, strict=True)]


# Offload, several nodes


def offload() -> Section:
    """Return what is said of offload."""
    rated = {name: rates for name in cards() if (rates := gpu(name).rates) is not None}
    parts = sorted((rates.memory.value / rates.host.value, name) for name, rates in rated.items())
    tenth = [name for part, name in parts if 7 <= part <= 14]
    times = [_offloaded(cluster).step_s / _alone(cluster).step_s for cluster in OFFLOADED]
    verdict = (
        f"PCIe: holds for {', '.join(tenth)} among {len(parts)} cards (1/7 to 1/14, by specification, one way); half of"
        f" the cards have less than 1/{median(part for part, _ in parts):.0f}, {parts[-1][1]} 1/{parts[-1][0]:.0f}."
        f" Last resort: holds, a step takes {min(times):.1f} to {max(times):.1f} times as long"
    )
    return Section(
        "CPU offload is the last resort: PCIe has a tenth of the GPU memory's bandwidth", verdict, _offload()
    )


def _alone(cluster: str) -> Timeline:
    return step(Case(cluster, "qwen-7b", WHOLE, 1))


def _offloaded(cluster: str) -> Timeline:
    return step(Case(cluster, "qwen-7b", WHOLE, 1), "offload=parameters")


def _offload() -> Iterator[str]:
    yield _wrapped(
        "PCIe is seldom what takes the time: Adam on the host is. qwen-7b, all weights, 1 row per card, parameters and"
        " optimizer on the host:"
    )
    yield ""
    yield "| cluster | step without | step with | times | Adam and norm on the host | copies over PCIe |"
    yield "|---|--:|--:|--:|--:|--:|"
    for cluster in OFFLOADED:
        without, after = _alone(cluster), _offloaded(cluster)
        copies = max(after.busy["to_device"], after.busy["to_host"])
        yield (
            f"| {cluster} | {without.step_s:.2f} s | {after.step_s:.2f} s | {after.step_s / without.step_s:.1f} |"
            f" {after.busy['host']:.2f} s | {copies:.2f} s |"
        )
    yield "\nOne cell: the command above with `offload=parameters`."


def nodes() -> Section:
    """Return what is said of several nodes."""
    names = [cluster for cluster in CLUSTERS if cluster.startswith("2x8xA100")]
    verdict = "Holds, by the network. 16 A100 have so many times the tokens per second of 8, all weights: " + ", ".join(
        f"{_times(cluster, WHOLE, 1):.2f} over {cluster.partition(' ')[2]}" for cluster in names
    )
    return Section("FULL_SHARD over two nodes brings less than twice the tokens per second", verdict, _nodes(names))


def _nodes(names: Sequence[str]) -> Iterator[str]:
    yield "From 8 to 4096 cards, and HYBRID_SHARD and tensor parallel beside: [scaling.md](scaling.md). qwen-7b,"
    yield "FULL_SHARD, all weights / LoRA:"
    yield ""
    yield "| between nodes | " + " | ".join(map(_rows, ROWS)) + " |"
    yield "|---|" + "--:|" * len(ROWS)
    for cluster in names:
        cells = [" / ".join(f"{_times(cluster, method, rows):.2f}" for method in METHODS) for rows in ROWS]
        yield f"| {cluster.partition(' ')[2]} | " + " | ".join(cells) + " |"


def _times(cluster: str, method: str, rows: int) -> float:
    one = cluster[2:].partition(" ")[0]
    alone, both = (step(Case(name, "qwen-7b", method, rows)).step_s for name in (one, cluster))
    return 2 * alone / both


def page() -> str:
    """Return the whole page."""
    sections = [make() for make in (prefetch, strategies, checkpointing, offload, nodes)]
    lines = [f"| {one.claim} | {one.verdict} |" for one in sections]
    for one in sections:
        lines += ["", f"## {one.claim}", "", *one.lines]
    return HEAD + "\n".join(lines) + "\n"


if __name__ == "__main__":
    TARGET.write_text(page(), encoding="utf-8")
