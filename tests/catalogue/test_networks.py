"""Networks between machines: rates per adapter and machine, what collectives reach, what is assumed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shardwise.catalogue.cards import cards, find_gpu
from shardwise.catalogue.clusters import find_cluster
from shardwise.catalogue.networks import assumed_network, network_of
from shardwise.spec.cluster import NETWORKS
from shardwise.spec.problems import BadInput

PUBLISHED = Path(__file__).resolve().parents[2] / "bench" / "measurements" / "published.jsonl"


def network(text):
    found = network_of(find_cluster(text))
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("typed", "adapters", "adapter", "machine"),
    [
        ("ib-8x400", 8, 50e9, 400e9),
        ("ib-8x200", 8, 25e9, 200e9),
        ("efa-32x100", 32, 12.5e9, 400e9),
        ("opa-4x100", 4, 12.5e9, 50e9),
        ("roce-1600", None, None, 200e9),
        ("efa-3200", None, None, 400e9),
        ("net-400", None, None, 50e9),
        ("eth-25", None, None, 3.125e9),
        ("eth-2x25", 2, 3.125e9, 6.25e9),
    ],
)
def test_rates_of_an_adapter_and_of_a_machine(typed, adapters, adapter, machine):
    """400 Gb/s are 50 GB/s; a number alone is the machine's, adapters multiply."""
    found = network(f"2x8xA100-SXM-80GB {typed}")
    assert (found.name, found.kind) == (typed, typed.split("-")[0])
    assert (found.adapters, found.adapter_rate, found.node_rate) == (adapters, adapter, machine)
    assert not found.assumed


def test_one_machine_has_none():
    assert network_of(find_cluster("8xA10")) is None
    assert network_of(find_cluster("8xA10 ib-8x400")) is None


def test_a_rack_of_nvlink_is_as_fast_as_its_cards():
    """Four GB200 of 900 GB/s each."""
    found = network("18x4xGB200 nvl72")
    assert (found.kind, found.adapters, found.node_rate) == ("nvl72", None, 4 * 900e9)


@pytest.mark.parametrize(
    ("typed", "reached"),
    [
        ("eth-25", 0.6 * 3.125e9),
        ("eth-100", 4.5e9),
        ("eth-4x100", 4 * 4.5e9),
        ("net-100", 4.5e9),
        ("net-800", 0.87 * 100e9),
        ("ib-8x400", 0.9 * 400e9),
        ("opa-4x100", 0.34 * 50e9),
    ],
)
def test_what_collectives_reach(typed, reached):
    """Sockets: 60 % of 25 Gb/s, and 4.5 GB/s per adapter of 100; a slow network of no kind is taken for sockets."""
    found = network(f"2x8xA10 {typed}")
    assert found.reached == pytest.approx(reached)


@pytest.mark.parametrize("kind", NETWORKS)
@pytest.mark.parametrize("rate", [1, 10, 25, 100, 400, 3200])
def test_shares_are_in_order_and_sourced(kind, rate):
    found = network(f"2x8xA10 {kind}-{rate}")
    assert 0 < found.lowest <= found.achieved.value <= found.highest <= 1
    assert len(found.achieved.source) > 5


@pytest.mark.parametrize("kind", NETWORKS)
def test_more_wire_is_never_slower(kind):
    reached = [network(f"2x8xA10 {kind}-{rate}").reached for rate in (1, 10, 25, 50, 100, 199, 200, 400, 1600)]
    assert reached == sorted(reached)


@pytest.mark.parametrize(
    ("cluster", "name"),
    [
        ("2x8xA100-SXM-80GB", "roce-1600"),
        ("2x4xA100-SXM-40GB", "roce-800"),
        ("2x8xA800", "roce-1600"),
        ("2x8xH100", "ib-8x400"),
        ("2x1xH100", "ib-1x400"),
        ("2x8xB200", "ib-8x400"),
        ("18x4xGB200", "nvl72"),
        ("19x4xGB200", "ib-4x400"),
        ("19x4xGB300", "ib-4x800"),
        ("2x8xV100-SXM-32GB", "ib-400"),
        ("2x8xMI250X", "net-800"),
        ("2x8xMI300X", "roce-8x400"),
        ("2x8xA10", "eth-25"),
        ("2x2xRTX-4090", "eth-25"),
        ("2x2xcpu", "eth-25"),
    ],
)
def test_what_is_assumed_where_none_is_named(cluster, name):
    made = find_cluster(cluster)
    found = network_of(made)
    assert found is not None
    assert made.network is None
    assert (found.name, found.assumed) == (name, True)
    assert assumed_network(made.gpu, per_node=made.per_node, nodes=made.nodes) == name
    assert len(found.source) > 10


def test_every_card_has_an_assumed_network_that_is_one():
    for name in cards():
        assert network(f"2x8x{name}").node_rate > 0
    assert assumed_network(find_gpu("A100-80GB")) == "roce-1600"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("32x4xGB200 nvl72", "holds 72 devices, not 128"),
        ("32x4xGB300 nvl72", "such as ib-4x800"),
        ("2x8xA10 nvl72", "joins cards with NVLink"),
        ("2x2xcpu nvl72", "joins cards with NVLink"),
        ("2x8xA100-80GB nvl72", "no rack joins A100-SXM-80GB over NVLink"),
        ("2x8xB200 nvl72", "such as ib-8x400"),
        ("2x8xA10 eth-99999999", "no machine has more than 1,000,000 Gb/s"),
        (f"2x8xA10 eth-{'9' * 400}", "is not a rate"),
        (f"2x8xA10 ib-{'9' * 18}x{'9' * 18}", "no machine has more than"),
        ("2x8xA10 eth-0", "a rate of 0"),
        ("2x8xA10 ibb-8x400", "did you mean 'ib'?"),
    ],
)
def test_refusals(text, words):
    with pytest.raises(BadInput) as caught:
        find_cluster(text)
    assert words in str(caught.value)


@pytest.mark.parametrize("typed", ["ib", "ib-", "ib-8x400x2", "ib-fast", "ib-\u00b2", "ib-\u0661", "nvl73"])
def test_a_cluster_made_by_hand_is_refused_with_its_network(typed):
    made = find_cluster("2x8xA10").model_copy(update={"network": typed})
    with pytest.raises(BadInput) as caught:
        network_of(made)
    assert caught.value.problems[0].value == typed


def test_cards_and_networks_of_published_measurements_are_known():
    rows = [json.loads(line)["cluster"] for line in PUBLISHED.read_text().splitlines()]
    assert len(rows) > 400
    for gpu in {row["gpu"] for row in rows} - {None}:
        found = find_gpu(gpu)
        assert found.name == gpu
        assert found.rates is not None
    for named in {row["network"] for row in rows} - {None}:
        assert network(f"2x8xA100-SXM-80GB {named}").name == named
