"""Mesh and resharding: every accepted layout covers the ranks, every refusal names one that does."""

from __future__ import annotations

import re
from typing import get_args

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from planner.planning import facts, job, refusal
from shardwise.planner.decide import decide
from shardwise.spec.layout import StrategyName
from shardwise.spec.problems import BadInput

STRATEGIES = get_args(StrategyName)
_sizes = st.none() | st.integers(1, 16)


def _meshes(fix: str) -> list[dict[str, int]]:
    return [yaml.safe_load(text) for text in re.findall(r"\{[^}]*\}", fix)]


def _axes(plan):
    return plan.mesh.replicate, plan.mesh.shard, plan.mesh.tensor


def _plain(strategy: str) -> bool:
    return not strategy.startswith("HYBRID")


@given(
    world=st.integers(1, 16),
    strategy=st.sampled_from([*STRATEGIES, "auto"]),
    mesh=st.fixed_dictionaries({"replicate": _sizes, "shard": _sizes, "tensor": st.integers(1, 4)}),
    node=st.sampled_from([None, 1, 2, 4, 8]),
)
def test_a_mesh_covers_the_world_or_is_refused_with_what_would_do(world, strategy, mesh, node):
    known = facts(world=world, ranks_per_node=node)
    wanted = job(fsdp={"strategy": strategy}, mesh=mesh, micro_batch=1)
    try:
        plan = decide(wanted, known)
    except BadInput as error:
        (problem,) = error.problems
        assert problem.fix
        for usable in _meshes(problem.fix):
            again = decide(job(fsdp={"strategy": strategy}, mesh=usable), known)
            assert again.mesh.world == world
        return
    assert plan.mesh.world == world
    assert strategy in ("auto", plan.strategy)
    for asked, got in zip((mesh["replicate"], mesh["shard"], mesh["tensor"]), _axes(plan), strict=True):
        assert asked in (None, got)
    if not _plain(plan.strategy):
        assert plan.mesh.replicate > 1 < plan.mesh.shard
    elif plan.strategy == "NO_SHARD":
        assert plan.mesh.shard == 1
    else:
        assert plan.mesh.replicate == 1


@pytest.mark.parametrize("strategy", ["HYBRID_SHARD", "HYBRID_SHARD_ZERO2"])
@pytest.mark.parametrize("world", range(1, 17))
def test_hybrid_on_one_node_asks_for_a_mesh_and_names_usable_ones(strategy, world):
    problem = refusal(job(fsdp={"strategy": strategy}), facts(world=world))
    assert problem.field == "fsdp"
    assert "do not lie on several equal nodes" in problem.reason
    meshes = _meshes(problem.fix)
    for mesh in meshes:
        plan = decide(job(fsdp={"strategy": strategy}, mesh=mesh), facts(world=world))
        assert _axes(plan) == (mesh["replicate"], mesh["shard"], 1)
    if not meshes:
        (plain,) = [name for name in STRATEGIES if _plain(name) and f"set fsdp to {name} " in problem.fix]
        assert decide(job(fsdp={"strategy": plain}), facts(world=world)).mesh.world == world
    assert bool(meshes) == any(world % size == 0 for size in range(2, world))


@pytest.mark.parametrize(
    ("strategy", "mesh", "world", "node", "axes", "reshard"),
    [
        ("HYBRID_SHARD", {}, 16, 8, (2, 8, 1), True),
        ("HYBRID_SHARD_ZERO2", {}, 16, 4, (4, 4, 1), False),
        ("HYBRID_SHARD", {"replicate": 2}, 8, None, (2, 4, 1), True),
        ("HYBRID_SHARD", {"shard": 2}, 8, None, (4, 2, 1), True),
        ("HYBRID_SHARD", {"tensor": 2}, 16, 8, (2, 4, 2), True),
        ("HYBRID_SHARD", {"replicate": 2, "shard": 2, "tensor": 2}, 8, None, (2, 2, 2), True),
        ("FULL_SHARD", {"tensor": 4}, 8, None, (1, 2, 4), True),
        ("NO_SHARD", {"tensor": 2}, 8, None, (4, 1, 2), True),
        ("SHARD_GRAD_OP", {"replicate": 1, "shard": 8}, 8, None, (1, 8, 1), False),
    ],
)
def test_what_a_strategy_becomes(strategy, mesh, world, node, axes, reshard):
    plan = decide(job(fsdp={"strategy": strategy}, mesh=mesh), facts(world=world, ranks_per_node=node))
    assert _axes(plan) == axes
    assert plan.reshard_after_forward is reshard


def test_replicas_over_nodes_are_explained():
    plan = decide(job(fsdp={"strategy": "HYBRID_SHARD"}), facts(world=16, ranks_per_node=8))
    assert plan.reasons["mesh"] == "HYBRID_SHARD: shards inside a node of 8 ranks, replicas over nodes"


@pytest.mark.parametrize(
    ("strategy", "mesh", "field", "words"),
    [
        ("FULL_SHARD", {"tensor": 3}, "mesh.tensor", "use 1 or 2 or 4 or 8"),
        ("FULL_SHARD", {"sequence_parallel": True}, "mesh.sequence_parallel", "set mesh.tensor"),
        ("FULL_SHARD", {"shard": 4}, "mesh", "use mesh: {shard: 8}"),
        ("FULL_SHARD", {"shard": 8, "tensor": 2}, "mesh", "use mesh: {shard: 4, tensor: 2}"),
        ("FULL_SHARD", {"replicate": 2}, "mesh.replicate", "set fsdp to HYBRID_SHARD"),
        ("SHARD_GRAD_OP", {"replicate": 2}, "mesh.replicate", "set fsdp to HYBRID_SHARD_ZERO2"),
        ("NO_SHARD", {"shard": 2}, "mesh.shard", "use HYBRID_SHARD"),
        ("NO_SHARD", {"replicate": 4}, "mesh", "use mesh: {replicate: 8}"),
        ("HYBRID_SHARD", {"replicate": 3}, "mesh", "use mesh: {replicate: 4, shard: 2} or {replicate: 2, shard: 4}"),
        ("HYBRID_SHARD", {"replicate": 1}, "mesh", "set fsdp to FULL_SHARD"),
        ("HYBRID_SHARD_ZERO2", {"replicate": 1}, "mesh", "set fsdp to SHARD_GRAD_OP"),
        ("HYBRID_SHARD", {"shard": 1}, "mesh", "set fsdp to NO_SHARD"),
        ("HYBRID_SHARD", {"tensor": 4}, "fsdp", "set fsdp to FULL_SHARD and remove mesh sizes: 2 is not a product"),
    ],
)
def test_refused_meshes(strategy, mesh, field, words):
    problem = refusal(job(fsdp={"strategy": strategy}, mesh=mesh), facts())
    assert problem.field == field
    assert words in problem.fix


@pytest.mark.parametrize(
    ("strategy", "reshard", "words"),
    [
        ("FULL_SHARD", 3, "does not divide the shard axis of 8 ranks; use 2 or 4, or write true"),
        ("FULL_SHARD", 8, "is the whole shard axis of 8 ranks, which true says"),
        ("SHARD_GRAD_OP", 2, "contradicts SHARD_GRAD_OP; remove it, or set fsdp to FULL_SHARD or HYBRID_SHARD"),
        ("SHARD_GRAD_OP", True, "contradicts SHARD_GRAD_OP"),
        ("FULL_SHARD", False, "set fsdp to SHARD_GRAD_OP or HYBRID_SHARD_ZERO2"),
        ("NO_SHARD", 2, "contradicts NO_SHARD"),
    ],
)
def test_refused_resharding(strategy, reshard, words):
    problem = refusal(job(fsdp={"strategy": strategy, "reshard_after_forward": reshard}), facts())
    assert problem.field == "fsdp.reshard_after_forward"
    assert words in str(problem)


@given(shard=st.integers(1, 16), size=st.integers(2, 17))
def test_a_smaller_group_divides_the_shard_axis(shard, size):
    wanted = job(fsdp={"strategy": "FULL_SHARD", "reshard_after_forward": size})
    if size < shard and shard % size == 0:
        assert decide(wanted, facts(world=shard)).reshard_after_forward == size
        return
    sizes = [int(number) for number in re.findall(r"\d+", refusal(wanted, facts(world=shard)).fix)]
    for proper in sizes:
        again = job(fsdp={"strategy": "FULL_SHARD", "reshard_after_forward": proper})
        assert decide(again, facts(world=shard)).reshard_after_forward == proper
    assert bool(sizes) == any(shard % proper == 0 for proper in range(2, shard))


@pytest.mark.parametrize("fields", [{}, {"fsdp": {"strategy": "FULL_SHARD"}}, {"mesh": {"tensor": 8}}])
def test_replicas_are_left_for_last_only_where_there_are_some(fields):
    problem = refusal(job(accumulation="defer_replicate", **fields), facts())
    assert problem.field == "accumulation"
    assert "needs replicas: the mesh is replicate 1 x shard " in problem.reason
    for strategy, mesh in (("HYBRID_SHARD", {"shard": 4}), ("NO_SHARD", {})):
        plan = decide(job(accumulation="defer_replicate", fsdp={"strategy": strategy}, mesh=mesh), facts())
        assert plan.accumulation_mode == "defer_replicate"


@pytest.mark.parametrize(
    ("reshard", "mesh", "strategy"),
    [
        (True, {}, "FULL_SHARD"),
        (4, {}, "FULL_SHARD"),
        (False, {}, "SHARD_GRAD_OP"),
        (None, {"replicate": 2}, "HYBRID_SHARD_ZERO2"),
        (True, {"replicate": 2}, "HYBRID_SHARD"),
        (True, {"shard": 4}, "HYBRID_SHARD"),
        (None, {"replicate": 8}, "NO_SHARD"),
        (None, {"shard": 1}, "NO_SHARD"),
        (None, {"tensor": 8}, "NO_SHARD"),
        (None, {"tensor": 2, "replicate": 2}, "HYBRID_SHARD_ZERO2"),
    ],
)
def test_auto_takes_the_strategy_that_the_other_settings_name(reshard, mesh, strategy):
    plan = decide(job(fsdp={"strategy": "auto", "reshard_after_forward": reshard}, mesh=mesh), facts(world=8))
    assert plan.strategy == strategy
    assert plan.mesh.world == 8


def test_offloaded_parameters_take_the_optimizer_with_them():
    assert decide(job(offload={"parameters": True}), facts()).offload.optimizer
