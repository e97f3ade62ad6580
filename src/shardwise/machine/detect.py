"""What this machine offers to a run."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Literal

from shardwise.report.run_folder import Backend
from shardwise.spec.job import Job
from shardwise.spec.problems import BadInput, Problem


@dataclass(frozen=True, kw_only=True)
class Devices:
    """The ranks that a run will have."""

    device_type: Literal["cpu", "cuda"]
    """`cuda` or `cpu`."""
    world: int
    """Number of ranks."""
    why: str
    """Where the number comes from."""

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
        job: Its `cluster` is `detect` or `<n>xcpu`.
        nproc: Number of ranks, when the command line or torchrun says it.

    Raises:
        BadInput: more ranks than GPUs, or another number than `cluster` says.
    """
    import torch

    asked_for_cpu = job.cluster != "detect"
    if asked_for_cpu and nproc is not None and job.cluster != f"{nproc}xcpu":
        reason = f"contradicts {nproc} ranks, which the command line or torchrun asks for"
        raise BadInput(Problem(field="cluster", value=job.cluster, reason=reason, fix="keep one of the two"))
    gpus = 0 if asked_for_cpu else torch.cuda.device_count()
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
    if asked_for_cpu:
        return Devices(device_type="cpu", world=int(job.cluster.removesuffix("xcpu")), why="cluster")
    world = min(2, os.cpu_count() or 1)
    return Devices(device_type="cpu", world=world, why=f"no GPU here: {world} CPU processes")
