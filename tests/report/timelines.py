"""A step made by hand, for the tests of how it is told. Times in milliseconds:

compute         .  |e |  .  | f0 | f1 | f2 |h |hb| b2 | b1 |   .    | b0 |   .    |eb|    .     |c| u|
                0  1  2     3    5    7    9  10 11   13   15     17.6 19.6     22.2 22.7      28.8 29 30
all_gather      |r | g0     | g1 | g2 |
                0  1        3    5    7
reduce_scatter                                        | r2          | r1          | r0        | root |
                                                      13          17.6          22.2        26.8   28.8

16.7 ms are computed. Gathers take 7 ms, 2 of them exposed (before the embedding, and behind it); reductions take 15.8
ms, 11.3 of them exposed: 2.6 before block 1 puts its gradients away, 2.6 before block 0 does, 6.1 at the end.
"""

from __future__ import annotations

from dataclasses import replace

from shardwise.report.answer import PlanAnswer
from shardwise.spec.cluster import Figure, Gpu, Rates, Sourced
from shardwise.spec.throughput import Flops, Throughput
from shardwise.spec.timeline import ROOT, Span, Timeline, Wait

MS = 1e-3
BLOCK = "model.layers.{}"


def span(lane, what, unit, start, end, micro_batch=0) -> Span:
    """A span in milliseconds; a number is a block's."""
    name = BLOCK.format(unit) if isinstance(unit, int) else unit
    return Span(lane, what, name, micro_batch, start * MS, end * MS)


COMPUTED = (
    span("compute", "forward", ROOT, 1, 2),
    span("compute", "forward", 0, 3, 5),
    span("compute", "forward", 1, 5, 7),
    span("compute", "forward", 2, 7, 9),
    span("compute", "forward", ROOT, 9, 10),
    span("compute", "backward", ROOT, 10, 11),
    span("compute", "backward", 2, 11, 13),
    span("compute", "backward", 1, 13, 15),
    span("compute", "reduce_copy_in", 1, 17.6, 17.6),
    span("compute", "backward", 0, 17.6, 19.6),
    span("compute", "reduce_copy_in", 0, 22.2, 22.2),
    span("compute", "backward", ROOT, 22.2, 22.7),
    span("compute", "clip", "", 28.8, 29),
    span("compute", "update", "", 29, 30),
)
GATHERED = tuple(
    span("all_gather", "all_gather", unit, start, end)
    for unit, start, end in ((ROOT, 0, 1), (0, 1, 3), (1, 3, 5), (2, 5, 7))
)
REDUCED = tuple(
    span("reduce_scatter", "reduce_scatter", unit, start, end)
    for unit, start, end in ((2, 13, 17.6), (1, 17.6, 22.2), (0, 22.2, 26.8), (ROOT, 26.8, 28.8))
)
WAITS = (
    Wait(0.0, 1 * MS, COMPUTED[0], GATHERED[0]),
    Wait(2 * MS, 3 * MS, COMPUTED[1], GATHERED[1]),
    Wait(15 * MS, 17.6 * MS, COMPUTED[8], REDUCED[0]),
    Wait(19.6 * MS, 22.2 * MS, COMPUTED[10], REDUCED[1]),
    Wait(22.7 * MS, 28.8 * MS, COMPUTED[12], REDUCED[3]),
)

STEP = Timeline(
    step_s=30 * MS,
    spans=(*COMPUTED, *GATHERED, *REDUCED),
    waits=WAITS,
    busy={"compute": 16.7 * MS, "all_gather": 7 * MS, "reduce_scatter": 15.8 * MS},
    exposed={"all_gather": 2 * MS, "reduce_scatter": 11.3 * MS},
    exposed_s=13.3 * MS,
    hidden_s=9.5 * MS,
    notes=("the network is assumed",),
)
"""The step of the drawing."""


def figure(value: float) -> Figure:
    """A figure of nobody."""
    return Figure(value=value, source="made up")


RATED = Gpu(
    name="A10",
    usable=Sourced(bytes=22 * 2**30, source="vendor"),
    link="pcie",
    rates=Rates(
        products={"fp32": figure(31.25e12), "bf16": figure(125e12), "fp16": figure(125e12)},
        memory=figure(600e9),
        link=figure(26e9),
        host=figure(26e9),
        peer_to_peer=False,
    ),
)
"""A card with rates."""


def throughput(*, price: float | None = None, again: float = 0.0, peak: float | None = 31.25e12) -> Throughput:
    """8 cards that take 30 ms for 512 tokens and 1.5e12 FLOPs: 20 % of 31.25 TFLOP/s each."""
    flops = Flops(model=1.5e12, again=again)
    return Throughput(step_s=30 * MS, tokens=512, gpus=8, flops=flops, peak_flops=peak, price_per_gpu_hour=price)


def timed(answer: PlanAnswer, timeline: Timeline = STEP, found: Throughput | None = None) -> PlanAnswer:
    """An answer whose last report has a timeline."""
    *others, last = answer.reports
    plan = last.plan.model_copy(update={"accumulation_steps": 1})
    reports = (*others, replace(last, timeline=timeline, plan=plan))
    return replace(answer, reports=reports, throughput=found or throughput())
