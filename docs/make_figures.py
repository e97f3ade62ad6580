"""Write what README.md and docs/*.md show of the code and its estimates: python docs/make_figures.py

Each part of a page stands between two comments that name it; the rest of the page is written by hand.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Literal

from pages import ROOT, Parts, spliced, write
from rich.console import Console

from shardwise.catalogue.clusters import find_cluster
from shardwise.catalogue.models import find_model
from shardwise.planner.advice import advise, by_estimate
from shardwise.planner.by_shape import Planned, plan_by_shape
from shardwise.planner.strategy_table import strategy_rows
from shardwise.predict.blocks import computation
from shardwise.predict.constants import CONSTANTS
from shardwise.report.answer import PlanAnswer
from shardwise.report.footprint_table import print_answer
from shardwise.report.footprint_words import category_words, gib, unit_for, where_words
from shardwise.report.strategy_table import table_cells
from shardwise.report.terminal import bytes_text
from shardwise.spec.footprint import DeviceMemory
from shardwise.spec.reader import read_job
from shardwise.spec.runtime import Runtime

TABLE_CASES = (("llama-2-7b", "8xA100-80GB"), ("llama-2-70b", "64xH100-SXM-80GB"))
"""Model and cluster of the tables in section 1."""
TABLE_SETTINGS = ("mixed_precision=bf16", "activation_checkpointing=true", "seq_len=2048")

CASE_CLUSTER = "8xA10"
CASE = (
    "fsdp=FULL_SHARD",
    "mixed_precision=fp16",
    "use_lora=true",
    "lora_rank=64",
    "activation_checkpointing=true",
)
"""The article's configuration."""
CASE_MODEL, CASE_ROWS = "qwen-7b", "seq_len=2048"
SEQ_LENS = (512, 1024, 2048, 4096)
MICRO_BATCHES = (1, 2, 4, 8)
LOW, HIGH = 17 * 2**30, 19 * 2**30
"""What the article measured on a card."""

WITHOUT: dict[str, tuple[str, ...]] = {
    "all four": (),
    "without FULL_SHARD: every rank holds everything": ("fsdp=NO_SHARD",),
    "without fp16: computed and stored in fp32": ("mixed_precision=fp32", "model.dtype=fp32"),
    "without LoRA: every weight trains": ("use_lora=false", "lora_rank=null"),
    "without checkpointing": ("activation_checkpointing=false",),
}
"""Name -> settings that take one of the article's four measures away."""

README_WIDTH = 110
README_END = "on the card:"
"""The README shows the answer up to here."""


def planned(*settings: str, model: str = CASE_MODEL, cluster: str = CASE_CLUSTER) -> Planned:
    """Return the plan of some settings."""
    job = read_job(None, [f"model={model}", *settings], needs_data=False)
    return plan_by_shape(job, find_model(model), find_cluster(cluster))


def device_of(plan: Planned) -> DeviceMemory:
    """Return what a card holds under a plan."""
    device = by_estimate(plan).footprint.device
    assert device is not None
    return device


def strategies() -> Iterator[str]:
    """Yield the lines of section 1's tables."""
    for model, cluster in TABLE_CASES:
        world = find_cluster(cluster).world
        batch = ("micro_batch=1", f"global_batch={world}")
        base = planned("fsdp=FULL_SHARD", *TABLE_SETTINGS, *batch, model=model, cluster=cluster)
        yield f"`shardwise plan --table --model {model} --cluster {cluster} {' '.join((*TABLE_SETTINGS, *batch))}`"
        yield f"({base.workload.model.parameters / 1e9:.2f}B parameters), GiB on one rank:"
        yield ""
        heads = ("parameters", "gradients", "optimizer states", "gathered", "reduced", "activations, loss", "peak")
        yield "| | " + " | ".join(heads) + " |"
        yield "|---" * (len(heads) + 1) + "|"
        rows = strategy_rows(base, {"estimate": by_estimate})
        unit = unit_for(max(row.by["estimate"].peak for row in rows))
        for row in rows:
            name = f"{row.title} = {row.plan.strategy}"
            yield f"| {name} | " + " | ".join(table_cells(row, row.by["estimate"], unit)) + " |"
        yield ""


def case() -> Iterator[str]:
    """Yield the lines of section 12."""
    yield from _footprint()
    yield from _sweep()
    yield from _measured_range()
    yield from _without()


def _footprint() -> Iterator[str]:
    footprint = by_estimate(planned(*CASE, CASE_ROWS)).footprint
    yield f"Rows of 2048 tokens, micro-batch 1; the peak is in {where_words(footprint.peak)}:"
    yield ""
    yield "| what | GiB |"
    yield "|---|---|"
    for category, size in sorted(footprint.peak.live.items(), key=lambda item: -item[1]):
        if size >= 2**20:
            yield f"| {category_words(category)} | {gib(size)} |"
    yield f"| **live tensors** | **{gib(footprint.peak.allocated)}** |"
    device = footprint.device
    assert device is not None
    assert device.limit is not None
    interval = f"{gib(device.total.low)} .. {gib(device.total.high)}"
    yield f"| **on the card** (nvidia-smi), of {gib(device.limit)} | **{gib(device.total.value)}** ({interval}) |"
    yield ""


def _sweep() -> Iterator[str]:
    yield "On the card at other row lengths and micro-batches, GiB. What does not fit stands in brackets, and what fits"
    yield "only because the allocator gives memory back is called tight; both with what is needed:"
    yield ""
    yield "| seq_len | " + " | ".join(f"micro-batch {size}" for size in MICRO_BATCHES) + " |"
    yield "|---" * (len(MICRO_BATCHES) + 1) + "|"
    for length in SEQ_LENS:
        yield f"| {length} | " + " | ".join(_cell(length, rows) for rows in MICRO_BATCHES) + " |"
    yield ""


def _cell(length: int, rows: int) -> str:
    device = device_of(_with(length, rows))
    if not device.fits:
        return f"({gib(device.needed.value)})"
    return f"{gib(device.needed.value)} tight" if device.tight else gib(device.total.value)


def _with(length: int, rows: int) -> Planned:
    return planned(*CASE, f"seq_len={length}", f"micro_batch={rows}", f"global_batch={8 * rows}")


def _measured_range() -> Iterator[str]:
    """Say at which row lengths the article's figure comes out."""
    yield f"The article's {LOW >> 30} to {HIGH >> 30} GB (taken as GiB) come out at:"
    yield ""
    yield "| micro-batch | rows of so many tokens |"
    yield "|---|---|"
    for rows in MICRO_BATCHES:
        shortest, too_long = _first_length(rows, LOW), _first_length(rows, HIGH + 1)
        yield f"| {rows} | {shortest} to {too_long - 1} |"
    yield ""


def _first_length(rows: int, size: int) -> int:
    """Return the shortest row length with which a card holds at least `size` bytes."""
    low, high = 2, 16384
    while low < high:
        middle = (low + high) // 2
        if device_of(_with(middle, rows)).total.value >= size:
            high = middle
        else:
            low = middle + 1
    return low


def _without() -> Iterator[str]:
    yield "What each of the four measures is worth, rows of 2048 tokens, micro-batch 1, GiB:"
    yield ""
    yield "| | live tensors | on the card | fits |"
    yield "|---|---|---|---|"
    for name, settings in WITHOUT.items():
        footprint = by_estimate(planned(*CASE, CASE_ROWS, "micro_batch=1", *settings)).footprint
        device = footprint.device
        assert device is not None
        fits = "no" if not device.fits else "tight" if device.tight else "yes"
        size = device.total.value if device.fits else device.needed.value
        yield f"| {name} | {gib(footprint.peak.allocated)} | {gib(size)} | {fits} |"
    yield ""


def answer() -> Iterator[str]:
    """Yield the lines of the README's answer, up to where it is cut."""
    plan = planned(*CASE)
    report = by_estimate(plan)
    made = PlanAnswer(
        job=plan.job,
        workload=plan.workload,
        cluster=plan.cluster,
        plan=plan.plan,
        units=plan.units,
        reports=(report,),
        advice=advise(plan, report.footprint),
    )
    text = io.StringIO()
    print_answer(Console(file=text, width=README_WIDTH, soft_wrap=True), made)
    yield "```text"
    for line in text.getvalue().splitlines():
        if line.strip().startswith(README_END):
            break
        yield line
    yield "  ..."
    yield "```"


BLOCK_MODELS = ("gpt2-xl", "llama-2-7b", "llama-3.1-8b", "qwen2.5-7b", "qwen3-8b", "gemma-2-9b", "phi-3-mini")
BLOCK_MODES: tuple[Literal["none", "selective"], ...] = ("none", "selective")


def blocks() -> Iterator[str]:
    """Yield what a block of some models keeps, in hidden states."""
    methods = {"full": (), "LoRA": ("use_lora=true", "lora_rank=16")}
    heads = [f"{name}, {mode}" for name in methods for mode in BLOCK_MODES]
    yield "| model | " + " | ".join(f"{head.replace(', none', '')}" for head in heads) + " |"
    yield "|---" * (len(heads) + 1) + "|"
    for model in BLOCK_MODELS:
        cells = []
        for settings in methods.values():
            plan = planned("fsdp=FULL_SHARD", "mixed_precision=bf16", "seq_len=1024", *settings, model=model)
            unit = 2 * plan.plan.micro_batch * plan.workload.seq_len * plan.workload.model.hidden
            computed = computation(plan.workload, Runtime(), device_type="cuda")
            cells += [f"{computed.block(plan.plan, 0, checkpointing=mode).kept / unit:.1f}" for mode in BLOCK_MODES]
        yield f"| {model} | " + " | ".join(cells) + " |"
    yield ""


def constants() -> Iterator[str]:
    """Yield the table of measured constants."""
    yield "| constant | value | between | is | source |"
    yield "|---|---|---|---|---|"
    for one in CONSTANTS:
        words = bytes_text if one.unit == "bytes" else "{:g}".format
        figures = f"{words(one.value)} | {words(one.low)} and {words(one.high)}"
        yield f"| `{one.name}` | {figures} | {one.meaning} | {one.source} |"
    yield ""


def shims() -> Iterator[str]:
    """Yield the table of what GPUs do otherwise."""
    from shardwise.predict.shims import SHIMS

    yield "| what | traced instead | source |"
    yield "|---|---|---|"
    for shim in SHIMS:
        yield f"| {shim.name} | {shim.changes} | {shim.source} |"
    yield ""


PARTS: dict[Path, Parts] = {
    ROOT / "README.md": {"answer": answer},
    ROOT / "docs" / "article.md": {"table": strategies, "case": case},
    ROOT / "docs" / "memory.md": {"blocks": blocks, "constants": constants},
    ROOT / "docs" / "trace.md": {"shims": shims},
}
"""Page -> name of a part -> what makes its lines."""

PAGES = {path: partial(spliced, path, parts) for path, parts in PARTS.items()}
"""Page -> what makes its whole text."""


if __name__ == "__main__":
    write(PAGES)
