"""Groups by arithmetic, against the ranks that `predict.wire` lists."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.predict.links.groups import Group, group_of
from shardwise.predict.wire import groups
from shardwise.spec.layout import Mesh

SIZES = st.integers(1, 6)


def by_hand(axis: str, mesh: Mesh, per_node: int) -> tuple[int, int, int]:
    """Machines, ranks on each and groups beside, by looking at every rank of every group."""
    per_node = min(per_node, mesh.world)
    places = [[rank // per_node for rank in group] for group in groups(axis, mesh)]
    nodes = max(len(set(place)) for place in places)
    busy = [set(place) for place in places if nodes == 1 or len(set(place)) > 1]
    beside = max(sum(node in place for place in busy) for node in range(-(-mesh.world // per_node)))
    return nodes, -(-len(places[0]) // nodes), beside


@given(replicate=SIZES, shard=SIZES, tensor=SIZES, per_node=st.integers(1, 12), data=st.data())
def test_every_group_is_as_counted_rank_by_rank(replicate, shard, tensor, per_node, data):
    mesh = Mesh(replicate=replicate, shard=shard, tensor=tensor)
    parts = [k for k in range(1, shard + 1) if shard % k == 0]
    axis = data.draw(
        st.sampled_from(["shard", "replicate", "tensor", "world", *(f"shard/{part}" for part in parts)]), label="axis"
    )
    assert group_of(axis, mesh, per_node)[:3] == by_hand(axis, mesh, per_node)


@given(replicate=SIZES, shard=SIZES, tensor=SIZES, per_node=st.integers(1, 12))
def test_step_is_the_distance_of_neighbours(replicate, shard, tensor, per_node):
    mesh = Mesh(replicate=replicate, shard=shard, tensor=tensor)
    for axis in ("shard", "replicate", "tensor"):
        found = group_of(axis, mesh, per_node)
        group = groups(axis, mesh)[0]
        assert found.step == (group[1] - group[0] if len(group) > 1 else 1)


@pytest.mark.parametrize(
    ("axis", "mesh", "per_node", "group"),
    [
        ("shard", Mesh(shard=8), 8, Group(1, 8, 1)),
        ("shard", Mesh(shard=16), 8, Group(2, 8, 1)),
        ("replicate", Mesh(replicate=4, shard=8), 8, Group(4, 1, 8, 8)),
        ("shard", Mesh(replicate=4, shard=8), 8, Group(1, 8, 1)),
        ("replicate", Mesh(replicate=2, shard=4), 8, Group(1, 2, 4, 4)),
        ("shard", Mesh(shard=8, tensor=4), 8, Group(4, 2, 4, 4)),
        ("tensor", Mesh(shard=8, tensor=4), 8, Group(1, 4, 2)),
        ("shard/4", Mesh(shard=32), 8, Group(1, 4, 2)),
        ("shard/16", Mesh(shard=32), 8, Group(2, 8, 1)),
        ("world", Mesh(replicate=2, shard=4, tensor=2), 8, Group(2, 8, 1)),
        ("tensor", Mesh(shard=8), 8, Group(1, 1, 8)),
    ],
)
def test_groups_whose_borders_are_those_of_machines(axis, mesh, per_node, group):
    assert group_of(axis, mesh, per_node) == group


def test_the_worst_group_counts_where_borders_do_not_meet():
    """Groups of 6 on machines of 8: ranks 6 to 11 and 12 to 17 lie on two machines, both on the second one."""
    assert group_of("shard", Mesh(replicate=4, shard=6), 8) == Group(2, 3, 2)


def test_an_unknown_axis_is_refused():
    with pytest.raises(ValueError, match="expert is not an axis"):
        group_of("expert", Mesh(shard=8), 8)


def test_four_thousand_ranks_take_microseconds():
    mesh = Mesh(replicate=64, shard=8, tensor=8)
    started = time.process_time()
    for _ in range(100):
        group_of("replicate", mesh, 8)
    assert (time.process_time() - started) / 100 < 200e-6
