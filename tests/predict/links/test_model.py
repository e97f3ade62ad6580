"""Rings, trees and the switch's help on round rates, worked out by hand.

Constants: start 60 us, a ring's step 0.8 of NCCL's table (inside 3.4 us, PCIe 5.7, between machines 14). Shares of a
card's rate: NVLink 3 0.78, NVLink 4 0.82 (with multicast 0.61), PCIe 0.70 or, through host memory, 0.40.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from predict.links.links_cases import GB, cluster
from shardwise.catalogue.networks import network_of
from shardwise.predict.links import Group, links_of

START = 60e-6
STEP = 0.8
NETWORK = "roce-8x200"


def seconds(text: str, kind: str, payload: float, group: Group, **changes) -> float:
    return links_of(cluster(text, **changes)).seconds(kind, payload, group)


def reached(text: str) -> float:
    """Bytes a second that a machine's adapters reach."""
    network = network_of(cluster(text))
    assert network is not None
    return network.reached


def test_a_ring_inside_a_machine():
    """8 ranks, 7 steps, 7/8 of 1 GB at 78 GB/s: 60e-6 + 7 x 3.4e-6 x 0.8 + 0.875 / 78 s."""
    expected = START + 7 * 3.4e-6 * STEP + 0.875 / 78
    assert seconds("8xA100-SXM-80GB", "all_gather", 1 * GB, Group(1, 8)) == pytest.approx(expected)
    assert seconds("8xA100-SXM-80GB", "reduce_scatter", 1 * GB, Group(1, 8)) == pytest.approx(expected)


def test_a_sum_goes_around_twice():
    expected = START + 14 * 3.4e-6 * STEP + 1.75 / 78
    assert seconds("8xA100-SXM-80GB", "all_reduce", 1 * GB, Group(1, 8)) == pytest.approx(expected)


def test_the_switch_helps_sums_where_it_can():
    """On Hopper 1 GB at 61 GB/s, up and down in one step each; two ranks are as well off with a ring: 1 GB at 82."""
    eight = START + 2 * 3.4e-6 * STEP + 1 / 61
    assert seconds("8xH100-SXM-80GB", "all_reduce", 1 * GB, Group(1, 8)) == pytest.approx(eight)
    two = START + 2 * 3.4e-6 * STEP + 1 / 82
    assert seconds("8xH100-SXM-80GB", "all_reduce", 1 * GB, Group(1, 2)) == pytest.approx(two)


def test_a_ring_over_machines():
    """16 ranks on 2 machines: 14 steps inside and 1 between them, at what the adapters reach."""
    rate = reached(f"2x8xH100-SXM-80GB {NETWORK}")
    expected = START + STEP * (14 * 3.4e-6 + 14e-6) + (15 / 16) * GB / rate
    found = seconds(f"2x8xH100-SXM-80GB {NETWORK}", "all_gather", 1 * GB, Group(2, 8), link=450 * GB)
    assert found == pytest.approx(expected)


def test_more_machines_reach_less():
    """8 machines: 4 ** -0.05 of what two reach; 63 steps, 7 of them between machines."""
    rate = reached(f"8x8xH100-SXM-80GB {NETWORK}") * 4**-0.05
    expected = START + STEP * (56 * 3.4e-6 + 7 * 14e-6) + (63 / 64) * GB / rate
    found = seconds(f"8x8xH100-SXM-80GB {NETWORK}", "all_gather", 1 * GB, Group(8, 8), link=450 * GB)
    assert found == pytest.approx(expected)


def test_adapters_that_outrun_nvlink_are_capped_by_it():
    """NVLink at 100 GB/s x 0.78 against 200 GB/s of adapters."""
    expected = START + STEP * (14 * 3.4e-6 + 14e-6) + (15 / 16) / 78
    assert seconds(f"2x8xA100-SXM-80GB {NETWORK}", "all_gather", 1 * GB, Group(2, 8)) == pytest.approx(expected)


def test_groups_beside_share_the_adapters():
    """Sums over 2 replicas, 8 groups of one rank a machine at once: an eighth of the adapters each."""
    rate = reached(f"2x8xH100-SXM-80GB {NETWORK}") / 8
    expected = START + STEP * 2 * 14e-6 + 1 * GB / rate
    found = seconds(f"2x8xH100-SXM-80GB {NETWORK}", "all_reduce", 1 * GB, Group(2, 1, 8, 8))
    assert found == pytest.approx(expected)


def test_a_lone_rank_has_its_own_share_or_one_adapter():
    """8 adapters for 8 ranks: an eighth. 2 adapters for 8 ranks: one of them."""
    for adapters, part in (("8x200", 8), ("2x200", 2)):
        name = f"2x8xH100-SXM-80GB roce-{adapters}"
        expected = START + STEP * 14e-6 + 0.5 * GB / (reached(name) / part)
        assert seconds(name, "all_gather", 1 * GB, Group(2, 1)) == pytest.approx(expected)


def test_small_sums_over_many_machines_take_trees():
    """64 machines of 8: up and down 6 levels and a chain of 7, not 1022 steps."""
    rate = min(reached(f"64x8xH100-SXM-80GB {NETWORK}") * 32**-0.05, 82 * GB)
    expected = START + STEP * 2 * (7 * 3.4e-6 + 6 * 14e-6) + 2 * 1e6 / (rate * 0.92)
    found = seconds(f"64x8xH100-SXM-80GB {NETWORK}", "all_reduce", 1e6, Group(64, 8))
    assert found == pytest.approx(expected)


def test_pcie_with_and_without_access_to_each_others_memory():
    """25 GB/s raw. Four under one root complex: 0.70 with access, 0.40 without; eight lie under two."""
    for peers, ranks, share in ((True, 4, 0.70), (False, 4, 0.40), (True, 8, 0.40)):
        expected = START + STEP * (ranks - 1) * 5.7e-6 + (ranks - 1) / ranks / (25 * share)
        found = seconds("8xA10", "all_gather", 1 * GB, Group(1, ranks), link=25 * GB, peer_to_peer=peers)
        assert found == pytest.approx(expected)


def test_pcie_neighbours_that_are_far_apart_lie_under_two_roots():
    """Two ranks, 4 apart: through host memory."""
    expected = START + STEP * 5.7e-6 + 0.5 / (25 * 0.40)
    assert seconds("8xA10", "all_gather", 1 * GB, Group(1, 2, 4, 4), link=25 * GB) == pytest.approx(expected)


def test_bridges_join_neighbouring_pairs_alone():
    """H100 PCIe: 115 GB/s for two neighbours; 4 ranks over PCIe. An RTX 3090 is not taken to have one."""
    pair = START + STEP * 5.7e-6 + 0.5 / 115
    assert seconds("4xH100-PCIE", "all_gather", 1 * GB, Group(1, 2, 2), link=25 * GB) == pytest.approx(pair)
    apart = START + STEP * 5.7e-6 + 0.5 / (25 * 0.70)
    assert seconds("4xH100-PCIE", "all_gather", 1 * GB, Group(1, 2, 2, 2), link=25 * GB) == pytest.approx(apart)
    assert seconds("4xRTX-3090", "all_gather", 1 * GB, Group(1, 2, 2), link=25 * GB) == pytest.approx(apart)
    bridged = links_of(cluster("4xH100-PCIE")).source("all_gather", Group(1, 2, 2))
    assert bridged.startswith("assumed: an NVLink bridge")


def test_few_of_a_mesh_have_few_links():
    """MI300X: 700 GB/s over 7 peers, so 100 to one of them, at 0.72, however many the cluster has of the machine."""
    expected = START + STEP * 3.4e-6 + 0.5 / 72
    for name in ("8xMI300X", "2xMI300X"):
        assert seconds(name, "all_gather", 1 * GB, Group(1, 2), link=700 * GB) == pytest.approx(expected)


def test_a_rack_is_one_machine():
    """18 machines of 4 in one NVLink domain: 71 steps inside it, at 0.82 of the card's rate."""
    expected = START + STEP * 71 * 3.4e-6 + (71 / 72) / 82
    assert seconds("18x4xGB200 nvl72", "all_gather", 1 * GB, Group(18, 4)) == pytest.approx(expected)


KINDS = st.sampled_from(["all_gather", "reduce_scatter", "all_reduce"])
GROUPS = st.builds(
    lambda nodes, per_node: Group(2**nodes, 2**per_node, 8 // 2**per_node), st.integers(0, 6), st.integers(0, 3)
)
NAMES = st.sampled_from(["64x8xA100-SXM-80GB roce-1600", "64x8xH100-SXM-80GB ib-8x400", "64x8xA10 eth-100"])


@given(name=NAMES, kind=KINDS, group=GROUPS, payload=st.floats(1, 1e11), more=st.floats(1, 100))
def test_more_bytes_take_longer_and_never_less_per_byte_than_the_bus(name, kind, group, payload, more):
    links = links_of(cluster(name))
    once, again = links.seconds(kind, payload, group), links.seconds(kind, payload * more, group)
    assert once <= again <= once * more * (1 + 1e-9)


@given(name=NAMES, group=GROUPS, payload=st.floats(1, 1e11))
def test_a_sum_takes_no_longer_than_its_two_halves(name, group, payload):
    links = links_of(cluster(name))
    halves = links.seconds("reduce_scatter", payload, group) + links.seconds("all_gather", payload, group)
    assert links.seconds("all_reduce", payload, group) <= halves * (1 + 1e-9)


@given(name=NAMES, kind=KINDS, group=GROUPS, payload=st.floats(1, 1e11))
def test_more_groups_beside_are_never_faster(name, kind, group, payload):
    links = links_of(cluster(name))
    lone = group._replace(beside=1)
    assert links.seconds(kind, payload, lone) <= links.seconds(kind, payload, group) * (1 + 1e-9)
