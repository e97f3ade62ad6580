"""Differences between releases, shown by hiding what another release lacks."""

from __future__ import annotations

import pytest
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

from engine.training import make_job, make_plan
from harness.ranks import run_ranks
from shardwise.engine import compat
from shardwise.engine.apply import units
from shardwise.engine.load import load_model
from shardwise.engine.mesh import build_mesh
from shardwise.engine.source import open_source


def _facts(rank, world, job, hide):
    plan = make_plan(job, world)
    model = load_model(job, plan, open_source(job.model), build_mesh(plan.mesh, "cpu"))
    before = [compat.unit_facts(unit) for unit in units(model)]
    after = []
    for unit in units(model):
        state = unit._get_fsdp_state()
        groups = state._fsdp_param_groups
        del state._fsdp_param_groups  # torch 2.11 has one group, not a list
        if hide == "both":
            with pytest.raises(compat.UnsupportedRelease, match="does not show its parameter group"):
                _without_group(unit)
        else:
            FSDPState._fsdp_param_group = groups[0]
            after.append(compat.unit_facts(unit))
    return before == after if hide == "list" else True


def _without_group(unit):
    kept = FSDPState.__dict__.get("_fsdp_param_group")
    if kept is not None:
        del FSDPState._fsdp_param_group
    try:
        compat.unit_facts(unit)
    finally:
        if kept is not None:
            FSDPState._fsdp_param_group = kept


@pytest.mark.parametrize("hide", ["list", "both"])
def test_a_unit_is_read_back_from_one_group_or_a_list(tiny, hide):
    job = make_job(tiny("llama"), fsdp={"strategy": "FULL_SHARD"}, micro_batch=3)
    assert run_ranks(_facts, 2, job, hide) == [True, True]


def _apply_without(rank, world, job, setter):
    delattr(FSDPModule, setter)
    plan = make_plan(job, world)
    with pytest.raises(compat.UnsupportedRelease, match=setter):
        load_model(job, plan, open_source(job.model), build_mesh(plan.mesh, "cpu"))
    return True


@pytest.mark.parametrize("setter", ["set_gradient_divide_factor", "set_force_sum_reduction_for_comms"])
def test_a_missing_setter_is_an_error_not_an_average(tiny, setter):
    job = make_job(tiny("llama"), fsdp={"strategy": "FULL_SHARD"}, micro_batch=3)
    assert run_ranks(_apply_without, 2, job, setter) == [True, True]
