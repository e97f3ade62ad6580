"""Prefetch depths are what they say: the order of gathers against compute, recorded on live ranks."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.profiler import ProfilerActivity, profile

from engine.training import batches_of, make_job, make_plan
from harness.ranks import run_ranks
from shardwise.engine.load import load_model
from shardwise.engine.loss_head import token_loss
from shardwise.engine.mesh import build_mesh
from shardwise.engine.source import open_source
from shardwise.spec.layout import Prefetch
from shardwise.spec.prefetch import ahead_of, behind_of


def _order(rank, world, job):
    """Units as their gather is issued (`AG x`), their forward begins (`F x`) and their backward begins (`B x`)."""
    source, plan = open_source(job.model), make_plan(job, world)
    model = load_model(job, plan, source, build_mesh(plan.mesh, "cpu"))
    batch = batches_of(job, plan, rank, world).micro_batches(0)[0]
    token_loss(model, batch).backward()
    seen: list[str] = []
    names = {id(block): str(index) for index, block in enumerate(model.model.layers)}

    def forward(module, args):
        seen.append(f"F {names[id(module)]}")

    for block in model.model.layers:
        block.register_forward_pre_hook(forward)
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        token_loss(model, batch).backward()
    gathers = [
        (event.time_range.start, event.name)
        for event in recorded.events()
        if event.name.startswith(
            ("FSDP::all_gather (", "FSDP::pre_backward", "FSDP::post_forward", "FSDP::pre_forward")
        )
    ]
    return [name for _, name in sorted(gathers)], seen


def _short(names):
    """Only blocks, numbered: gathers as `AG 1`, forwards as `F 1`, backwards as `B 1`; the root's backward as `B`."""
    words = {"FSDP::all_gather (": "AG", "FSDP::pre_forward (": "F", "FSDP::pre_backward (": "B"}
    short = []
    for name in names:
        word = next((short for long, short in words.items() if name.startswith(long)), None)
        place = name.partition("(")[2].rstrip(")")
        if word is not None and place.startswith("model.layers."):
            short.append(f"{word} {place.removeprefix('model.layers.')}")
        elif name == "FSDP::pre_backward":
            short.append("B")
    return short


ORDERS = {
    0: "AG 0 F 0 AG 1 F 1 AG 2 F 2 | AG 2 B 2 AG 1 B 1 AG 0 B 0",
    1: "AG 0 AG 1 F 0 AG 2 F 1 F 2 | AG 2 AG 1 B 2 AG 0 B 1 B 0",
    2: "AG 0 AG 1 AG 2 F 0 F 1 F 2 | AG 2 AG 1 AG 0 B 2 B 1 B 0",
}
"""Depth -> blocks in the order in which their gather is issued and their compute may begin."""


def _may_begin(names):
    """Rewrite FSDP2's own spans so that F and B stand where the unit's compute can begin: after what it gathers ahead.

    FSDP2 opens its span, gathers the unit unless it is there, and then what the unit gathers ahead; compute follows.
    """
    done, waiting = [], None
    for item in _short(names):
        if item.startswith("AG"):
            done.append(item)
            continue
        if waiting not in (None, "B"):
            done.append(waiting)
        waiting = item
    return [*done, waiting]


@pytest.mark.parametrize("background", [True, False])
@pytest.mark.parametrize("depth", ORDERS)
def test_gathers_come_when_the_depth_says(tiny, depth, background):
    prefetch = {"forward": depth, "backward": depth, "async_all_gather": background}
    job = make_job(tiny("llama"), fsdp={"strategy": "FULL_SHARD"}, prefetch=prefetch, micro_batch=3)
    for names, forwards in run_ranks(_order, 2, job):
        assert forwards == ["F 0", "F 1", "F 2"]
        seen = " ".join(_may_begin(names))
        assert seen == ORDERS[depth].replace(" |", "")


@dataclass(frozen=True)
class _Unit:
    block: int | None
    checkpointed: bool
    has_backward: bool


_units = st.lists(
    st.builds(_Unit, block=st.none() | st.integers(0, 3), checkpointed=st.booleans(), has_backward=st.booleans()),
    max_size=12,
)


@given(units=_units, forward=st.integers(0, 5), backward=st.integers(0, 5))
def test_what_is_gathered_ahead_lies_ahead_within_the_depth(units, forward, backward):
    prefetch = Prefetch(forward=forward, backward=backward, async_all_gather=True)
    for place in range(-1, len(units)):
        ahead = ahead_of(units, place, prefetch)
        assert ahead == sorted(ahead)
        assert all(place < other <= place + forward for other in ahead)
        if place >= 0 and not units[place].checkpointed:
            assert len(ahead) == min(forward, len(units) - 1 - place)
    for place in range(len(units) + 1):
        behind = behind_of(units, place, prefetch)
        assert behind == sorted(behind, reverse=True)
        assert all(place - backward <= other < place and units[other].has_backward for other in behind)


def test_units_of_a_recomputed_block_do_not_look_beyond_it():
    units = [_Unit(0, True, True), _Unit(0, True, True), _Unit(1, True, True), _Unit(2, True, True)]
    prefetch = Prefetch(forward=3, backward=1, async_all_gather=True)
    assert ahead_of(units, 0, prefetch) == [1]
    assert ahead_of(units, 1, prefetch) == []
    assert ahead_of(units, 2, prefetch) == [3]
    assert ahead_of(units, -1, prefetch) == [0, 1, 2]
