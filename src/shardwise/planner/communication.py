"""Prefetch and reduction of a Plan: what is done in the background, and how much of it at a time."""

from __future__ import annotations

from shardwise.spec.job import Job
from shardwise.spec.layout import Mesh, Prefetch, ReduceScatter
from shardwise.spec.plan import Dtypes
from shardwise.spec.problems import BadInput, Problem

CPU_DEPTH = 2
"""Units gathered ahead on CPUs: with one, the link idles when a gather ends while the unit before still computes."""

CPU_BUFFERS = 2
"""Reductions in flight on CPUs: one on the wire, one that waits for it, so that the link never idles."""


def prefetch(job: Job, device_type: str, reasons: dict[str, str]) -> Prefetch:
    """Return depths and way of the gathers.

    Raises:
        BadInput: gathers that block were asked for where the device has no such mode.
    """
    asked = job.prefetch
    if device_type != "cpu" and asked.async_all_gather is False:
        reason = "gathers run on streams of their own on GPUs, which cannot be switched off"
        raise BadInput(Problem(field="prefetch.async_all_gather", value=False, reason=reason, fix="remove it"))
    on_cpu = device_type == "cpu"
    if asked.forward is None:
        reasons["prefetch.forward"] = (
            f"{CPU_DEPTH}: on CPUs gathers only overlap when issued ahead, and with one the link idles at times"
            if on_cpu
            else "0: on GPUs the host runs ahead and gathers the next unit anyway"
        )
    if asked.backward is None:
        reasons["prefetch.backward"] = (
            f"{CPU_DEPTH}, for the same reason" if on_cpu else "1, as PyTorch does by default"
        )
    return Prefetch(
        forward=asked.forward if asked.forward is not None else CPU_DEPTH * on_cpu,
        backward=asked.backward if asked.backward is not None else (CPU_DEPTH if on_cpu else 1),
        async_all_gather=asked.async_all_gather is not False,
    )


def reduce_scatter(job: Job, device_type: str, mesh: Mesh, dtypes: Dtypes, reasons: dict[str, str]) -> ReduceScatter:
    """Return the way of the reductions.

    Raises:
        BadInput: asynchronous reductions were asked for where they would be wrong, with the reason.
    """
    asked = job.reduce_scatter
    obstacle = _obstacle(job, device_type, mesh, dtypes)
    asynchronous = obstacle == "" if asked.asynchronous is None else asked.asynchronous
    if asynchronous and obstacle:
        raise BadInput(
            Problem(field="reduce_scatter.asynchronous", value=True, reason=obstacle, fix="remove it, or write false")
        )
    if device_type != "cpu" and not asynchronous:
        reason = "reductions run on a stream of their own on GPUs, which cannot be switched off"
        raise BadInput(Problem(field="reduce_scatter.asynchronous", value=False, reason=reason, fix="remove it"))
    if asked.asynchronous is None and obstacle:
        reasons["reduce_scatter.asynchronous"] = f"off: {obstacle}"
    return ReduceScatter(
        buffers=asked.buffers or (CPU_BUFFERS if asynchronous and device_type == "cpu" else 1),
        separate_group=asked.separate_group,
        asynchronous=asynchronous,
    )


def _obstacle(job: Job, device_type: str, mesh: Mesh, dtypes: Dtypes) -> str:
    """Return why a reduction may not be awaited later than FSDP2 itself does; "" where it may.

    FSDP2 reads the result at once where it must be cast, reduced further or moved; what it would read is not there yet.
    """
    if device_type != "cpu":
        return ""
    if mesh.shard == 1:
        return "nothing is reduced over a shard axis of one rank"
    if mesh.replicate > 1:
        return "the all-reduce over replicas reads the result at once"
    if dtypes.reduce != dtypes.trained_storage:
        return f"gradients are cast from {dtypes.reduce} to {dtypes.trained_storage} at once"
    if job.offload.parameters:
        return "gradients are moved to host memory at once"
    return ""
