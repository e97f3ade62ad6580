"""What this machine offers to a run, and whether it is what the job names."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Literal

import psutil

from shardwise.catalogue.cards import find_device
from shardwise.catalogue.clusters import find_cluster
from shardwise.report.run_folder import Backend
from shardwise.spec.cluster import CPU, Cluster, Gpu, Sourced
from shardwise.spec.job import DETECT, Job
from shardwise.spec.problems import BadInput, Problem

_GROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")
_GROUP_CORES = Path("/sys/fs/cgroup/cpu.max")


@dataclass(frozen=True, kw_only=True)
class Devices:
    """The ranks that a run will have."""

    device_type: Literal["cpu", "cuda"]
    """`cuda` or `cpu`."""
    world: int
    """Number of ranks."""
    why: str
    """Where the number comes from."""
    per_node: int | None = None
    """Ranks of one machine, where the job says it; None: all of them, or as torchrun says."""

    @property
    def backend(self) -> Backend:
        """Communication library of each kind of tensor: with GPUs, what is offloaded to the host needs gloo too."""
        return backend_of(self.device_type)


def backend_of(device_type: str) -> Backend:
    """Return what a process group of such ranks is initialised with."""
    return "cpu:gloo,cuda:nccl" if device_type == "cuda" else "gloo"


def detect(job: Job, nproc: int | None = None) -> Devices:
    """Return the devices of a run: what the job names, else every GPU, else two CPU processes.

    Args:
        job: Its `cluster` is `detect`, cards, or CPU processes.
        nproc: Number of ranks, when the command line or torchrun says it.

    Raises:
        BadInput: more ranks than GPUs, another number than `cluster` says, or cards that are not here.
    """
    if job.cluster != DETECT:
        devices = planned_devices(job, nproc)
        _refuse_elsewhere(find_cluster(job.cluster))
        return devices
    import torch

    gpus = torch.cuda.device_count()
    local = int(os.environ.get("LOCAL_WORLD_SIZE", "0"))
    if gpus > 0:
        if (local or nproc or 1) > gpus:
            raise BadInput(
                Problem(field="nproc", value=local or nproc, reason=f"more ranks than this machine's {gpus} GPUs")
            )
        return Devices(
            device_type="cuda", world=nproc or gpus, why="as asked" if nproc else "every GPU of this machine"
        )
    if nproc is not None:
        return Devices(device_type="cpu", world=nproc, why="as asked, on CPU")
    world = _cpu_ranks()
    return Devices(device_type="cpu", world=world, why=f"no GPU here: {world} CPU processes")


def planned_devices(job: Job, nproc: int | None = None) -> Devices:
    """Return the devices that a job is planned for: named cards need not be here.

    Raises:
        BadInput: no such card; another number of ranks than `cluster` says.
    """
    if job.cluster == DETECT:
        return detect(job, nproc)
    cluster = find_cluster(job.cluster)
    if nproc is not None and nproc != cluster.world:
        reason = f"contradicts {nproc} ranks, which the command line or torchrun asks for"
        raise BadInput(Problem(field="cluster", value=job.cluster, reason=reason, fix="keep one of the two"))
    return Devices(
        device_type=cluster.device_type,
        world=cluster.world,
        why="cluster" if cluster.gpu is None else f"cluster: {cluster.gpu.name}",
        per_node=None if _anywhere(cluster) else cluster.per_node,
    )


def _anywhere(cluster: Cluster) -> bool:
    """Whether it is a plain number of CPU processes, on however many machines torchrun starts them."""
    return cluster.gpu is None and cluster.nodes == 1


def detect_cluster() -> Cluster:
    """Return this machine as a cluster of one node: every GPU, else two CPU processes."""
    found = _gpus_here()
    if not found:
        ranks = _cpu_ranks()
        return _this_machine(f"{ranks}x{CPU}", ranks, None)
    name, total = min(found, key=lambda card: card[1])
    known = find_device(name, total)
    usable = Sourced(bytes=total, source="torch.cuda.get_device_properties on this machine")
    card = Gpu(name=name, usable=usable) if known is None else known.model_copy(update={"usable": usable})
    return _this_machine(f"{len(found)}x{card.name}", len(found), card)


def _this_machine(name: str, devices: int, card: Gpu | None) -> Cluster:
    return Cluster(name=name, nodes=1, per_node=devices, gpu=card, host_bytes=host_bytes(), host_cores=host_cores())


def host_bytes() -> int:
    """Return the memory that processes on this machine can use: all of it, or what their container is given."""
    total = int(psutil.virtual_memory().total)
    with suppress(OSError, ValueError):
        total = min(total, int(_GROUP_LIMIT.read_text()))
    return total


def host_cores() -> int:
    """Return the cores that processes on this machine can use: physical ones, or what their container is given."""
    cores = psutil.cpu_count(logical=False) or os.cpu_count() or 1
    with suppress(AttributeError):
        cores = min(cores, len(os.sched_getaffinity(0)))
    with suppress(OSError, ValueError):
        quota, period = _GROUP_CORES.read_text().split()
        cores = min(cores, ceil(int(quota) / int(period)))
    return cores


def _cpu_ranks() -> int:
    return min(2, os.cpu_count() or 1)


def _gpus_here() -> list[tuple[str, int]]:
    """Return name and total memory of every GPU that this process sees."""
    import torch

    properties = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return [(each.name, each.total_memory) for each in properties]


def _refuse_elsewhere(cluster: Cluster) -> None:
    """Refuse to run on this machine what is named for another."""
    if _anywhere(cluster):
        return
    local = int(os.environ.get("LOCAL_WORLD_SIZE", "0"))
    if local and local != cluster.per_node:
        reason = f"has {cluster.per_node} ranks on each machine, and torchrun has started {local} on this one"
        raise _elsewhere(cluster, reason, f"start torchrun with --nproc_per_node={cluster.per_node}")
    if cluster.nodes > 1 and not local:
        reason = f"has {cluster.nodes} machines, and this command starts ranks on this one alone"
        raise _elsewhere(cluster, reason, "start torchrun on every machine: see 'torchrun --help'")
    if cluster.gpu is None:
        return
    found = _gpus_here()
    instead = "set cluster: detect to train on what is here; shardwise config and plan need none of it"
    if not found:
        raise _elsewhere(cluster, f"needs {_count(cluster)}, and this machine has no GPU", instead)
    if len(found) != cluster.per_node:
        reason = f"needs {_count(cluster)}, and this machine has {len(found)}: {', '.join(sorted(set(dict(found))))}"
        raise _elsewhere(cluster, reason, instead)
    for name, total in found:
        here = find_device(name, total)
        if (name if here is None else here.name) != cluster.gpu.name:
            known = "which is not in the catalogue" if here is None else f"which is {here.name} in the catalogue"
            reason = f"needs {_count(cluster)}, and this machine has {name} ({total / 2**30:.1f} GiB), {known}"
            raise _elsewhere(cluster, reason, instead)


def _count(cluster: Cluster) -> str:
    assert cluster.gpu is not None
    return f"{cluster.per_node} x {cluster.gpu.name}"


def _elsewhere(cluster: Cluster, reason: str, fix: str) -> BadInput:
    return BadInput(Problem(field="cluster", value=cluster.name, reason=reason, fix=fix))
