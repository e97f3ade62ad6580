"""A probe's curves in the place of rates."""

from __future__ import annotations

import pytest

from predict.pace.pace_cases import A100, HOST, cluster, curve, measured
from shardwise.predict.pace import pace_of
from shardwise.predict.work import AttentionWork, Product, Work
from shardwise.spec.problems import BadInput
from shardwise.spec.runtime import Runtime
from shardwise.spec.speeds import HostSpeeds

FSDP2 = Runtime()


def pace(card=None, compiled=False, dtype=None, **more):
    return pace_of(cluster(card, per_node=2, **more), FSDP2, compiled=compiled, dtype=dtype)


def call(flops, item=4):
    return AttentionWork(flops=flops, kernel="cpu", backward=False, item=item, moved=100)


def test_a_cpu_issues_and_computes_in_one_thread():
    """2e9 FLOPs at 1 GFLOP/s; a move of 4 kB: 4 us. To each come 3 x 5 us. The host lane has nothing to do."""
    here = pace(measured=measured())
    product = Product(rows=1000, inner=1000, columns=1000, item=4)
    work = Work(products=((product, 3),), moves=((4000, 10),))
    assert here.seconds(work) == pytest.approx(3 * (2 + 15e-6) + 10 * 19e-6)
    assert here.issue(work) == 0
    assert here.unit_issue == pytest.approx(70 * 15e-6)
    assert here.post == 30e-6
    assert here.slowdown == 1.25
    assert here.peak_flops == pytest.approx(1e9)


def test_a_card_issues_beside_computing():
    """The same curves on a card: the host's 2 x 5 us for each operation run beside; compiled, half of them."""
    here = pace(A100, measured=measured(bf16=curve((2e3, 2e-6), (2e9, 2.0))))
    work = Work(moves=((4000, 10),))
    assert here.seconds(work) == pytest.approx(10 * 4e-6)
    assert here.issue(work) == pytest.approx(100e-6)
    compiled = pace(A100, compiled=True, measured=measured(bf16=curve((2e3, 2e-6))))
    assert compiled.issue(work) == pytest.approx(50e-6)
    assert here.peak_flops == 312e12
    assert here.post == 0


def test_thin_products_are_bound_by_memory():
    """[1000, 1] x [1, 1000]: 2 MFLOP at 1 GFLOP/s are 2 ms, 4.008 MB at 1 GB/s 4.008 ms."""
    product = Product(rows=1000, inner=1, columns=1000, item=4)
    assert pace(measured=measured()).product(product) == pytest.approx(4.008e-3 + 15e-6)


def test_attention_has_its_own_curve_or_that_of_products():
    """1e9 FLOPs: 1 s as products; 0.5 s by a curve of its own."""
    assert pace(measured=measured()).attention(call(10**9)) == pytest.approx(1 + 15e-6)
    found = measured()
    own = found.device.model_copy(update={"attention": {"fp32": curve((1e9, 0.5))}})
    here = pace(measured=found.model_copy(update={"device": own}))
    assert here.attention(call(10**9)) == pytest.approx(0.5 + 15e-6)


def test_sixteen_bits_are_the_plans_or_the_other():
    """bf16 and fp16 were measured with 1 and 2 s for 1e9 FLOPs; without fp16, bf16 stands for it. fp32 is missing."""
    both = measured(bf16=curve((1e9, 1.0)), fp16=curve((1e9, 2.0)))
    product = Product(rows=500, inner=1000, columns=1000, item=2)
    assert pace(measured=both, dtype="bf16").product(product) == pytest.approx(1 + 15e-6)
    assert pace(measured=both, dtype="fp16").product(product) == pytest.approx(2 + 15e-6)
    one = measured(bf16=curve((1e9, 1.0)))
    assert pace(measured=one, dtype="fp16").product(product) == pytest.approx(1 + 15e-6)
    with pytest.raises(BadInput, match=r"fp32.*bf16.*shardwise probe"):
        pace(measured=one).product(product._replace(item=4))


def test_the_host_as_measured_or_by_the_card():
    """Measured: 1 GB/s and 4 ns. Not measured: a card's PCIe, 3.5 ns x 2 ranks / 2 cores. CPUs have one memory."""
    by_probe = pace(A100, measured=measured(HOST, bf16=curve((1e9, 1.0))))
    assert by_probe.host_copy(1e9) == pytest.approx(1.0)
    assert by_probe.host_adam(1e9) == pytest.approx(4.0)
    assert by_probe.assumed == ()
    by_card = pace(A100, measured=measured(bf16=curve((1e9, 1.0))), host_cores=2)
    assert by_card.host_copy(31.5e9) == pytest.approx(1 / 0.88)
    assert by_card.host_adam(1e9) == pytest.approx(3.5)
    on_cpus = pace(measured=measured())
    assert on_cpus.host_copy(1e9) == 0
    assert on_cpus.host_adam(1e6) == pytest.approx(28e-3 + 15e-6)
    assert pace(measured=measured(HostSpeeds(adam_s=4e-9))).host_adam(1e6) == pytest.approx(4e-3)


def test_operations_of_a_copy_are_equal():
    """8 MB in 4 operations at 1 GB/s: 8 ms and 4 x 15 us. No operation, no time."""
    here = pace(measured=measured())
    assert here.copy(8e6, 4) == pytest.approx(8e-3 + 60e-6)
    assert here.copy(0, 0) == 0


def test_pointwise_operations_go_by_the_dtype_of_computation():
    """Halves take 3 s per GB. Copies of weights and gradients, which rest in fp32, take 1; so do halves without one."""
    slow = curve((2e3, 6e-6), (2e9, 6.0))
    found = measured(bf16=curve((2e9, 2.0)), fp32=curve((2e9, 2.0)))
    device = found.device.model_copy(update={"memory": {**found.device.memory, "bf16": slow}})
    probed = found.model_copy(update={"device": device})
    work = Work(moves=((10**9, 1),))
    assert pace(measured=probed, dtype="bf16").seconds(work) == pytest.approx(3 + 15e-6)
    assert pace(measured=probed, dtype="bf16").copy(1e9) == pytest.approx(1 + 15e-6)
    assert pace(measured=probed, dtype="fp32").seconds(work) == pytest.approx(1 + 15e-6)
    assert pace(measured=found, dtype="bf16").seconds(work) == pytest.approx(1 + 15e-6)


def test_what_fsdp_takes_around_a_unit_is_measured():
    found = measured()
    probed = found.model_copy(update={"device": found.device.model_copy(update={"unit_s": 0.8e-3})})
    assert pace(measured=probed).unit_issue == 0.8e-3
