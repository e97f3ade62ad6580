"""Links: measured shapes as measured, others by the model's ratio, and sources that say which."""

from __future__ import annotations

import time

import pytest

from predict.links.links_cases import cluster, measured, speed
from shardwise.catalogue.clusters import find_cluster
from shardwise.predict.links import Group, links_of
from shardwise.predict.links.constants import CONSTANTS
from shardwise.spec.problems import BadInput

EIGHT = Group(1, 8)


def test_nothing_to_send_and_one_rank_take_no_time():
    links = links_of(cluster("8xA100-SXM-80GB"))
    assert links.seconds("all_gather", 0, EIGHT) == 0
    assert links.seconds("all_gather", 1e9, Group(1, 1, 8)) == 0
    assert links.source("all_gather", Group(1, 1, 8)).startswith("catalogue")


def test_a_measured_shape_is_as_measured():
    probe = measured(speed("all_gather", 1, 8, (1e6, 1e-3), (1e8, 2e-3)))
    links = links_of(cluster("8xA100-SXM-80GB", measured=probe))
    assert links.seconds("all_gather", 1e8, EIGHT) == 2e-3
    assert links.source("all_gather", EIGHT) == "measured: a probe"


def test_another_shape_is_scaled_from_the_nearest():
    """Twice as slow as the model where it was measured: twice as slow for 4 ranks and for another kind."""
    plain = links_of(cluster("8xA100-SXM-80GB"))
    twice = 2 * plain.seconds("all_gather", 1e8, EIGHT)
    links = links_of(cluster("8xA100-SXM-80GB", measured=measured(speed("all_gather", 1, 8, (1e8, twice)))))
    for kind, group in (("all_gather", Group(1, 4, 2)), ("reduce_scatter", EIGHT), ("all_reduce", Group(1, 2, 4))):
        assert links.seconds(kind, 1e8, group) == pytest.approx(2 * plain.seconds(kind, 1e8, group))
        assert links.source(kind, group).startswith("measured, scaled from all_gather over 1 x 8 ranks")


def test_the_nearest_is_on_the_same_side_of_a_machines_border():
    """All-gathers within a machine as the model has them, across machines 3 times slower: reductions follow."""
    plain = links_of(cluster("4x8xA100-SXM-80GB roce-8x200"))
    inside = plain.seconds("all_gather", 1e8, EIGHT)
    across = 3 * plain.seconds("all_gather", 1e8, Group(4, 8))
    probe = measured(speed("all_gather", 1, 8, (1e8, inside)), speed("all_gather", 4, 8, (1e8, across)))
    links = links_of(cluster("4x8xA100-SXM-80GB roce-8x200", measured=probe))
    group = Group(2, 8)
    assert links.seconds("reduce_scatter", 1e8, group) == pytest.approx(3 * plain.seconds("reduce_scatter", 1e8, group))
    assert links.seconds("reduce_scatter", 1e8, EIGHT) == pytest.approx(plain.seconds("reduce_scatter", 1e8, EIGHT))


def test_shapes_that_the_cluster_does_not_have_are_left_out():
    """A part of a probed cluster: one machine of two, for which nothing between machines says anything."""
    probe = measured(speed("all_gather", 2, 8, (1e8, 1.0)))
    part, plain = (links_of(cluster("8xA100-SXM-80GB", measured=one)) for one in (probe, None))
    assert part.seconds("all_gather", 1e8, EIGHT) == plain.seconds("all_gather", 1e8, EIGHT)
    assert part.source("all_gather", EIGHT) == plain.source("all_gather", EIGHT)


def test_cpu_processes_need_a_probe():
    with pytest.raises(BadInput, match="shardwise probe"):
        links_of(find_cluster("2xcpu"))


def test_one_cpu_process_needs_none():
    assert links_of(find_cluster("cpu")).seconds("all_gather", 1e6, Group(1, 1)) == 0


def test_cpu_processes_have_measured_shapes_alone():
    probe = measured(speed("all_gather", 1, 2, (1e6, 1e-3)))
    links = links_of(find_cluster("2xcpu").model_copy(update={"measured": probe}))
    assert links.seconds("all_gather", 1e6, Group(1, 2)) == 1e-3
    with pytest.raises(BadInput, match="all_reduce over 1 x 2 ranks was not measured; allowed: all_gather over 1 x 2"):
        links.seconds("all_reduce", 1e6, Group(1, 2))


def test_a_card_without_rates_is_refused():
    known = find_cluster("8xA100-SXM-80GB")
    blank = known.model_copy(update={"gpu": known.gpu.model_copy(update={"rates": None})})
    with pytest.raises(BadInput, match="the links of A100-SXM-80GB are not known"):
        links_of(blank)


def test_cards_that_no_fabric_names_are_refused_unless_they_are_linked_over_pcie():
    known = cluster("8xA100-SXM-80GB")
    other = known.gpu.model_copy(update={"name": "Z9"})
    with pytest.raises(BadInput, match="the links of Z9 are not known"):
        links_of(known.model_copy(update={"gpu": other}))
    over_pcie = known.model_copy(update={"gpu": other.model_copy(update={"link": "pcie"})})
    assert links_of(over_pcie).seconds("all_gather", 1e9, EIGHT) > 0


def test_a_network_that_nobody_named_is_assumed():
    across = Group(2, 8)
    unnamed = links_of(cluster("2x8xA100-SXM-80GB", link=300e9))
    assert unnamed.source("all_gather", across).startswith("assumed: ")
    named = links_of(cluster("2x8xA100-SXM-80GB roce-8x100", link=300e9))
    assert named.source("all_gather", across).startswith("catalogue: roce-8x100")
    assert named.source("all_gather", EIGHT).startswith("catalogue: 300 GB/s (here)")


@pytest.mark.parametrize("name", [constant.name for constant in CONSTANTS])
def test_every_constant_can_be_given_and_weighs(name):
    machines = cluster("8x8xA100-SXM-80GB roce-8x100")
    low, high = (
        links_of(machines, values={name: value}).seconds("all_gather", 1e7, Group(8, 8))
        for constant in CONSTANTS
        if constant.name == name
        for value in (constant.low, constant.high)
    )
    assert low < high


def test_results_are_remembered():
    links = links_of(cluster("4x8xH100-SXM-80GB ib-8x400"))
    group = Group(4, 8)
    links.seconds("all_reduce", 1e8, group)
    started = time.process_time()
    for _ in range(1000):
        links.seconds("all_reduce", 1e8, group)
    assert (time.process_time() - started) / 1000 < 5e-6
