"""The pace of cards against what was measured of them, and its laws."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from predict.pace.pace_cases import A100, A5000, B200, H100, RTX_5090, V100, cluster, gpu, rates
from shardwise.predict.pace import pace_of
from shardwise.predict.work import AttentionWork, Product, Work
from shardwise.spec.problems import BadInput
from shardwise.spec.runtime import Runtime

FSDP2 = Runtime()


def pace(card, nodes=1, per_node=8, runtime=FSDP2, compiled=False, dtype=None, values=None, **more):
    return pace_of(cluster(card, nodes, per_node, **more), runtime, compiled=compiled, dtype=dtype, values=values)


def square(side, item=2):
    return Product(rows=side, inner=side, columns=side, item=item)


def attention(length, width, rows, heads, kernel, *, causal, backward=False):
    """Operands of `heads` full heads; backward reads five and writes three, forward has four."""
    forward = 4 * rows * heads * length**2 * width // (2 if causal else 1)
    tensor = 2 * rows * heads * length * width
    return AttentionWork(
        flops=forward * 5 // 2 if backward else forward,
        kernel=kernel,
        backward=backward,
        item=2,
        moved=tensor * (8 if backward else 4),
    )


@pytest.mark.parametrize(
    ("side", "microseconds"),
    [(1024, 5.08), (1536, 7.87), (2048, 15.2), (3072, 38.4), (4096, 97.4), (6144, 319), (8192, 774)],
)
def test_products_of_a_b200(side, microseconds):
    """Measured with torch's own kernels in bf16 (pytorch/ao#2427), again and again on the same operands.

    In a step caches are cold, so what is predicted is up to 30 % more, and hardly less.
    """
    assert 0.92 < pace(B200).product(square(side)) / (microseconds * 1e-6) < 1.30


@pytest.mark.parametrize(
    ("side", "bf16", "fp16"), [(1024, 94, 142), (2048, 174, 174), (4096, 184, 219), (8192, 236, 224)]
)
def test_products_of_a_5090(side, bf16, fp16):
    """Measured, in TFLOP/s (zzc0721/torch-performance-test-data#15); the best, 236, is more than the label's 209.5."""
    got = 2 * side**3 / pace(RTX_5090).product(square(side)) / 1e12
    assert 0.88 * min(bf16, fp16) < got < 1.12 * max(bf16, fp16)


def test_a_large_product_of_each_card():
    """The best that was measured (A100 271, H100 791 TFLOP/s) times SUSTAINED, 0.90: 244 and 712, less the last tiles:
    67.1e6 / (67.1e6 + 0.8e6) results = 0.988, so 241 and 704. 550 GFLOP take 2.28 and 0.78 ms.

    302 MB at 0.8 x 2.039 and 3.35 TB/s are 185 and 113 us, of which 0.6 are added: 230 and 646 TFLOP/s in all.
    """
    product = Product(rows=16384, inner=4096, columns=4096, item=2)
    for card, tera in ((A100, 230), (H100, 646)):
        assert product.flops / pace(card).product(product) / 1e12 == pytest.approx(tera, rel=0.01)


def test_products_of_small_rank_are_bound_by_memory():
    """LoRA of rank 16 over 8192 tokens and 4096 features: 67.1 MB of inputs, 0.13 of weights, 0.26 of results.

    67.5 MB / (0.8 x 2.039 TB/s) = 41.4 us and 2.5 us for the kernel. Its 1.07 GFLOP would take 4 us at full speed.
    """
    down = Product(rows=8192, inner=4096, columns=16, item=2)
    assert down.moved == 67_502_080
    assert pace(A100).product(down) == pytest.approx(2.5e-6 + 67_502_080 / (0.8 * 2.039e12))
    gradient = Product(rows=16, inner=8192, columns=4096, item=2)
    assert pace(A100).product(gradient) == pytest.approx(pace(A100).product(down), rel=0.01)


@pytest.mark.parametrize(
    ("card", "call", "tera", "within"),
    [
        # FlashAttention-2 on A100: 50 to 73 % of 312 forward (arXiv 2307.08691)
        (A100, attention(4096, 128, 4, 16, "flash", causal=False), 190, 0.20),
        # FlashAttention-2 on H100 (pytorch/benchmark#2296: 304 at 16384; flash-attention#2688: 308 at 2048 x 64)
        (H100, attention(16384, 128, 1, 16, "flash", causal=False), 304, 0.15),
        # cuDNN on H100 (pytorch#142132)
        (H100, attention(4608, 128, 1, 24, "cudnn", causal=False), 631, 0.20),
        # FlashAttention-4 on B200 (flash-attention#2605, #2280); cuDNN's is no slower
        (B200, attention(8192, 128, 4, 16, "cudnn", causal=True), 1418, 0.30),
        (B200, attention(1024, 128, 32, 16, "cudnn", causal=True), 660, 0.30),
        (B200, attention(8192, 128, 4, 16, "cudnn", causal=True, backward=True), 1208, 0.25),
        # FlashAttention-2 on A5000, head size 64 (ring-attention#10)
        (A5000, attention(2048, 64, 8, 32, "flash", causal=False), 81, 0.35),
        (A5000, attention(2048, 64, 8, 32, "flash", causal=False, backward=True), 70, 0.35),
    ],
)
def test_attention_of_cards(card, call, tera, within):
    assert call.flops / pace(card).attention(call) / 1e12 == pytest.approx(tera, rel=within)


def test_other_attention_kernels_are_slower():
    """The memory-efficient kernel takes twice as long; FlashAttention-2 has half of cuDNN's speed on Hopper only."""
    calls = {kernel: attention(8192, 128, 4, 32, kernel, causal=True) for kernel in ("flash", "cudnn", "efficient")}
    on_a100, on_h100 = ({name: pace(card).attention(call) for name, call in calls.items()} for card in (A100, H100))
    assert 1.8 < on_a100["efficient"] / on_a100["flash"] < 2
    assert on_a100["flash"] == on_a100["cudnn"]
    assert 1.7 < on_h100["flash"] / on_h100["cudnn"] < 2


def test_a_program_may_have_another_attention_kernel():
    """Triton's on A100: 1 / 0.71 as long in forward and twice in backward. On Hopper: FlashAttention-2."""
    forward, backward = (attention(65536, 128, 1, 32, "cudnn", causal=True, backward=back) for back in (False, True))
    triton, flash = Runtime(attention_kernel="triton"), Runtime(attention_kernel="flash")
    of_triton, usual = pace(A100, runtime=triton), pace(A100)
    assert of_triton.attention(forward) / usual.attention(forward) == pytest.approx(1 / 0.71, rel=0.01)
    assert of_triton.attention(backward) / usual.attention(backward) == pytest.approx(2, rel=0.01)
    assert pace(H100, runtime=flash).attention(forward) == pace(H100).attention(forward._replace(kernel="flash"))


def llama_block(tokens, length):
    """Llama-2-7B's block: products of 4096 x 4096 (4) and 4096 x 11008 (3), 32 heads of 128, eager pointwise chains.

    Pointwise about 60 hidden states read or written forward, twice that backward; a hidden state is 2 x 4096 bytes.
    """
    square_ = Product(rows=tokens, inner=4096, columns=4096, item=2)
    wide = Product(rows=tokens, inner=4096, columns=11008, item=2)
    state = 2 * 4096 * tokens
    calls = [
        attention(length, 128, tokens // length, 32, "flash", causal=True, backward=backward)
        for backward in (False, True)
    ]
    forward = Work(products=((square_, 4), (wide, 3)), attention=((calls[0], 1),), moves=((3 * state, 20),))
    backward = Work(products=((square_, 8), (wide, 6)), attention=((calls[1], 1),), moves=((3 * state, 40),))
    return forward, backward


def test_a_llama_block_on_a100_has_the_mfu_that_is_reported():
    """Llama-3-8B on A100, compiled: 58 % at 8192 tokens (torchtitan); MPT of 3B and 13B: 59 to 62 % at 2048 (Composer).

    A block alone has neither recompute nor waits for collectives, nor loss or update, so it lies above: 60 to 72 %.
    MFU counts attention without a mask, as these do.
    """
    forward, backward = llama_block(16 * 2048, 2048)
    model = 3 * (sum(product.flops * count for product, count in forward.products) + 2 * forward.attention[0][0].flops)
    seconds = pace(A100).seconds(forward) + pace(A100).seconds(backward)
    assert 0.60 < model / seconds / 312e12 < 0.72


def test_an_optimizer_step_of_1b_parameters():
    """AdamW reads weight, gradient and two states and writes all but the gradient: 28 bytes. 28 GB / 1.63 TB/s."""
    assert pace(A100).copy(28e9, 10) == pytest.approx(28e9 / (0.8 * 2.039e12) + 10 * 2.5e-6)
    assert 0.016 < pace(A100).copy(28e9) < 0.018


def test_memory_traffic_has_a_floor():
    """A thousand operations on nothing take a thousand kernels."""
    assert pace(A100).copy(0, 1000) == pytest.approx(2.5e-3)
    assert pace(A100).copy(0, 0) == 0


def test_host_copies_and_adam():
    """PCIe 4: 31.5 GB/s raw, 88 % of it. Adam: 3.5 ns per element and core, shared by 8 ranks, of at most 8 cores.

    8 ranks on 2 cores: 14 ms per million elements of a rank (32 measured, ISEEKYAN/Megatron-LM#188).
    """
    assert pace(A100).host_copy(31.5e9) == pytest.approx(1 / 0.88)
    assert pace(A100, host_cores=2).host_adam(1e6) == pytest.approx(14e-3)
    assert pace(A100, host_cores=128).host_adam(1e6) == pytest.approx(3.5e-3)
    assert pace(A100, per_node=1, host_cores=1).host_adam(1e6) == pytest.approx(3.5e-3)


def test_what_is_assumed_of_the_host_is_said():
    assert pace(A100, host_cores=4).assumed == ()
    assert pace(A100).assumed == ("64 cores of each host (8 for every device)",)


def test_issue_of_eager_and_compiled_operations():
    """25 operations: 9 us each, half of that compiled. Around a unit FSDP has hooks of 70 operations, others none."""
    work = Work(products=((square(64), 5),), moves=((1024, 20),))
    assert pace(A100).issue(work) == pytest.approx(225e-6)
    assert pace(A100, compiled=True).issue(work) == pytest.approx(112.5e-6)
    assert pace(A100).unit_issue == pace(A100, compiled=True).unit_issue == pytest.approx(630e-6)
    assert pace(A100, runtime=Runtime(sharding="none")).unit_issue == 0


def test_collectives_slow_computing_down_where_they_are_fast():
    """20 % over NVLink, on several machines too; a sixth of that over PCIe."""
    assert pace(A100).slowdown == pace(A100, nodes=2).slowdown == pytest.approx(1.20)
    assert pace(A5000).slowdown == pytest.approx(1 + 0.2 / 6)


def test_the_peak_is_of_the_dtype_of_computation():
    """A V100 has units for fp16 only; bf16 it computes in fp32."""
    assert pace(A100).peak_flops == pace(A100, dtype="bf16").peak_flops == 312e12
    assert pace(A100, dtype="fp32").peak_flops == 19.5e12
    assert pace(V100).peak_flops == pace(V100, dtype="fp16").peak_flops == 125e12
    assert pace(V100, dtype="bf16").peak_flops == 15.7e12


def test_products_by_bytes_of_an_element():
    """fp32 without tensor cores is 16 times slower on A100, fp8 twice as fast on H100 and unknown to an A100."""
    large = 8192
    assert pace(A100).product(square(large, 4)) == pytest.approx(16 * pace(A100).product(square(large)), rel=0.05)
    assert pace(H100).product(square(large, 1)) == pytest.approx(pace(H100).product(square(large)) / 2, rel=0.05)
    with pytest.raises(BadInput, match="no units"):
        pace(A100).product(square(large, 1))


def test_the_slowest_of_several_machines_is_waited_for():
    """sqrt(2 ln 16) = 2.355 deviations of 1.3 %: 3.06 % on 16 machines, nothing on one."""
    call = Product(rows=4096, inner=4096, columns=4096, item=2)
    assert pace(A100, nodes=16).product(call) / pace(A100).product(call) == pytest.approx(1.0306, rel=1e-4)
    assert pace(A100, nodes=16).copy(1e9) / pace(A100).copy(1e9) == pytest.approx(1.0306, rel=1e-4)


def test_a_constant_can_be_given():
    """Twice the share of the memory's rate: half of the time, but for the kernel. Such a pace is not remembered."""
    usual, given_ = pace(A100), pace(A100, values={"MEMORY_SHARE": 1.6})
    assert given_.copy(1e9) - 2.5e-6 == pytest.approx((usual.copy(1e9) - 2.5e-6) / 2)
    assert pace(A100).copy(1e9) == usual.copy(1e9)


@pytest.mark.parametrize(
    ("where", "reason"),
    [
        (cluster(None, per_node=2), "CPUs"),
        (cluster(gpu("L4")), "L4"),
        (cluster(gpu("X", known=rates(1e12, bf16=1))), "fp32"),
    ],
)
def test_unknown_speeds_are_refused(where, reason):
    with pytest.raises(BadInput, match=f"cluster.*{reason}.*shardwise probe"):
        pace_of(where, FSDP2, compiled=False)


sizes = st.integers(min_value=1, max_value=2**15)


@given(sizes, sizes, sizes, st.sampled_from(["rows", "inner", "columns"]))
def test_more_work_never_takes_less_time_and_never_beats_the_card(rows, inner, columns, grown):
    product = Product(rows=rows, inner=inner, columns=columns, item=2)
    larger = product._replace(**{grown: getattr(product, grown) * 2})
    here = pace(A100, per_node=1)
    assert here.product(product) <= here.product(larger) * (1 + 1e-9)
    assert product.flops / here.product(product) <= 312e12
    assert product.moved / here.product(product) <= 2.039e12


def test_seconds_add_up_and_are_remembered():
    """Kept per object: the second question costs a look into a dictionary, not a sum."""
    where = cluster(A100)
    here = pace_of(where, FSDP2, compiled=False)
    assert pace_of(where, Runtime(), compiled=False) is here
    forward, _ = llama_block(4096, 2048)
    parts = sum(count * here.product(product) for product, count in forward.products)
    parts += here.attention(forward.attention[0][0]) + 20 * here.copy(forward.moves[0][0])
    assert here.seconds(forward) == pytest.approx(parts)
    start = time.perf_counter()
    for _ in range(10_000):
        here.seconds(forward)
    assert (time.perf_counter() - start) / 10_000 < 5e-6
