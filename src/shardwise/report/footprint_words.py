"""A Footprint in sentences: whether it fits, where the peak is, where each figure comes from, what would lower it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from shardwise.report.answer import PlanAnswer, device_fits, host_fits, host_peak, host_stages
from shardwise.report.terminal import bytes_text
from shardwise.spec.advice import Advice
from shardwise.spec.footprint import Category, DeviceMemory, Footprint, HostMemory, Instant, Phase
from shardwise.spec.plan import Plan

GIB, MIB = 2**30, 2**20

INSTRUMENTS = {
    "estimate": "closed formulas over the model's shape (docs/memory.md)",
    "trace": "the real model under this plan, two steps with fake tensors (docs/trace.md)",
    "rehearse": "rank 0 run for real, its peers played",
    "run": "live tensors of rank 0 in a real step on this machine",
}
"""Instrument -> what its figures are."""

_PHASES: dict[Phase, str] = {
    "load": "loading",
    "forward": "forward",
    "backward": "backward",
    "optimizer_step": "optimizer step",
    "evaluation": "evaluation",
    "save": "saving",
}


@dataclass(frozen=True)
class Unit:
    """What the figures of a table are counted in."""

    name: str
    """`GiB` or `MiB`."""
    bytes: int
    """Bytes of one."""

    def of(self, count: float) -> str:
        """Return a number of bytes without the unit's name."""
        return f"{count / self.bytes:.2f}"


def unit_for(count: float) -> Unit:
    """Return what figures up to `count` bytes are best told in."""
    return Unit("GiB", GIB) if count >= GIB / 2 else Unit("MiB", MIB)


def gib(count: float) -> str:
    """Return bytes in GiB, without the unit's name."""
    return f"{count / GIB:.2f}"


def phase_words(phase: Phase) -> str:
    """Return a phase as people say it."""
    return _PHASES[phase]


def category_words(category: Category) -> str:
    """Return a category as people say it."""
    return category.replace("_", " ").replace("all gather", "all-gather").replace("reduce scatter", "reduce-scatter")


def where_words(instant: Instant) -> str:
    """Return where an instant is: phase and unit at work."""
    return f"{phase_words(instant.phase)}, at {instant.where}"


def head_words(answer: PlanAnswer) -> Iterator[str]:
    """Yield what is asked: model and method, cluster, batch."""
    job, model, cluster = answer.job, answer.workload.model, answer.cluster
    method = f"LoRA rank {job.lora_rank}" if job.use_lora else "full fine-tuning"
    size = f"{model.parameters / 1e9:.2f}B" if model.parameters >= 1e8 else f"{model.parameters / 1e6:.2f}M"
    yield f"{model.name}, {size} parameters in {model.layers} blocks; {method}; rows of {job.seq_len} tokens"
    card = cluster.gpu
    ranks = f"{cluster.world} {'ranks' if cluster.world > 1 else 'rank'}"
    usable = "" if card is None else f", {gib(card.usable.bytes)} GiB on each card ({card.usable.source})"
    yield f"{cluster.name}: {ranks}{usable}"
    if model.note:
        yield model.note


def verdict_words(answer: PlanAnswer) -> str:
    """Return the answer in one sentence."""
    footprint = answer.verdict.footprint
    device, host = footprint.device, footprint.host
    sentences = []
    if device is not None and device.limit is not None:
        sentences.append(_card_verdict(device, device.limit))
    else:
        sentences.append(f"Live tensors of one rank peak at {bytes_text(footprint.peak.allocated)}.")
    if host is not None and host.limit is not None and host_fits(footprint) is False:
        stage, size = host_peak(host)
        needs = f"{stage} needs {gib(size)} GiB of host memory per node, which has {gib(host.limit)} GiB"
        sentences.append(f"{'And' if device_fits(footprint) is False else 'But'} {needs}.")
    return " ".join(sentences)


def _card_verdict(device: DeviceMemory, limit: int) -> str:
    total, needed = device.total, device.needed
    if not device.fits:
        missing = f"{gib(needed.value)} of {gib(limit)} GiB, {gib(needed.value - limit)} GiB too much"
        return f"It does not fit: each card would need {missing}."
    if needed.high > limit:
        most = (
            f"{gib(needed.value)} of {gib(limit)} GiB are needed on each card, and {gib(needed.high)} GiB are possible"
        )
        return f"It should fit, but not surely: {most}."
    if device.tight:
        spare = f"{gib(needed.value)} of {gib(limit)} GiB are needed on each card"
        return (
            f"It fits, tightly: {spare}, but PyTorch's allocator has to give memory back and try again, which is slow."
        )
    return f"It fits: {gib(total.value)} of {gib(limit)} GiB on each card, {gib(limit - total.value)} GiB to spare."


def peak_words(footprint: Footprint) -> Iterator[str]:
    """Yield where the peak is, and the largest contiguous buffer."""
    peak, buffer = footprint.peak, footprint.largest_buffer
    yield f"peak in {where_words(peak)}: {bytes_text(peak.allocated)} of live tensors"
    name = category_words(buffer.category)
    yield f"largest contiguous buffer: {bytes_text(buffer.bytes)}, {name} at {buffer.where}"


def source_words(category: Category, answer: PlanAnswer) -> str:
    """Return what a category's figure is made of, in this plan's own numbers."""
    plan, units = answer.plan, answer.units
    trained = plan.dtypes.trained_storage
    tokens = f"{plan.micro_batch} x {answer.workload.seq_len} tokens"
    biggest = max((row.gathered_bytes for row in units.rows), default=0)
    words: dict[Category, str] = {
        "sharded_parameters": f"{bytes_text(units.stored_bytes)} stored{_over_ranks(plan)}",
        "unsharded_parameters": f"gathered weights in {plan.dtypes.param}; the largest unit has {bytes_text(biggest)}",
        "all_gather_buffers": "what all-gathers fill, before weights are copied out",
        "reduce_scatter_buffers": f"gradients in {plan.dtypes.reduce}, while they are reduced",
        "unsharded_gradients": _whole_gradients(plan),
        "sharded_gradients": f"of {units.trainable:,} trained elements in {trained}{_over_ranks(plan)}",
        "optimizer_states": f"{plan.optimizer}, {plan.dtypes.optimizer_state}{_over_ranks(plan)}",
        "activations": f"kept for backward, {tokens}, checkpointing {plan.activation_checkpointing}",
        "recomputed_activations": "of the block that backward computes again",
        "logits_and_loss": f"{tokens} x {answer.workload.model.vocab:,} logits, loss head {plan.loss_head}",
        "temporaries": "results that live for a moment",
        "inputs": f"token ids and labels of {plan.accumulation_steps} micro-batches",
        "buffers": "rotary tables and other tensors that are not trained",
        "offloaded": "in host memory, in no total of the card",
    }
    return words[category]


def _over_ranks(plan: Plan) -> str:
    split = [f"{size} {axis}" for size, axis in ((plan.mesh.shard, "ranks"), (plan.mesh.tensor, "tensor")) if size > 1]
    return " over " + " x ".join(split) if split else ", whole on every rank"


def _whole_gradients(plan: Plan) -> str:
    if plan.accumulation_mode == "defer_all" and plan.accumulation_steps > 1:
        return "of every unit, kept whole until the last micro-batch"
    return f"in {plan.dtypes.param}, of units that are not reduced yet"


def host_words(host: HostMemory) -> str:
    """Return host memory of a node in one line."""
    limit = "" if host.limit is None else f", of {gib(host.limit)} GiB"
    stages = [f"{bytes_text(size)} while {stage}" for stage, size in host_stages(host).items() if size]
    return f"{', '.join(stages)}{limit}, per node"


def advice_words(advice: Advice) -> str:
    """Return what one change does to the peak."""
    then = f"to {bytes_text(advice.peak.allocated)} (then in {where_words(advice.peak)})"
    return f"lowers the peak by {bytes_text(advice.lowers)} {then}"
