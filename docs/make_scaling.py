"""Write what docs/scaling.md and docs/timeline.md show of the estimate: python docs/make_scaling.py

Each part of a page stands between two comments that name it; the rest of the page is written by hand.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from pages import ROOT, Parts, spliced, write
from rich.console import Console

from shardwise.catalogue.clusters import find_cluster
from shardwise.catalogue.models import find_model
from shardwise.planner.advice import by_estimate
from shardwise.planner.by_shape import Planned, plan_by_shape
from shardwise.planner.scaling import rows_per_gpu, scale
from shardwise.predict.throughput import throughput_of
from shardwise.report.answer import PlanAnswer
from shardwise.report.scaling_table import ScalingLine, bend_words, print_scaling
from shardwise.report.timeline_table import print_step
from shardwise.spec.reader import read_job

MODEL = "qwen-7b"
MACHINE = "8xA100-80GB"
"""NVLink of 300 GB/s per direction and card, as the article says."""
NETWORKS = {
    "eth-80": "10 GB/s, kernel sockets",
    "eth-200": "25 GB/s, kernel sockets",
    "roce-80": "10 GB/s, RDMA",
    "roce-200": "25 GB/s, RDMA",
    "ib-8x200": "200 GB/s, an adapter per card",
}
"""Network as typed -> its rate, of a machine in one direction: the article's two in two ways each, and a strong one."""
SETTINGS = ("fsdp=FULL_SHARD", "mixed_precision=bf16", "activation_checkpointing=true", "seq_len=2048")
METHODS = {"all weights": (), "LoRA, rank 64": ("use_lora=true", "lora_rank=64")}
MICRO_BATCHES = (1, 4)
CARDS = (8, 16)

SWEEP = "8xA100-80GB roce-200"
SWEPT = tuple(8 * 2**power for power in range(10))
SWEPT_ROWS = 2
WIDTH = 100


def planned(cluster: str, *settings: str, micro_batch: int = 1) -> Planned:
    """Return the article's model on some machines."""
    machines = find_cluster(cluster)
    batch = (f"micro_batch={micro_batch}", f"global_batch={micro_batch * machines.world}")
    job = read_job(None, [f"model={MODEL}", *SETTINGS, *batch, *settings], needs_data=False)
    return plan_by_shape(job, find_model(MODEL), machines)


def article() -> Iterator[str]:
    """Yield what becomes of 8 cards when they are 16, on the article's two networks."""
    lines = {
        (method, network, rows): scale(planned(f"{MACHINE} {network}", *settings, micro_batch=rows), CARDS)
        for method, settings in METHODS.items()
        for rows in MICRO_BATCHES
        for network in NETWORKS
    }
    names = [line.layout for line in next(iter(lines.values()))]
    yield "| trains | rows of a card | between machines | " + " | ".join(names) + " |"
    yield "|---" * (len(names) + 3) + "|"
    for (method, network, rows), found in lines.items():
        cells = " | ".join(_cell(line) for line in found)
        yield f"| {method} | {rows} | {NETWORKS[network]} (`{network}`) | {cells} |"
    yield ""
    yield f"Why, for `flat` with {MICRO_BATCHES[-1]} rows a card and all weights trained:"
    yield ""
    method = next(iter(METHODS))
    for network in NETWORKS:
        yield f"- `{network}`: {bend_words(lines[method, network, MICRO_BATCHES[-1]][0])}"
    yield ""


def _cell(line: ScalingLine) -> str:
    small, large = (point.throughput for point in line.points)
    if small is None or large is None:
        return next(point.refused for point in line.points if point.refused)
    gain = large.tokens_per_s / small.tokens_per_s
    return f"{small.tokens_per_s:,.0f} to {large.tokens_per_s:,.0f}: **{gain:.2f}x**"


def sweep() -> Iterator[str]:
    """Yield the answer from one machine to 512."""
    base = planned(SWEEP, micro_batch=SWEPT_ROWS)
    text = io.StringIO()
    console = Console(file=text, width=WIDTH, soft_wrap=True)
    print_scaling(console, scale(base, SWEPT), float(rows_per_gpu(base)))
    yield "```text"
    yield from (line.rstrip() for line in text.getvalue().splitlines())
    yield "```"


def step() -> Iterator[str]:
    """Yield the step section of two machines."""
    plan = planned(f"2x{MACHINE} roce-200", micro_batch=4)
    report = by_estimate(plan)
    assert report.timeline is not None
    answer = PlanAnswer(
        job=plan.job,
        workload=plan.workload,
        cluster=plan.cluster,
        plan=plan.plan,
        units=plan.units,
        reports=(report,),
        advice=(),
        throughput=throughput_of(report.timeline, plan.workload, plan.plan, plan.cluster),
    )
    text = io.StringIO()
    print_step(Console(file=text, width=WIDTH, soft_wrap=True), answer)
    yield "```text"
    yield from (line.rstrip() for line in text.getvalue().splitlines() if line.strip())
    yield "```"


PARTS: dict[Path, Parts] = {
    ROOT / "docs" / "scaling.md": {"article": article, "sweep": sweep},
    ROOT / "docs" / "timeline.md": {"step": step},
}
"""Page -> name of a part -> what makes its lines."""

PAGES = {path: partial(spliced, path, parts) for path, parts in PARTS.items()}
"""Page -> what makes its whole text."""


if __name__ == "__main__":
    write(PAGES)
