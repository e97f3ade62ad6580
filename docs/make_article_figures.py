"""Write docs/article_figures.md, the article's figures held against the estimate: python docs/make_article_figures.py"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from statistics import median
from typing import Literal, NamedTuple

from shardwise.catalogue.clusters import cards, find_cluster, gpu
from shardwise.catalogue.models import find_model
from shardwise.planner.advice import by_estimate
from shardwise.planner.by_shape import Planned, plan_by_shape
from shardwise.predict.blocks import computation
from shardwise.predict.step_time import timeline_of
from shardwise.predict.throughput import throughput_of
from shardwise.spec.cluster import Cluster
from shardwise.spec.model_spec import ModelSpec
from shardwise.spec.reader import read_job
from shardwise.spec.runtime import SHARDWISE
from shardwise.spec.timeline import Timeline
from shardwise.spec.workload import Workload

TARGET = Path(__file__).with_name("article_figures.md")

MODELS = ("qwen-7b", "llama-3-8b", "llama-2-13b", "qwen2.5-14b", "llama-3-70b")
CLUSTERS = (
    "8xA10",
    "8xRTX-4090",
    "8xA100-SXM-80GB",
    "8xH100-SXM-80GB",
    "2x8xA100-SXM-80GB eth-25",
    "2x8xA100-SXM-80GB eth-100",
    "2x8xA100-SXM-80GB ib-8x200",
    "2x8xH100-SXM-80GB ib-8x400",
)
METHODS: Mapping[str, tuple[str, ...]] = {"all weights": (), "LoRA": ("use_lora=true", "lora_rank=64")}
ROWS = (1, 4)
COMMON = ("fsdp=FULL_SHARD", "mixed_precision=bf16", "activation_checkpointing=true", "seq_len=2048")
"""FULL_SHARD comes first, so that another strategy can follow."""

LOW, HIGH = 15, 25
"""Percent that the article says prefetching in backward brings."""
SAME = 1.0
"""Percent below which a change is called none."""
SMALL = 13.5e9
"""Parameters below which the article would keep weights gathered; those called 13B have 13.0 billion."""

OFFLOADED = ("8xA10", "8xA100-SXM-80GB", "8xH100-SXM-80GB")
TIMED = ("8xA100-SXM-80GB", "8xH100-SXM-80GB")
"""Clusters of the table of checkpointing."""


WORKLOADS: dict[tuple[str, str], Workload] = {}
"""By model and method."""


class Case(NamedTuple):
    """One cell's plan before the change that its table is about."""

    cluster: str
    model: str
    method: str
    rows: int


class Gain(NamedTuple):
    """What a change brings."""

    percent: float
    """Tokens per second more."""
    fits: bool
    """The plan with the change fits on the cards."""


@cache
def machines(name: str) -> Cluster:
    """Return a cluster."""
    return find_cluster(name)


@cache
def shape(name: str) -> ModelSpec:
    """Return a model."""
    return find_model(name)


@cache
def planned(case: Case, *settings: str) -> Planned:
    """Return the plan of a cell. Cells with equal workloads share one, whose parts are then remembered."""
    cluster = machines(case.cluster)
    batch = (f"micro_batch={case.rows}", f"global_batch={case.rows * cluster.world}")
    given = [f"model={case.model}", *COMMON, *batch, *METHODS[case.method], *settings]
    found = plan_by_shape(read_job(None, given, needs_data=False), shape(case.model), cluster)
    return replace(found, workload=WORKLOADS.setdefault((case.model, case.method), found.workload))


@cache
def step(case: Case, *settings: str) -> Timeline:
    """Return the step of a cell."""
    plan = planned(case, *settings)
    return timeline_of(plan.workload, plan.plan, plan.cluster)


@cache
def fits(case: Case, *settings: str) -> bool:
    """Whether the plan of a cell fits on its cards."""
    device = by_estimate(planned(case, *settings)).footprint.device
    assert device is not None
    return device.fits is True


def gain(case: Case, before: Sequence[str], after: Sequence[str]) -> Gain:
    """Return what a change of settings brings."""
    return Gain(100 * (step(case, *before).step_s / step(case, *after).step_s - 1), fits(case, *after))


def gains(before: Sequence[str], after: Sequence[str], rows: Sequence[int] = ROWS) -> dict[Case, Gain]:
    """Return what a change brings, over the whole grid."""
    cases = [
        Case(cluster, model, method, size)
        for size in rows
        for cluster in CLUSTERS
        for model in MODELS
        for method in METHODS
    ]
    return {case: gain(case, before, after) for case in cases}


def table(found: Mapping[Case, Gain], rows: int) -> Iterator[str]:
    """Yield a table of gains, a line per cluster; what does not fit stands in brackets."""
    yield "| cluster | " + " | ".join(MODELS) + " |"
    yield "|---|" + "--:|" * len(MODELS)
    for cluster in CLUSTERS:
        cells = [[_percent(found[Case(cluster, model, method, rows)]) for method in METHODS] for model in MODELS]
        yield f"| {cluster} | " + " | ".join(" / ".join(cell) for cell in cells) + " |"
    yield ""


def _percent(found: Gain) -> str:
    text = f"{found.percent:.0f}".replace("-0", "0")
    return text if found.fits else f"({text})"


def fitting(found: Mapping[Case, Gain], chosen: Callable[[Case], bool]) -> list[float]:
    """Return the gains of those cells that fit."""
    return [one.percent for case, one in found.items() if one.fits and chosen(case)]


def span(percents: Sequence[float]) -> str:
    """Return a range as text."""
    if not percents:
        return "nothing fits"
    low, high = (f"{edge(percents):.0f}".replace("-0", "0") for edge in (min, max))
    return f"{low} %" if low == high else f"{low} to {high} %"


def share(percents: Sequence[float], good: Callable[[float], bool]) -> str:
    """Return how many are good, as text."""
    return f"{sum(map(good, percents))} of {len(percents)}"


def _in_range(percent: float) -> bool:
    return LOW <= percent <= HIGH


# Prefetching


def prefetch() -> Iterator[str]:
    """Yield the section of prefetching."""
    found = gains(("prefetch.backward=0",), ("prefetch.backward=1",))
    whole = fitting(found, lambda case: True)
    yield "## Backward prefetch brings 15 to 25 % on fast networks"
    yield ""
    yield f"**Holds for some.** Of the cells below that fit, {share(whole, _in_range)} lie between {LOW} and {HIGH} %,"
    yield f"{share(whole, lambda percent: percent < SAME)} below {SAME:.0f} %; all together {span(whole)}. More tokens per"
    yield "second with `prefetch.backward=1` than with 0, in percent: all weights trained / LoRA of rank 64; checkpointing,"
    yield "rows of 2048 tokens; (what does not fit)."
    for rows in ROWS:
        yield ""
        yield f"{rows} {'row' if rows == 1 else 'rows'} per card:"
        yield ""
        yield from table(found, rows)
    yield "By cluster, all weights trained, with how long gathers and reductions take per time of computing:"
    yield ""
    yield "| cluster | " + " | ".join(f"{rows} rows per card".replace("1 rows", "1 row") for rows in ROWS) + " |"
    yield "|---|" + "---|" * len(ROWS)
    for cluster in CLUSTERS:
        yield f"| {cluster} | " + " | ".join(_by_cluster(found, cluster, rows) for rows in ROWS) + " |"
    yield ""
    yield "Without it, a block's gather starts when the block behind it has been computed, so backward takes computing plus"
    yield "gathers. What can be won is the gathers, as far as computing covers them:"
    yield ""
    yield "- much computing per byte (ratio far below 1): gathers are short, and so is what hiding them brings. More rows per"
    yield "  card, or a faster link, lead there;"
    yield "- ratio about 1: the most is won;"
    yield "- ratio far above 1: the link is the bound with and without, and little is won. LoRA reduces next to nothing, so it"
    yield "  has half of the ratio: it gains less where the ratio is low, and more where it is high."
    yield ""
    yield from _forward()
    yield "One cell: `shardwise plan --model qwen-7b --cluster 8xA100-SXM-80GB mixed_precision=bf16"
    yield "activation_checkpointing=true seq_len=2048 micro_batch=1 global_batch=8 fsdp=FULL_SHARD prefetch.backward=0`, and"
    yield "the same with 1."
    yield ""


def _by_cluster(found: Mapping[Case, Gain], cluster: str, rows: int) -> str:
    chosen = fitting(found, lambda case: (case.cluster, case.method, case.rows) == (cluster, "all weights", rows))
    ratios = [_ratio(step(Case(cluster, model, "all weights", rows))) for model in MODELS]
    verdict = ""
    if chosen:
        middle = median(chosen)
        verdict = ": as the article says" if _in_range(middle) else ": more" if middle > HIGH else ": less"
    return f"{span(chosen)}{verdict} (ratio {min(ratios):.1f} to {max(ratios):.1f})"


def _ratio(timeline: Timeline) -> float:
    busy = timeline.busy
    return (busy["all_gather"] + busy["reduce_scatter"]) / busy["compute"]


def _forward() -> Iterator[str]:
    found = gains(("prefetch.forward=0",), ("prefetch.forward=1",))
    percents = fitting(found, lambda case: True)
    deep = fitting(gains(("prefetch.forward=0",), ("prefetch.forward=2",)), lambda case: True)
    yield f"Forward prefetch of depth 1 brings {span(percents)} over the same grid, of depth 2 {span(deep)}: FSDP2's host"
    yield "runs ahead of the card and gathers the next unit anyway, unless issuing is the bound. So the article is right that"
    yield "it is little used, for a reason that it does not give."
    yield ""


# SHARD_GRAD_OP


def strategies() -> Iterator[str]:
    """Yield the section of SHARD_GRAD_OP."""
    found = gains((), ("fsdp=SHARD_GRAD_OP",))

    def chosen(method: str, small: bool) -> list[float]:
        return fitting(found, lambda case: case.method == method and (shape(case.model).parameters < SMALL) == small)

    def faster(percent: float) -> bool:
        return percent >= SAME

    count = sum(one.fits for one in found.values())
    yield "## SHARD_GRAD_OP is faster below 13B and with LoRA"
    yield ""
    yield f"**Holds where it fits**, which is in {count} of {len(found)} cells. There it is faster by {SAME:.0f} % or more in"
    yield f"{share(chosen('all weights', True), faster)} cells up to 13B with all weights trained ({span(chosen('all weights', True))}),"
    yield f"{share(chosen('LoRA', True), faster)} up to 13B with LoRA ({span(chosen('LoRA', True))}), {share(chosen('all weights', False), faster)}"
    yield f"above with all weights ({span(chosen('all weights', False))}) and {share(chosen('LoRA', False), faster)} above with LoRA"
    yield f"({span(chosen('LoRA', False))}). It is never slower, as it leaves gathers out and adds nothing: memory decides and the"
    yield "link says how much there is to win, not the size of the model. More tokens per second than FULL_SHARD, in percent,"
    yield "all weights / LoRA, 1 row per card:"
    yield ""
    yield from table(found, 1)
    yield "One cell: the command above with `fsdp=SHARD_GRAD_OP`; memory of both: add `--table`."
    yield ""


# Checkpointing


def checkpointing() -> Iterator[str]:
    """Yield the section of checkpointing."""
    lines = {(model, method): _checkpointed(model, method) for model in MODELS for method in METHODS}
    full = [line.full for (_, method), line in lines.items() if method == "all weights"]
    lora = [line.full for (_, method), line in lines.items() if method == "LoRA"]
    flops = {method: [one.flops for (_, name), one in lines.items() if name == method] for method in METHODS}
    yield "## Checkpointing costs 30 % more computing and saves 80 % of the activations"
    yield ""
    yield f"**Holds for all weights trained, roughly**: {span(flops['all weights'])} more FLOPs and {span(full)} less memory."
    yield f"**Does not hold for LoRA**: backward of frozen weights is half as much, so forward once more is {span(flops['LoRA'])}"
    yield f"on top ({span(lora)} less memory). In time it is less where links or the host are waited for. `selective` keeps matrix"
    yield "products and attention: it costs little time, and saves about half. GiB of one row of 2048 tokens on a card: what all"
    yield "blocks keep from forward to backward (with `full` also what one block makes again). Time: percent more of a step, with"
    yield "1 and 4 rows per card on " + " and ".join(TIMED) + "; whether it fits without checkpointing is not asked."
    yield ""
    heads = ("model, method", "none", "`selective`", "`full`", "FLOPs of `full`")
    timed = [f"{mode}, {name.partition('-')[0]}" for mode in ("`selective`", "`full`") for name in TIMED]
    yield "| " + " | ".join([*heads, *timed]) + " |"
    yield "|---|" + "--:|" * (len(heads) + len(timed) - 1)
    for (model, method), line in lines.items():
        yield f"| {model}, {method} | {line.text} |"
    yield ""
    yield "One cell: the command above with `activation_checkpointing=none`, `selective` or `full`."
    yield ""


class Checkpointed(NamedTuple):
    """A line of the table of checkpointing."""

    full: float
    """Percent of activations that full checkpointing saves."""
    flops: float
    """Percent of FLOPs that it adds."""
    text: str
    """The line's cells."""


def _checkpointed(model: str, method: str) -> Checkpointed:
    case = Case(TIMED[0], model, method, 1)
    kept = {mode: _kept(case, mode) for mode in ("none", "selective", "full")}
    plan = planned(case)
    flops = throughput_of(step(case), plan.workload, plan.plan, plan.cluster).flops
    more = 100 * flops.again / flops.model
    saved = {mode: 100 * (1 - size / kept["none"]) for mode, size in kept.items()}
    cells = [f"{kept['none'] / 2**30:.1f}"]
    cells += [f"{kept[mode] / 2**30:.1f} (-{saved[mode]:.0f} %)" for mode in ("selective", "full")]
    cells.append(f"+{more:.0f} %")
    cells += [_slower(model, method, cluster, mode) for mode in ("selective", "full") for cluster in TIMED]
    return Checkpointed(saved["full"], more, " | ".join(cells))


def _kept(case: Case, mode: Literal["none", "selective", "full"]) -> float:
    """Return bytes that all blocks keep, and with `full` those of the block that is computed again."""
    plan = planned(case)
    computed = computation(plan.workload, SHARDWISE, device_type="cuda")

    def block(kind: Literal["none", "selective", "full"]) -> int:
        return computed.block(plan.plan, 0, checkpointing=kind).kept

    return plan.workload.model.layers * block(mode) + (block("none") if mode == "full" else 0)


def _slower(model: str, method: str, cluster: str, mode: str) -> str:
    percents = []
    for rows in ROWS:
        case = Case(cluster, model, method, rows)
        without = step(case, "activation_checkpointing=none").step_s
        percents.append(f"+{100 * (step(case, f'activation_checkpointing={mode}').step_s / without - 1):.0f}")
    return " / ".join(percents)


# Offload, several nodes


def offload() -> Iterator[str]:
    """Yield the section of offload."""
    rated = {name: rates for name in cards() if (rates := gpu(name).rates) is not None}
    parts = sorted((rates.memory.value / rates.host.value, name) for name, rates in rated.items())
    tenth = [name for part, name in parts if 7 <= part <= 14]
    yield "## CPU offload: PCIe has about a tenth of the GPU memory's bandwidth"
    yield ""
    yield f"**Holds for few cards**: the link to the host, one way, has 1/{parts[0][0]:.0f} ({parts[0][1]}) to 1/{parts[-1][0]:.0f}"
    yield f"({parts[-1][1]}) of the memory's bandwidth; between 1/7 and 1/14 are {', '.join(tenth)}. Half of all cards are below"
    yield f"1/{median(part for part, _ in parts):.0f}. But PCIe is seldom what takes the time: Adam on the host is. qwen-7b, all weights"
    yield "trained, 1 row of 2048 tokens per card, parameters and optimizer on the host:"
    yield ""
    yield "| cluster | step without | step with | times | of it Adam and norm on the host | copies under way |"
    yield "|---|--:|--:|--:|--:|--:|"
    for cluster in OFFLOADED:
        case = Case(cluster, "qwen-7b", "all weights", 1)
        without, after = step(case), step(case, "offload=parameters")
        copies = max(after.busy["to_device"], after.busy["to_host"])
        yield (
            f"| {cluster} | {without.step_s:.2f} s | {after.step_s:.2f} s | {after.step_s / without.step_s:.1f} |"
            f" {after.busy['host']:.2f} s | {copies:.2f} s |"
        )
    yield ""
    yield "One cell: the command above with `offload=parameters`."
    yield ""


def nodes() -> Iterator[str]:
    """Yield the section of several nodes."""
    yield "## 16 cards over two nodes are not twice 8"
    yield ""
    yield "**Holds on Ethernet**, and on RDMA networks only with few rows per card: [scaling.md](scaling.md). How many times the"
    yield "tokens per second of 8 A100 two nodes of them have, qwen-7b, FULL_SHARD, all weights / LoRA:"
    yield ""
    names = [cluster for cluster in CLUSTERS if cluster.startswith("2x8xA100")]
    yield "| between nodes | " + " | ".join(f"{rows} rows per card".replace("1 rows", "1 row") for rows in ROWS) + " |"
    yield "|---|" + "--:|" * len(ROWS)
    for cluster in names:
        cells = [" / ".join(_times(cluster, method, rows) for method in METHODS) for rows in ROWS]
        yield f"| {cluster.partition(' ')[2]} | " + " | ".join(cells) + " |"
    yield ""


def _times(cluster: str, method: str, rows: int) -> str:
    alone, both = (step(Case(name, "qwen-7b", method, rows)).step_s for name in (cluster[2:].partition(" ")[0], cluster))
    return f"{2 * alone / both:.2f}"


HEAD = """# The article's figures

Made by `python docs/make_article_figures.py`; a test holds it up to date. The article gives figures without the models and
machines they are of. Here they are predicted over models from 7B to 70B and over cards and networks from Ethernet to
InfiniBand: speeds of the catalogue, none measured on these machines. How far predictions are off: [accuracy.md](accuracy.md).
"""


def page() -> str:
    """Return the whole page."""
    sections: Iterable[Callable[[], Iterator[str]]] = (prefetch, strategies, checkpointing, offload, nodes)
    lines = [line for section in sections for line in section()]
    return HEAD + "\n" + "\n".join(lines).rstrip() + "\n"


if __name__ == "__main__":
    TARGET.write_text(page(), encoding="utf-8")
