"""What cards can do: the known ways of taking a vendor's figure for another."""

from __future__ import annotations

from math import log

import pytest
from pydantic import ValidationError

from shardwise.catalogue.cards import cards, find_gpu, gpu
from shardwise.catalogue.rates import CardRates

SPARSE_TFLOPS = {
    "A10": 250,
    "A10G": 140,
    "L4": 242,
    "L20": 239,
    "L40S": 724,
    "A5000": 222.2,
    "A6000": 309.7,
    "RTX-6000-ADA": 728.5,
    "RTX-3090": 142,
    "RTX-4090": 330.3,
    "RTX-5090": 419,
    "A100-SXM-40GB": 624,
    "A100-PCIE-80GB": 624,
    "A800-SXM-80GB": 624,
    "H800-SXM-80GB": 1979,
    "H20": 296,
    "H100-SXM-80GB": 1979,
    "H100-PCIE-80GB": 1513,
    "H100-NVL-94GB": 1671,
    "H100-SXM-96GB-HBM2e": 1979,
    "H200-SXM-141GB": 1979,
    "B200-SXM": 4500,
    "GB200": 5000,
    "GB300": 5000,
    "MI300X": 2615,
}
"""What vendors print of fp16 and bf16 with sparsity; of GeForce cards accumulated in fp32."""

BOTH_DIRECTIONS = {
    "V100-SXM-16GB": 300,
    "V100-SXM-32GB": 300,
    "A100-SXM-40GB": 600,
    "A100-SXM-80GB": 600,
    "A800-SXM-80GB": 400,
    "H800-SXM-80GB": 400,
    "H20": 900,
    "H100-SXM-80GB": 900,
    "H100-SXM-96GB-HBM2e": 900,
    "H200-SXM-141GB": 900,
    "B200-SXM": 1800,
    "GB200": 1800,
    "GB300": 1800,
    "MI250X": 700,
    "MI300X": 896,
}
"""GB/s between devices of a node that vendors print, both directions together."""

PCIE_BOTH = {15.75e9: 32e9, 31.5e9: 64e9, 63e9: 128e9}
"""One direction of PCIe 3, 4 and 5 after line coding -> what vendors print."""


def rates(name):
    found = find_gpu(name).rates
    assert found is not None
    return found


def products(name):
    return {dtype: figure.value / 1e12 for dtype, figure in rates(name).products.items()}


@pytest.mark.parametrize("name", list(cards()))
def test_every_figure_has_a_source_and_stands_in_the_order_of_dtypes(name):
    found = rates(name)
    figures = [*found.products.values(), found.memory, found.link, found.host]
    assert all(len(figure.source) > 10 for figure in figures)
    values = products(name)
    order = [values[dtype] for dtype in ("fp32", "tf32", "bf16", "fp8") if dtype in values]
    assert order == sorted(order)
    assert set(values) >= {"fp32", "fp16"}
    assert values.get("bf16", values["fp16"]) == values["fp16"]
    if "fp8" in values:
        assert values["fp8"] == pytest.approx(2 * values["bf16"], rel=0.02)
    if "tf32" in values:
        assert values["tf32"] <= 0.51 * values["bf16"]
    assert found.memory.value > found.link.value >= found.host.value


@pytest.mark.parametrize(("name", "sparse"), SPARSE_TFLOPS.items())
def test_products_are_dense(name, sparse):
    """Half of what is printed with sparsity: 242 of an L4 is 121, 1979 of an H100 is 989."""
    assert products(name)["bf16"] == pytest.approx(sparse / 2, rel=0.015)


def test_geforce_cards_accumulate_in_fp32():
    """The fp16 figures with fp16 accumulation are twice these: 142, 330 and 419 dense."""
    for name, with_fp16 in (("3090", 142), ("4090", 330.3), ("4090-48GB", 330.3), ("5090", 419)):
        assert products(name)["fp16"] == pytest.approx(with_fp16 / 2, rel=0.01)


@pytest.mark.parametrize(("name", "both"), BOTH_DIRECTIONS.items())
def test_links_are_of_one_direction(name, both):
    assert 2 * rates(name).link.value == pytest.approx(both * 1e9)


def test_every_card_with_a_fast_link_is_checked_for_directions():
    assert set(BOTH_DIRECTIONS) == {name for name, card in cards().items() if card.link != "pcie"}


@pytest.mark.parametrize("name", [name for name, card in cards().items() if card.link == "pcie"])
def test_cards_without_links_of_their_own_are_linked_over_pcie(name):
    found = rates(name)
    assert found.link.value == found.host.value
    assert found.link.source.startswith("over PCIe")
    assert 0.97 < 2 * found.host.value / PCIE_BOTH[found.host.value] < 1


def test_an_a10g_is_no_a10():
    assert products("A10")["bf16"] == 125
    assert products("A10G")["bf16"] == 70
    assert rates("A10").memory.value == rates("A10G").memory.value == 600e9


def test_a_device_of_an_mi250x_is_half_a_card():
    """The card: 383 TFLOPS in bf16, 95.7 in fp32 matrices, 3.28 TB/s."""
    assert 2 * products("MI250X")["bf16"] == pytest.approx(383)
    assert 2 * products("MI250X")["fp32"] == pytest.approx(95.7, rel=0.002)
    assert 2 * rates("MI250X").memory.value == pytest.approx(3.277e12, rel=0.001)


@pytest.mark.parametrize(
    ("name", "terabytes"),
    [
        ("V100-SXM-32GB", 0.9),
        ("A100-SXM-40GB", 1.555),
        ("A100-PCIE-80GB", 1.935),
        ("A100-SXM-80GB", 2.039),
        ("H100-PCIE-80GB", 2.0),
        ("H100-SXM-80GB", 3.35),
        ("H100-SXM-96GB-HBM2e", 2.4),
        ("H200-SXM-141GB", 4.8),
        ("H20", 4.0),
        ("MI300X", 5.3),
        ("L4", 0.3),
        ("4090", 1.008),
    ],
)
def test_memory_is_in_bytes_of_ten_to_the_twelfth(name, terabytes):
    """Taken for TiB a figure would be 10 % more."""
    assert rates(name).memory.value == pytest.approx(terabytes * 1e12)


def test_versions_with_slower_links_compute_as_much():
    for slow, fast in (("A800", "A100-SXM-80GB"), ("H800", "H100")):
        assert products(slow) == products(fast)
        assert rates(slow).link.value < rates(fast).link.value


def test_measured_shares():
    """MAMF's 271.2 of 312 on an A100 and 794.5 of 989.4 on an H100; only GeForce cards beat their rated boost.

    Cards of 350 and 700 W reach 495.93 and 794.5 TFLOPS, the 0.68th power of their watts; by it one of 500 W reaches
    794.5 x 0.714^0.68 = 632.
    """
    assert rates("A100-SXM-80GB").achieved.value == pytest.approx(271.2 / 312, abs=0.001)
    assert rates("H100").achieved.value == pytest.approx(794.5 / 989.4, abs=0.001)
    exponent = log(794.5 / 495.93) / log(2)
    assert rates("H100-96GB").achieved.value == pytest.approx(794.5 * (5 / 7) ** exponent / 989.4, abs=0.002)
    for name in cards():
        measured = rates(name).achieved
        if measured is not None:
            assert 0.45 < measured.value <= (1.15 if name.startswith("RTX") else 1), name
            assert "of" in measured.source or measured.source.startswith("that"), name


def test_only_volta_and_turing_have_no_bf16():
    without = {name for name in cards() if "bf16" not in products(name)}
    assert without == {name for name in cards() if name.startswith("V100") or name == "T4"}


def test_consumer_cards_reach_each_other_through_the_host():
    assert {name for name in cards() if not rates(name).peer_to_peer} == {
        *("RTX-3090", "RTX-4090", "RTX-4090-48GB", "RTX-5090"),
        "A10G",
    }


GOOD = {"tflops": {"fp32": 1, "fp16": 2}, "gigabytes": {"memory": 3, "host": 4}, "peer_to_peer": True, "source": "me"}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"sources": {"fp8": "you"}}, "a source without its figure"),
        ({"achieved": 0.9}, "needs its own source"),
        ({"gigabytes": {"memory": 3}}, "memory and host are needed"),
        ({"tflops": {"fp64": 1}}, "fp64"),
        ({"achieved": 0, "sources": {"achieved": "you"}}, "greater than 0"),
    ],
)
def test_entries_that_are_not_whole(change, said):
    with pytest.raises(ValidationError, match=said):
        CardRates.model_validate({**GOOD, **change})


def test_units_of_an_entry():
    found = CardRates.model_validate({**GOOD, "sources": {"memory": "you"}}).rates()
    assert found.products["fp16"].value == 2e12
    assert (found.memory.value, found.memory.source) == (3e9, "you")
    assert (found.host.value, found.host.source) == (4e9, "me")
    assert found.achieved is None


def test_a_card_by_name_brings_its_rates():
    assert gpu("A10").rates == find_gpu("a10").rates
