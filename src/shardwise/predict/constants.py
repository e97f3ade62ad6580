"""Every constant of the memory prediction that is neither a law nor a choice of the plan: at most 12, all here.

Each has a physical meaning, bounds and a source. They are fitted, where they are, over all published measurements
together, never to one row or one source. What follows from arithmetic or from the code of torch is no constant.
"""

from __future__ import annotations

from dataclasses import dataclass

MIB = 2**20
GIB = 2**30

MOST = 12
"""How many there may be."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Constant:
    """One figure that had to be measured."""

    name: str
    """Name, as in this module."""
    value: float
    """Best guess."""
    low: float
    """Nine of ten cases lie between this"""
    high: float
    """and this."""
    meaning: str
    """What it is, physically."""
    source: str
    """Where it was measured."""
    unit: str
    """`bytes`, `seconds`, `elements` or `ratio`."""


ALLOCATOR_FACTOR = Constant(
    name="ALLOCATOR_FACTOR",
    value=1.12,
    low=1.02,
    high=1.40,
    meaning="memory that the caching allocator holds per byte in tensors at the peak: blocks that are too small or"
    " lie in another stream's pool",
    source="active 41.17, reserved 49.59 GiB in one FSDP2 run (torchtitan#699, with the next constant); nvidia-smi"
    " against allocated of fms-acceleration: 1.02 to 1.12 on one GPU, 1.20 to 1.26 on 2 and 4 (chunked loss)",
    unit="ratio",
)

ALLOCATOR_BUFFERS = Constant(
    name="ALLOCATOR_BUFFERS",
    value=1.0,
    low=0.0,
    high=2.0,
    meaning="buffers of the size of the largest one that lie idle in the pools of FSDP2's streams at the peak",
    source="FSDP2 gathers, copies and reduces on streams of their own, each with its pool (pytorch#129721,"
    " pytorch#147168); torchtitan#699 as above",
    unit="ratio",
)

FRAGMENTATION = Constant(
    name="FRAGMENTATION",
    value=1.01,
    low=1.0,
    high=1.05,
    meaning="memory per byte in tensors that the caching allocator cannot do without, once it has given back every"
    " segment that is free as a whole",
    source="fms-acceleration: runs with 74.80 GiB allocated went on, on cards with 79.15 GiB, where nvidia-smi showed"
    " 75.7 to 79.2",
    unit="ratio",
)

CUDA_CONTEXT = Constant(
    name="CUDA_CONTEXT",
    value=0.55 * GIB,
    low=0.30 * GIB,
    high=1.45 * GIB,
    meaning="context of one process on one GPU: driver state and the kernels loaded so far, NCCL's included",
    source="stas00/ml-engineering: 0.47 GiB lazy, 0.92 eager, 0.55 with 2 ranks, 1.45 with NCCL; pytorch#107667: 0.3",
    unit="bytes",
)

NCCL_CHANNEL = Constant(
    name="NCCL_CHANNEL",
    value=26 * MIB,
    low=6 * MIB,
    high=45 * MIB,
    meaning="buffers of one channel of one communicator that is used for rings and trees",
    source="nccl#964, 24 channels on 4 A100 with NVLink: 544 MB for 2 ranks, 688 MB for more; LUMI-AI-Guide#111: 0.65"
    " GiB per communicator; linear in channels (nccl#986); 10 and 2 MiB per connection (nccl#1685)",
    unit="bytes",
)

NCCL_CHANNELS = {"nvlink": 24, "xgmi": 24, "pcie": 4}
"""Channels of a communicator by the link between the cards of a node. Not fitted: it is NCCL's own choice, as many as
fill the link (nccl#986), which its log tells: 24 on 8 A100 (nccl-tests#100) and 8 H100, 16 on H800 (nccl#892), 2 to 4
over PCIe."""

HOST_PROCESS = Constant(
    name="HOST_PROCESS",
    value=0.33 * GIB,
    low=0.28 * GIB,
    high=0.45 * GIB,
    meaning="anonymous memory of a process that has imported torch, transformers, PEFT and this package, and what the"
    " C library holds for it",
    source="RssAnon under `shardwise train`, torch 2.13+cpu: 320 MiB the process that starts ranks, 298 to 303 the"
    " ranks of a tiny model and 330 to 360 those of one of 54 M parameters, less its tensors",
    unit="bytes",
)

HOST_CUDA = Constant(
    name="HOST_CUDA",
    value=0.35 * GIB,
    low=0.10 * GIB,
    high=2.0 * GIB,
    meaning="host memory that CUDA and NCCL take in each process: driver state, code of kernels, proxy buffers",
    source="pytorch#113326: 0.11 GiB more with a context, 1.7 GiB in the worst case; NCCL's shared buffers on top",
    unit="bytes",
)

CONSTANTS = (ALLOCATOR_FACTOR, ALLOCATOR_BUFFERS, FRAGMENTATION, CUDA_CONTEXT, NCCL_CHANNEL, HOST_PROCESS, HOST_CUDA)
"""All of them."""
