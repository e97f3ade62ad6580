"""Seconds of computing: what a device and its host take for Work. No torch.

pace = pace_of(cluster, runtime, compiled=False)
pace.seconds(block.forward)
"""

from __future__ import annotations

from collections.abc import Mapping

from shardwise.predict.pace.base import Pace
from shardwise.predict.pace.measured import MeasuredPace
from shardwise.predict.pace.rated import RatedPace, unknown
from shardwise.predict.remembered import Remembered
from shardwise.spec.cluster import Cluster
from shardwise.spec.problems import BadInput
from shardwise.spec.runtime import Runtime

__all__ = ["Pace", "pace_of"]

_known: Remembered[Pace] = Remembered()


def pace_of(
    cluster: Cluster,
    runtime: Runtime,
    *,
    compiled: bool,
    dtype: str | None = None,
    values: Mapping[str, float] | None = None,
) -> Pace:
    """Return the pace of a cluster's devices; the same object for the same cluster, so what it remembers is of use.

    Args:
        cluster: Its probe's curves if there are any, else the rates of its card.
        runtime: The program: only FSDP has hooks around units, and some have attention kernels of their own.
        compiled: Blocks are compiled, so the host issues less.
        dtype: What is computed in, `bf16`, `fp16` or `fp32`; None: the one of two bytes that the card has units for.
        values: Constants by name, in the place of those of `predict.pace.constants`; such a pace is made anew.

    Raises:
        BadInput: CPU processes without a probe; a card whose rates are not known; a probe without that dtype.
    """
    if values is not None:
        return _made(cluster, runtime, compiled, dtype, values)
    key = (runtime.sharding, runtime.attention_kernel, compiled, dtype)
    return _known.get(cluster, key, lambda: _made(cluster, runtime, compiled, dtype, None))


def _made(
    cluster: Cluster, runtime: Runtime, compiled: bool, dtype: str | None, values: Mapping[str, float] | None
) -> Pace:
    gpu, measured = cluster.gpu, cluster.measured
    rated: Pace | None = None
    if gpu is not None and gpu.rates is not None:
        rated = RatedPace(cluster, gpu, gpu.rates, runtime, compiled=compiled, dtype=dtype, values=values)
    if measured is not None:
        return MeasuredPace(cluster, measured, runtime, compiled=compiled, dtype=dtype, host=rated)
    if rated is not None:
        return rated
    if gpu is None:
        raise BadInput(unknown(cluster.name, "no catalogue can say how fast CPUs compute"))
    raise BadInput(unknown(cluster.name, f"how fast a {gpu.name} computes is not known"))
