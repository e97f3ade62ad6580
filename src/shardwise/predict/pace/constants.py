"""The constants of computing time that are neither a vendor's figure nor a choice of the plan: nine, all here.

Each can be given another value by name, within its bounds, to see what published measurements make of it; no published
step answers to ISSUE, and few to HOST_ADAM. What hardware and kernels were measured at stands beside them as tables,
with sources.
"""

from __future__ import annotations

from collections.abc import Mapping

from shardwise.predict.constants import Constant

SUSTAINED = Constant(
    name="SUSTAINED",
    value=0.90,
    low=0.70,
    high=1.0,
    meaning="speed of a training step's large matrix products per speed of the best large product that a card was"
    " measured at: transposed operands, shapes that suit no kernel, clocks that a card holds for hours",
    source="A100, 8192 x 8192 x 8192 of random numbers: 258 against 271 TFLOP/s, 295 of zeros, which take less power"
    " (thonking.ai); B200, 4096 to 8192: 1410 to 1450 of 1745 (pytorch/ao#2427); a head's backward on a Hopper card,"
    " 8192 x 2048 x 65536 to 2048 x 4096 x 262144: 659 to 783 of 795 (Liger-Kernel#1422)",
    unit="ratio",
)

HALF_FULL = Constant(
    name="HALF_FULL",
    value=0.8e6,
    low=0.2e6,
    high=2.2e6,
    meaning="elements of the result of a matrix product that runs at half of the speed of a large one: half of what"
    " all multiprocessors hold at once, since the last round of tiles is half full on average",
    source="half of 108 multiprocessors x 128 x 128 elements is 0.88e6 (A100), of 132 1.08e6 (H100); measured, products"
    " of 1024 and 2048: RTX 5090 142 and 174 of 224 TFLOP/s, so 0.6e6 and 1.2e6 (torch-performance-test-data#15); B200"
    " 5.1 and 15.2 us (pytorch/ao#2427), within 10 % of this rule",
    unit="elements",
)

UNHIDDEN = Constant(
    name="UNHIDDEN",
    value=0.6,
    low=0.2,
    high=1.0,
    meaning="share of a matrix product's traffic to and from memory that hides behind none of its computing: first"
    " loads and last stores of every round of tiles, and results of others that it finds in no cache",
    source="B200, 1536 to 4096 (pytorch/ao#2427) and RTX 5090, 2048 (torch-performance-test-data#15): products alone"
    " allow 0 to 0.6; whole steps of published runs, where caches are cold, are nearer the upper end of that",
    unit="ratio",
)

ATTENTION = Constant(
    name="ATTENTION",
    value=0.80,
    low=0.55,
    high=0.95,
    meaning="speed of the forward of an attention kernel made for its generation, of what it executes, per speed of"
    " the best large matrix product; loads and stores of its operands come on top",
    source="A100, FlashAttention-2: 50 to 73 % of the peak, 156 to 228 of 271 TFLOP/s (arXiv 2307.08691), median over"
    " shapes 136 (pytorch#192799); H100, cuDNN: 631 of 795 without a mask (pytorch#142132), 308 to 509 with one at head"
    " size 256 (arXiv 2407.08608); B200: 1360 to 1535 of 1745, causal 660 to 1418 (flash-attention#2280, #2605)",
    unit="ratio",
)

MEMORY_SHARE = Constant(
    name="MEMORY_SHARE",
    value=0.80,
    low=0.62,
    high=0.93,
    meaning="bytes per second of eager elementwise operations, reductions and copies per byte per second that the"
    " card's memory is specified with",
    source="A100 80 GB: 1.80 of 2.04 TB/s in a kernel that only reads, about 90 % at best (NVIDIA forum 339083);"
    " Calculon: 90 % from 100 MB on, 75 % from 10, 60 % from 1",
    unit="ratio",
)

ISSUE = Constant(
    name="ISSUE",
    value=9e-6,
    low=4e-6,
    high=16e-6,
    meaning="host time for one eager operation that computes: modules, views and Python around it, dispatcher, what"
    " autograd notes or runs, launch",
    source="a Llama block of transformers on an EPYC core, torch 2.13: 361 us for 34 operations (and 39 views) forward,"
    " 418 for 67 backward, to which launches add about 3 us each; 7 us for x * 2 alone (pytorch#41383); 7 us at least"
    " per operation in a model fitted on H100s (autoparallel#146)",
    unit="seconds",
)

OVERLAP = Constant(
    name="OVERLAP",
    value=0.20,
    low=0.03,
    high=0.30,
    meaning="how much longer computing takes while a collective runs over NVLink or xGMI: it holds multiprocessors and"
    " memory bandwidth",
    source="18.9 % on average, 40 % at most, on 4 A100, H100, MI250 or MI210 of one machine (arXiv 2507.03114);"
    " Calculon 15 % on NVLink, 2 % on InfiniBand; Galvatron 1.1 to 1.3; 24 channels of 132 multiprocessors are 18 %",
    unit="ratio",
)

JITTER = Constant(
    name="JITTER",
    value=0.013,
    low=0.0,
    high=0.03,
    meaning="standard deviation of one machine's computing time from that of others that do the same: clocks, heat,"
    " the host; every collective waits for the slowest",
    source="mpt-70b at equal work per card: 1058, 1035 and 1007 tokens per second and GPU on 16, 32 and 64 machines of"
    " H100 (llm-foundry); single cards of one cluster differ by 8 % (arXiv 2208.11035), eight together by less",
    unit="ratio",
)

HOST_ADAM = Constant(
    name="HOST_ADAM",
    value=3.5e-9,
    low=0.8e-9,
    high=8e-9,
    meaning="time of one core for Adam on one element in host memory: about 12 passes where torch's loops run one"
    " after the other, one where they are fused",
    source="3.4 to 3.6 ms per million elements on one or two cores, 32 where 8 ranks share 2"
    " (ISEEKYAN/Megatron-LM#188); 2.2e9 elements on each of 8 ranks of a node in about 10 s (DeepSpeed#6834)",
    unit="seconds",
)

CONSTANTS = (SUSTAINED, HALF_FULL, UNHIDDEN, ATTENTION, MEMORY_SHARE, ISSUE, OVERLAP, JITTER, HOST_ADAM)
"""All of them."""

ACHIEVED = 0.80
"""Share of a card's dense rate that its best large product reaches where the catalogue has no measurement: the middle
of those measured on NVIDIA's: A100 0.87, H100 and H200 0.80, B200 0.78 (stas00/ml-engineering), V100 0.76."""

KERNEL = 2.5e-6
"""Seconds that a kernel takes on the device whatever it does: start, first loads, drain. The smallest products take 3.2
to 4.8 us (FlagGems#3821)."""

SPLIT = 1024
"""Summands from which on libraries cut the sum of a product with few results into parts for other multiprocessors."""

BACKWARD = 0.80
"""Speed of an attention's backward per speed of its forward. FlashAttention-2 on A100: 63 against 73 % of the peak
(arXiv 2307.08691); on A5000 at head size 64: 77 against 82 TFLOP/s at 8192 tokens, 63 against 81 at 1024
(ring-attention#10); on RTX 4090 at 2048: 125 against 169, causal 99 against 151 (TVM's tl_doc); H100: 299 against 310
at 8192, 239 against 295 at 1024 (flash-attention#2688); B200: 1208 against 1418 causal (flash-attention#2280)."""

ATTENTION_KERNELS: dict[tuple[str, str], tuple[float, float]] = {
    ("flash", "hopper"): (0.52, 0.52),
    ("flash", "blackwell"): (0.30, 0.30),
    ("triton", "hopper"): (0.37, 0.26),
    ("triton", "any"): (0.71, 0.50),
    ("efficient", "any"): (0.50, 0.50),
}
"""Speed, forward and backward, of kernels on a generation that they are not made for, per speed of those that are; 1
for all others. FlashAttention-2 on H100: 290 to 312 of 795 TFLOP/s forward (pytorch/benchmark#2296,
flash-attention#2688), on B200 340 to 381 of 1745 (flash-attention#1589). FlashAttention-1 in Triton: FlashAttention-2
is 1.3 to 2.5 times as fast (arXiv 2307.08691), more so in backward. The memory-efficient kernel: 36 against 84 TFLOP/s
causal at head size 128 (TileGym#49), 27 to 43 against 50 to 55 (flash-attention#416)."""

IN_MODELS = {"cpu": 3, "cuda": 2}
"""Host time for one operation of a model, per operation that a probe times in a bare loop: modules, views and Python
come on top. A Llama block on a CPU: 10.6 us forward and 6.2 backward where the bare loop takes 2.3 and the kernels 1.
On GPUs the launch, which is in both, makes the factor smaller."""

UNIT_OPERATIONS = 70
"""Host time of FSDP2's hooks around one unit's forward, or its backward, in operations of a model. torch 2.13, a block
of 9 weights on a CPU mesh of a fake group: 450 us forward and 640 backward where an operation takes 7; with 2 weights
340 and 440. Without CUDA's streams and events; 1 ms on GPUs (pytorch#173680)."""

COMPILED = 0.5
"""Host time for one kernel of compiled code, in eager operations. Nothing was measured: the launch stays, about 3 us;
dispatch, modules and autograd's notes go."""

PCIE = 0.88
"""Share of PCIe's raw rate that copies from and to pinned memory reach: 55 of 63 GB/s (stas00/ml-engineering)."""

ADAM_CORES = 8
"""Cores of a host beyond which its memory bounds Adam: 8 x 28 bytes / 3.5 ns = 64 GB/s. 8 x 2.2e9 elements in about
10 s are 50 GB/s (DeepSpeed#6834)."""

CORES_PER_DEVICE = 8
"""Cores of a host per device where the cluster does not say. Machines of clouds have 6 (p4d) to 14 (DGX H100)."""


def value_of(constant: Constant, values: Mapping[str, float] | None) -> float:
    """Return a constant, or what stands in its place in `values`."""
    return constant.value if values is None else values.get(constant.name, constant.value)
