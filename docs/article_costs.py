"""The sections of docs/article_figures.md about checkpointing and offload."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from statistics import median
from typing import Literal, NamedTuple

from article_tables import Section, span
from pages import filled

from shardwise.catalogue.cards import cards, gpu
from shardwise.predict.blocks import computation
from shardwise.predict.throughput import throughput_of
from shardwise.spec.runtime import SHARDWISE
from shardwise.spec.timeline import Timeline
from shardwise.trials.article_grid import LORA, METHODS, MODELS, ROWS, WHOLE, Cell, planned, step

OFFLOADED = ("8xA10", "8xA100-SXM-80GB", "8xH100-SXM-80GB")
TIMED = ("8xA100-SXM-80GB", "8xH100-SXM-80GB")
"""Clusters of the table of checkpointing."""

Mode = Literal["none", "selective", "full"]


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
    yield filled(
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
    cell = Cell(TIMED[0], model, method, 1)
    none, selective, full = _kept(cell, "none"), _kept(cell, "selective"), _kept(cell, "full")
    plan = planned(cell)
    flops = throughput_of(step(cell), plan.workload, plan.plan, plan.cluster).flops
    more = 100 * flops.again / flops.model
    cells = [f"{none / 2**30:.1f}"]
    cells += [f"{size / 2**30:.1f} (-{100 * (1 - size / none):.0f} %)" for size in (selective, full)]
    cells.append(f"+{more:.0f} %")
    slower = {mode: [_slower(model, method, cluster, mode) for cluster in TIMED] for mode in ("selective", "full")}
    cells += [" / ".join(f"+{percent:.0f}" for percent in percents) for mode in slower for percents in slower[mode]]
    return Checkpointed(
        100 * (1 - full / none), more, [one for some in slower["full"] for one in some], " | ".join(cells)
    )


def _kept(cell: Cell, mode: Mode) -> float:
    """Return bytes that all blocks keep, and with `full` those of the block that is computed again."""
    plan = planned(cell)
    computed = computation(plan.workload, SHARDWISE, device_type="cuda")
    kept = plan.workload.model.layers * computed.block(plan.plan, 0, checkpointing=mode).kept
    return kept + (computed.block(plan.plan, 0, checkpointing="none").kept if mode == "full" else 0)


def _slower(model: str, method: str, cluster: str, mode: str) -> list[float]:
    cells = [Cell(cluster, model, method, rows) for rows in ROWS]
    without = [step(cell, "activation_checkpointing=none").step_s for cell in cells]
    with_it = [step(cell, f"activation_checkpointing={mode}").step_s for cell in cells]
    return [100 * (longer / shorter - 1) for longer, shorter in zip(with_it, without, strict=True)]


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
    return step(Cell(cluster, "qwen-7b", WHOLE, 1))


def _offloaded(cluster: str) -> Timeline:
    return step(Cell(cluster, "qwen-7b", WHOLE, 1), "offload=parameters")


def _offload() -> Iterator[str]:
    yield filled(
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
