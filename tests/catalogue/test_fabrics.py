"""Fabrics: every card has one, and published bus bandwidths become seconds."""

from __future__ import annotations

from collections import Counter

import pytest
from pydantic import ValidationError

from shardwise.catalogue.cards import cards, gpu
from shardwise.catalogue.fabrics import FabricCurve, known_fabrics, ring_factor

KNOWN = known_fabrics()


def test_every_card_has_one_fabric():
    named = Counter(card for fabric in KNOWN.fabrics.values() for card in fabric.cards)
    assert named == Counter(name for name, card in cards().items() if card.link != "pcie")
    assert all(KNOWN.of_card(gpu(name)) is not None for name in cards())


def test_a_fabric_fits_the_link_of_its_cards():
    assert KNOWN.of_card(gpu("A10")).wiring == "host"
    assert KNOWN.of_card(gpu("H100-NVL-94GB")).wiring == "host"
    assert KNOWN.of_card(gpu("V100-SXM-32GB")).wiring == "mesh"
    assert KNOWN.of_card(gpu("H100-SXM-80GB")).wiring == "switch"
    assert KNOWN.of_card(gpu("A10").model_copy(update={"link": "nvlink"})) is None
    for fabric in KNOWN.fabrics.values():
        assert (fabric.through is not None) == (fabric.wiring == "host")
        assert (fabric.devices is not None) == (fabric.wiring == "mesh")


def test_bridges_are_for_pcie_cards():
    assert all(cards()[card].link == "pcie" for bridge in KNOWN.bridges for card in bridge.cards)
    assert KNOWN.bridge_of("A10") is None
    assert KNOWN.bridge_of("H100-NVL-94GB").usual
    assert not KNOWN.bridge_of("RTX-3090").usual


def test_shares_are_below_one():
    """A share above 1 would be a rate of both directions, or bus bandwidth with the switch's help."""
    for fabric in KNOWN.fabrics.values():
        figures = [fabric.share, fabric.through, fabric.multicast]
        assert all(0 < figure.value < 1 for figure in figures if figure is not None)


def test_factors_of_rings():
    """8 ranks: each sends 7 of 8 parts; for sums twice."""
    assert ring_factor("all_gather", 8) == ring_factor("reduce_scatter", 8) == 0.875
    assert ring_factor("all_reduce", 8) == 1.75


def test_bus_bandwidth_becomes_seconds():
    """1 MiB at 18 GB/s on 8 ranks: 1048576 x 1.75 / 18e9 s = 101.9 us."""
    curve = FabricCurve(cluster="8xA100-SXM-80GB", kind="all_reduce", bus=((1, 18),), within=2.0, source="here")
    ((size, seconds),) = curve.points()
    assert size == 2**20
    assert seconds == pytest.approx(101.9e-6, rel=1e-3)


def test_a_straight_line_becomes_points():
    """64 ranks, 16 MiB: 362 us + 16777216 x (63 / 64) / 300e9 s = 362 + 55.05 us."""
    curve = next(curve for curve in KNOWN.curves if curve.fit is not None and curve.fit.floor == 362e-6)
    size, seconds = curve.points()[0]
    assert size == 16 * 2**20
    assert seconds == pytest.approx(417.05e-6, rel=1e-4)


def test_part_of_a_machine():
    curve = FabricCurve(
        cluster="2x8xA100-SXM-80GB", kind="all_gather", per_node=1, bus=((1, 18),), within=2.0, source="here"
    )
    assert curve.shape() == (2, 1)


@pytest.mark.parametrize("forms", [{}, {"bus": ((1, 18),), "fit": {"floor": 1e-4, "bus": 1e9}}])
def test_a_curve_has_one_form(forms):
    with pytest.raises(ValidationError, match="`bus` or `fit`"):
        FabricCurve.model_validate({"cluster": "8xA10", "kind": "all_gather", "within": 2.0, "source": "here", **forms})
