"""Machines of clouds by the names of their types."""

from __future__ import annotations

import pytest

from shardwise.catalogue.cards import cards
from shardwise.catalogue.clusters import find_cluster
from shardwise.catalogue.instances import find_instance, instances
from shardwise.catalogue.networks import network_of
from shardwise.spec.problems import BadInput

GIB = 2**30


@pytest.mark.parametrize(
    ("typed", "nodes", "per_node", "card", "gib", "cores", "network"),
    [
        ("2xp5.48xlarge", 2, 8, "H100-SXM-80GB", 2048, 96, "efa-32x100"),
        ("p4d.24xlarge", 1, 8, "A100-SXM-40GB", 1152, 48, "efa-4x100"),
        ("P4DE.24xlarge", 1, 8, "A100-SXM-80GB", 1152, 48, "efa-4x100"),
        ("ml.p5en.48xlarge", 1, 8, "H200-SXM-141GB", 2048, 96, "efa-16x200"),
        ("p6-b200.48xlarge", 1, 8, "B200-SXM", 2048, 96, "efa-8x400"),
        ("g5.48xlarge", 1, 8, "A10G", 768, 96, "eth-100"),
        ("4xg5.12xl", 4, 4, "A10G", 192, 24, "eth-40"),
        ("g4dn.12xlarge", 1, 4, "T4", 192, 24, "eth-50"),
        ("2xa3-megagpu-8g", 2, 8, "H100-SXM-80GB", 1872, 104, "net-8x200"),
        ("a2-highgpu-8g", 1, 8, "A100-SXM-40GB", 680, 48, "eth-100"),
        ("g2-standard-96", 1, 8, "L4", 384, 48, "eth-100"),
        ("Standard_ND96isr_H100_v5", 1, 8, "H100-SXM-80GB", 1900, 96, "ib-8x400"),
        ("2 x ND96asr v4", 2, 8, "A100-SXM-40GB", 900, 96, "ib-8x200"),
        ("BM.GPU.A100-v2.8", 1, 8, "A100-SXM-80GB", 2048, 128, "roce-16x100"),
        ("gpu_8x_h100_sxm5", 1, 8, "H100-SXM-80GB", 1800, 104, None),
        ("2xp5.48xlarge eth-100", 2, 8, "H100-SXM-80GB", 2048, 96, "eth-100"),
    ],
)
def test_types_as_people_write_them(typed, nodes, per_node, card, gib, cores, network):
    found = find_cluster(typed)
    assert (found.nodes, found.per_node, found.gpu.name) == (nodes, per_node, card)
    assert (found.host_bytes, found.host_cores, found.network) == (gib * GIB, cores, network)


def test_adapters_count_for_the_machine_and_not_for_a_card():
    """32 EFA adapters of 100 Gb/s are 3200 Gb/s, 400 GB/s of a machine and 50 of each of its cards."""
    found = network_of(find_cluster("2xp5.48xlarge"))
    assert (found.node_rate, found.node_rate / 8, found.assumed) == (400e9, 50e9, False)


@pytest.mark.parametrize("name", list(instances()))
def test_every_type_is_whole(name):
    machine = instances()[name]
    assert machine.card in cards()
    assert machine.cpus in (machine.cores, 2 * machine.cores)
    assert len(machine.source) > 10
    assert machine.gib is None or 10 <= machine.gib / machine.devices <= 1100
    found = find_cluster(f"2x{name}")
    assert (found.nodes, found.per_node, found.gpu.name) == (2, machine.devices, machine.card)
    between = network_of(found)
    assert between.assumed == (machine.network is None)
    assert machine.network in (between.name, None)


def test_names_do_not_meet_those_of_cards():
    for name in instances():
        assert find_instance(name)[0] == name
    for name, card in cards().items():
        assert not [one for one in (name, *card.other_names) if find_instance(one)]


def test_machines_whose_cards_cannot_reach_each_other():
    """An L4 can; those of AWS are rented out such that they cannot."""
    assert find_cluster("4xL4").gpu.rates.peer_to_peer
    assert not find_cluster("g6.12xlarge").gpu.rates.peer_to_peer


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("2xp5.48xlarg", "did you mean 'p5.48xlarge'?"),
        ("a3-megagpu-9g", "did you mean 'a3-megagpu-8g'?"),
        ("8xA11", "did you mean 'A10'?"),
        ("2x8xp5.48xlarge", "a p5.48xlarge has 8 of them; write 2xp5.48xlarge"),
        ("0xp5.48xlarge", "start at 1"),
        ("2xp5.48xlarge ib-0", "a rate of 0"),
        ("19xa4x-highgpu-4g", "a rack of nvl72 holds 72 devices, not 76"),
    ],
)
def test_refusals(text, words):
    with pytest.raises(BadInput) as caught:
        find_cluster(text)
    assert words in str(caught.value)
