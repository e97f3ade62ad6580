"""A Timeline in sentences: how long a step takes, what of its communication is exposed, what computing waits for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from shardwise.catalogue.networks import assumed_network
from shardwise.report.waits import Waiting, merged_waits
from shardwise.spec.cluster import Cluster
from shardwise.spec.plan import Plan
from shardwise.spec.throughput import Throughput
from shardwise.spec.timeline import COMMUNICATION, ROOT, Lane, Timeline, What

MOST_WAITS = 5
"""Sentences of the critical path that are printed; JSON has all."""
_SMALLEST_SHARE = 0.001
"""Waits that are less of the step than this are not printed."""
_SEPARATE = 3
"""So many units are named one by one."""
_GB = 1e9
_T = 1e12

LANE_WORDS: dict[Lane, str] = {
    "compute": "computing",
    "copy_in": "copies into gathers' buffers",
    "all_gather": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "all_reduce": "all-reduce",
    "to_device": "copies from the host",
    "to_host": "copies to the host",
    "host": "the host's own work",
    "issue": "issuing operations",
}
"""Lane -> its name for people."""

WHAT_WORDS: dict[What, str] = {
    "forward": "forward",
    "backward": "backward",
    "copy_in": "copy into the gather's buffer",
    "copy_out": "copy out of the gather's buffer",
    "reduce_copy_in": "copy into the reduction's buffer",
    "reduce_sum": "sum of what came from other ranks",
    "all_gather": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "all_reduce": "all-reduce",
    "fetch": "copy from the host",
    "store": "copy to the host",
    "leave": "activations' copy to the host",
    "return": "activations' copy from the host",
    "clip": "gradient norm",
    "update": "update",
    "exchange": "agreement of all ranks",
    "issue": "issuing",
}
"""What a span is -> its name for people."""

_PHASES: dict[What, str] = {
    "clip": "the gradient norm",
    "update": "the update",
    "exchange": "the agreement of all ranks",
}


def seconds_text(seconds: float) -> str:
    """Return a time with three digits, in s (up to 9,999, with all), h, ms or us."""
    if seconds >= 9999.5:
        return f"{number_text(seconds / 3600)} h"
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= 0.9995 * size:
            return f"{_three(seconds / size)} {unit}"
    return f"{_three(seconds / 1e-6)} us" if seconds > 0 else "0 s"


def number_text(value: float) -> str:
    """Return a number with three digits, or whole with commas where it has more."""
    if value >= 999.5:
        return f"{value:,.0f}"
    return _three(value) if value >= 0.9995 else f"{value:.3g}"


def _three(value: float) -> str:
    if value >= 99.95:
        return f"{value:.0f}"
    return f"{value:.1f}" if value >= 9.995 else f"{value:.2f}"


def unit_words(unit: str, block_list: str) -> str:
    """Return a unit's name as people say it, such as `block 17`.

    Args:
        unit: As in a Timeline.
        block_list: Dotted name of the model's list of blocks.
    """
    if unit == ROOT:
        return "the root"
    number = _number(unit, block_list)
    return unit or "the whole model" if number is None else f"block {number}"


def _number(unit: str, block_list: str) -> int | None:
    rest = unit.removeprefix(f"{block_list}.")
    return int(rest) if rest != unit and rest.isdigit() else None


def units_words(units: Sequence[str], block_list: str) -> str:
    """Return the names of several units, consecutive blocks as a range."""
    numbers = [number for unit in units if (number := _number(unit, block_list)) is not None]
    low, high = min(numbers, default=0), max(numbers, default=0)
    if len(numbers) == len(units) > 1:
        if high - low + 1 == len(units):
            return f"blocks {low} to {high}" if len(units) > 2 else f"blocks {low} and {high}"
        if len(units) > _SEPARATE:
            return f"{len(units)} of the blocks {low} to {high}"
    if len(units) > _SEPARATE:
        return f"{len(units)} units"
    return " and ".join(unit_words(unit, block_list) for unit in units)


def headline_words(throughput: Throughput) -> str:
    """Return time of a step and tokens per second."""
    each = f"{number_text(throughput.tokens_per_s_per_gpu)} tokens/s on each device"
    whole = f", {number_text(throughput.tokens_per_s)} in all" if throughput.gpus > 1 else ""
    return f"{seconds_text(throughput.step_s)} a step: {each}{whole}"


def use_words(throughput: Throughput) -> str:
    """Return the share of the peak that is used, and what a million tokens take."""
    parts = []
    if throughput.mfu is not None and throughput.hfu is not None and throughput.peak_flops is not None:
        again = f" (HFU {throughput.hfu:.1%}, recomputation included)" if throughput.flops.again else ""
        peak = f"{number_text(throughput.peak_flops / _T)} TFLOP/s"
        parts.append(f"MFU {throughput.mfu:.1%} of {peak}{again}".replace("%", " %"))
    cost = throughput.cost_per_million
    money = (
        ""
        if cost is None
        else f" and cost {number_text(cost)} (price per card and hour: {throughput.price_per_gpu_hour:g})"
    )
    parts.append(f"a million tokens take {seconds_text(throughput.s_per_million)}{money}")
    return "; ".join(parts)


def exposed_words(timeline: Timeline) -> str:
    """Return what of the communication is exposed, in all and by kind."""
    inside = (
        f"; {seconds_text(timeline.tensor_s)} of the computing are exchanges over the tensor axis, which nothing hides"
        if timeline.tensor_s > 0
        else ""
    )
    if timeline.communication_s <= 0:
        return f"no gathers or reductions{inside}" if inside else "nothing is exchanged"
    whole = f"{seconds_text(timeline.exposed_s)} of {seconds_text(timeline.communication_s)} of communication"
    share = f"{100 * timeline.exposed_s / timeline.step_s:.1f} % of the step"
    hidden = f"{100 * timeline.overlap_efficiency:.0f} % are hidden"
    lanes = [
        f"{LANE_WORDS[lane]} {seconds_text(timeline.exposed.get(lane, 0.0))} of {seconds_text(timeline.busy[lane])}"
        for lane in COMMUNICATION
        if timeline.busy.get(lane, 0.0) > 0
    ]
    return f"exposed: {whole}, {share}; {hidden}; {', '.join(lanes)}{inside}"


def critical_words(timeline: Timeline, plan: Plan, block_list: str) -> Iterator[str]:
    """Yield what computing waits for, a sentence per kind of wait, the most first.

    Args:
        timeline: One step of the plan.
        plan: The plan.
        block_list: Dotted name of the model's list of blocks.
    """
    for waiting in merged_waits(timeline, plan.accumulation_steps):
        if waiting.total_s >= _SMALLEST_SHARE * timeline.step_s:
            yield waiting_words(waiting, block_list)


def waiting_words(waiting: Waiting, block_list: str) -> str:
    """Return one sentence on waits that are alike."""
    units, total = units_words(waiting.units, block_list), seconds_text(waiting.total_s)
    them = "it" if len(waiting.units) == 1 else "them"
    plural = "" if len(waiting.units) == 1 else "s"
    if waiting.place == "first":
        return f"the step begins with {total} of waiting for the first gather{plural}, of {units}: nothing hides {them}"
    if waiting.place == "last":
        return f"the step ends with {total} of waiting for the last reduction{plural}, of {units}: nothing hides {them}"
    one = unit_words(waiting.longest.by.unit, block_list)
    if waiting.place == "end":
        return f"the step ends with {total} of {_object(waiting, one)}: nothing else is left"
    longest = seconds_text(waiting.longest.end - waiting.longest.start)
    many = "" if waiting.count == 1 else _likewise(waiting, units, total)
    return f"{_phase(waiting)} waits {longest} for {_object(waiting, one)}{many}{_reason(waiting)}"


def _phase(waiting: Waiting) -> str:
    return _PHASES.get(waiting.phase, waiting.phase)


def _likewise(waiting: Waiting, units: str, total: str) -> str:
    if len(waiting.units) == 1:
        return f" ({waiting.count} times, {total} in all)"
    passes = "" if waiting.count <= len(waiting.units) else f", {waiting.count} times"
    return f" (likewise {units}{passes}, {total} in all)"


def _object(waiting: Waiting, unit: str) -> str:
    """Return what is waited for."""
    if waiting.lane == "host":
        return "the optimizer on the host" if waiting.by == "update" else f"the {WHAT_WORDS[waiting.by]} on the host"
    if waiting.lane == "issue":
        return f"the host to issue {unit}"
    if waiting.by == "exchange":
        return "the agreement of all ranks"
    if waiting.by == "clip":
        return "the sum of the gradient norm over all ranks"
    return f"the {WHAT_WORDS[waiting.by]} of {unit}"


def _reason(waiting: Waiting) -> str:
    if waiting.lane == "issue":
        return ": the device is done sooner than the host issues operations"
    factor = waiting.too_slow
    if factor is None:
        return ": nothing is computed meanwhile" if waiting.lane in COMMUNICATION else ""
    link = "the link to the host" if waiting.lane in ("to_device", "to_host") else "the link"
    if factor > 1:
        return f": {link} is {_times(factor)} too slow to hide it"
    return f": {link} is fast enough (busy for {factor:.2f} of the computing beside it), but it starts too late"


def _times(factor: float) -> str:
    if factor < 1.095:
        return f"{factor:.2f}x"
    return f"{factor:.1f}x" if factor < 9.95 else f"{factor:.0f}x"


def speed_words(cluster: Cluster, plan: Plan) -> str:
    """Return where the speeds come from."""
    if cluster.measured is not None:
        return f"speeds: measured ({cluster.measured.source})"
    gpu = cluster.gpu
    if gpu is None or gpu.rates is None:
        return "speeds: not known; measure them with shardwise probe"
    dtype = plan.dtypes.param
    product = gpu.rates.products.get(dtype) or gpu.rates.products.get("fp32")
    without = "" if dtype in gpu.rates.products else f" in fp32, as it has no units for {dtype}"
    peak = "" if product is None else f", {number_text(product.value / _T)} TFLOP/s at most{without}"
    inside = f", {gpu.rates.link.value / _GB:.3g} GB/s between cards of a node" if cluster.per_node > 1 else ""
    between = ""
    if cluster.nodes > 1:
        assumed = assumed_network(gpu, per_node=cluster.per_node, nodes=cluster.nodes)
        named = f"; network {cluster.network}"
        between = named if cluster.network else f"; network {assumed}, assumed as none was named"
    return f"speeds: catalogue ({gpu.name}{peak}{inside}{between}); measure them with shardwise probe"
