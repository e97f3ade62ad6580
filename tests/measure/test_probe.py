"""A probe's groups, pairs and verdicts by hand, and a whole small probe between two ranks."""

from __future__ import annotations

import itertools
import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from harness.ranks import run_ranks
from shardwise.measure.probe import peers
from shardwise.measure.probe.links import collective
from shardwise.measure.probe.run import probe
from shardwise.measure.probe.team import Shape, Team, join, members, shapes
from shardwise.measure.probe.timing import Limits, Timing, climb, curve, powers
from shardwise.spec.speeds import Measured

QUICK = Limits(most_s=0.1, repeats=3, point_s=1.0, least_s=0.001, most_bytes=1 << 16, most_side=64)
CPU = torch.device("cpu")
ALONE = Team(rank=0, nodes=1, per_node=1, device=CPU)


def team(nodes: int, per_node: int) -> Team:
    hosts = tuple(f"box{node}" for node in range(nodes) for _ in range(per_node))
    return Team(rank=0, nodes=nodes, per_node=per_node, device=CPU, hosts=hosts)


def test_groups_of_two_machines_with_four_ranks():
    """Over both machines 4, 2 or 1 ranks of each; on one machine 4 or 2. A tensor axis of 2 lies between the ranks of
    Shape(2, 2): machines hold 0-3 and 4-7, so its groups are the even and the odd ranks."""
    assert shapes(2, 4) == (Shape(2, 4), Shape(2, 2), Shape(2, 1), Shape(1, 4), Shape(1, 2))
    assert members(Shape(2, 2), 2, 4) == ((0, 2, 4, 6), (1, 3, 5, 7))
    assert members(Shape(2, 1), 2, 4) == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert members(Shape(1, 2), 2, 4) == ((0, 1), (2, 3), (4, 5), (6, 7))


@given(nodes=st.integers(1, 6), per_node=st.integers(1, 12))
def test_groups_of_a_shape_hold_every_rank_once(nodes, per_node):
    for shape in shapes(nodes, per_node):
        groups = members(shape, nodes, per_node)
        assert sorted(itertools.chain(*groups)) == list(range(nodes * per_node))
        for ranks in groups:
            on_each = [sum(rank // per_node == node for rank in ranks) for node in range(nodes)]
            assert sorted(on_each)[-shape.nodes :] == [shape.per_node] * shape.nodes
            assert sum(on_each) == shape.nodes * shape.per_node


@given(st.integers(2, 8))
def test_everyone_meets_everyone_once(places):
    met = list(itertools.chain(*peers.rounds(places)))
    assert sorted(met) == list(itertools.combinations(range(places), 2))
    assert all(len(set(itertools.chain(*pairs))) == 2 * len(pairs) for pairs in peers.rounds(places))


def test_many_machines_meet_seven_others_at_most():
    inside, between = peers.pair_rounds(512, 8)
    assert (len(inside), len(between)) == (7, 7)
    assert all(len(pairs) == 512 * 8 // 2 for pairs in between)
    assert all(a % 8 == b % 8 for pairs in between for a, b in pairs)
    assert all(a // 8 == b // 8 for pairs in inside for a, b in pairs)


def test_a_rank_behind_a_slow_link_is_named_and_its_partners_are_not():
    """Three machines; every link of the last takes 0.1 s for 1 MB, the other one 0.05 s: 10 MB/s against 20."""
    pairs = peers.Pairs(bytes=10**6, seconds={(0, 1): 0.05, (0, 2): 0.1, (1, 2): 0.1})
    (found,) = peers.slow_links(pairs, team(3, 1), "between hosts")
    assert (found.ranks, found.factor) == ((2,), pytest.approx(2.0))
    assert found.text == (
        "the link of rank 2 (host 2, box2) between hosts is slow: 10.0 MB/s each way at best, the others' 20.0 MB/s"
    )


def test_one_slow_link_among_good_ranks_is_named_as_a_link():
    """Four machines, six links; only 1-2 is slow, so both its ends have better ones."""
    seconds = dict.fromkeys(itertools.combinations(range(4), 2), 0.05) | {(1, 2): 0.2}
    (found,) = peers.slow_links(peers.Pairs(bytes=10**6, seconds=seconds), team(4, 1), "between hosts")
    assert (found.ranks, found.factor) == ((1, 2), pytest.approx(4.0))
    assert "between rank 1 (host 1, box1) and rank 2 (host 2, box2)" in found.text


def test_of_two_pairs_a_link_is_named_and_no_rank():
    """Nobody knows which end of the slow one is at fault."""
    pairs = peers.Pairs(bytes=10**9, seconds={(0, 1): 0.5, (2, 3): 1.0})
    (found,) = peers.slow_links(pairs, team(2, 2), "inside a host")
    assert (found.ranks, found.factor) == ((2, 3), pytest.approx(2.0))
    assert found.text.endswith("is slow: 1.0 GB/s each way, other links 2.0 GB/s")


@pytest.mark.parametrize("seconds", [{(0, 1): 0.3}, {(0, 1): 0.05, (0, 2): 0.055, (1, 2): 0.059}])
def test_a_single_link_and_links_that_are_alike_are_not_judged(seconds):
    ranks = 1 + max(itertools.chain(*seconds))
    assert peers.slow_links(peers.Pairs(bytes=10**6, seconds=seconds), team(ranks, 1), "between hosts") == []


def test_a_slow_device_is_one_that_is_slow_at_most_pieces():
    """Rank 1 takes 1.5, 1.6 and 1.0 times the others' median: 1.5 in the middle. Rank 2 was disturbed once."""
    seconds = [(1.0, 1.5, 1.0, 1.0), (1.0, 1.6, 1.0, 1.0), (1.0, 1.0, 5.0, 1.0)]
    (found,) = peers.slow_devices("matrix products", seconds, team(1, 4))
    assert (found.ranks, found.factor) == ((1,), pytest.approx(1.5))
    assert found.text == "rank 1 is slow at matrix products: 1.5 times the others' seconds"
    assert peers.slow_devices("matrix products", [(1.0,)], ALONE) == []


def test_sizes_rise_until_the_next_would_take_too_long():
    """1 ms per unit: 1 takes 1 ms, 4 takes 4, 16 takes 16; 64 would take 64, more than the 50 allowed."""
    limits = Limits(most_s=0.05, repeats=5, point_s=1.0, least_s=0.0, most_bytes=1, most_side=1)

    def prepare(size: float):
        def body() -> None:
            end = time.perf_counter() + 1e-3 * size
            while time.perf_counter() < end:
                pass

        return body, size

    found = climb(powers(1, 1024, 4), prepare, ALONE, limits)
    assert [timing.size for timing in found] == [1, 4, 16]
    assert all(timing.low <= timing.seconds <= timing.high for timing in found)
    assert found[-1].low >= 16e-3


def test_a_disturbed_small_size_is_given_the_seconds_of_a_larger_one():
    """1 KiB took 4 ms and 4 KiB took 1 ms, so 1 KiB takes no more than 1 ms."""

    def timing(size: float, seconds: float) -> Timing:
        return Timing(size=size, seconds=seconds, low=seconds, high=seconds, by_rank=(seconds,))

    found = curve([timing(1024, 4e-3), timing(4096, 1e-3), timing(16384, 2e-3)], "here")
    assert found.points == ((1024, 1e-3), (4096, 1e-3), (16384, 2e-3))


def test_one_rank_alone_measures_its_device():
    probed = probe(join(CPU), QUICK)
    assert probed.measured.collectives == ()
    assert (probed.measured.device.slowdown, probed.findings) == (1.0, ())
    assert set(probed.measured.device.products) == {"fp32", "bf16", "fp16"}
    assert [size for size, _ in probed.measured.device.products["fp32"].points][:2] == [8 * 8**3, 8 * 16**3]


def test_a_probe_between_two_ranks():
    def body(rank: int, world: int) -> str:
        return probe(join(CPU), QUICK).measured.model_dump_json()

    texts = run_ranks(body, 2)
    assert texts[0] == texts[1]
    measured = Measured.model_validate_json(texts[0])
    kinds = [(each.kind, each.nodes, each.per_node) for each in measured.collectives]
    assert kinds == [("all_gather", 1, 2), ("reduce_scatter", 1, 2), ("all_reduce", 1, 2)]
    assert [size for size, _ in measured.collectives[0].curve.points][:2] == [1024, 4096]
    assert measured.device.post_s > 0
    assert measured.device.unit_s > 10 * measured.device.issue_s
    assert measured.host is not None
    assert measured.host.link is None


def test_payloads_are_whole_shards():
    """1024 bytes are 256 elements: 85 for each of three ranks, 1020 bytes together."""

    def body(rank: int, world: int) -> list[float]:
        mine = join(CPU)
        return [timing.size for timing in collective("reduce_scatter", mine.group(Shape(1, 3)), mine, QUICK)]

    assert run_ranks(body, 3)[0][:2] == [1020, 4092]


def test_a_slowed_rank_is_named():
    def body(rank: int, world: int) -> list[tuple[str, tuple[int, ...]]]:
        if rank == 1:
            plain = torch.mm

            def slow(*given: torch.Tensor) -> torch.Tensor:
                for _ in range(3):
                    plain(*given)
                return plain(*given)

            torch.mm = slow
        limits = Limits(most_s=0.02, repeats=5, point_s=1.0, least_s=0.001, most_bytes=1 << 12, most_side=256)
        return [(found.subject, found.ranks) for found in probe(join(CPU), limits).findings]

    found = run_ranks(body, 2)[0]
    assert ("matrix products", (1,)) in found
    assert ("matrix products", (0,)) not in found
