"""One mesh for all units that stay sharded over fewer ranks, and a release that makes it elsewhere."""

from __future__ import annotations

import pytest
from torch.distributed.fsdp._fully_shard import _fully_shard

from engine.training import make_job, make_plan
from harness.ranks import run_ranks
from shardwise.engine.apply import units
from shardwise.engine.compat import UnsupportedRelease
from shardwise.engine.compat_shard import one_mesh_after_forward
from shardwise.engine.load import load_model
from shardwise.engine.mesh import build_mesh
from shardwise.engine.source import open_source


def _meshes(rank, world, job):
    plan = make_plan(job, world)
    model = load_model(job, plan, open_source(job.model), build_mesh(plan.mesh, "cpu"))
    groups = [group for unit in units(model) for group in unit._get_fsdp_state()._fsdp_param_groups]
    found = [g.post_forward_mesh_info for g in groups if g.post_forward_mesh_info is not g.mesh_info]
    return len([info for info in found if info is not None]), len({id(info) for info in found if info is not None})


def test_all_blocks_share_it(tiny):
    fields = {"fsdp": {"strategy": "FULL_SHARD", "reshard_after_forward": 2}}
    job = make_job(tiny("llama"), global_batch=4, micro_batch=1, **fields)
    blocks, meshes = run_ranks(_meshes, 4, job)[0]
    assert blocks > 1
    assert meshes == 1


def test_nothing_stays():
    before = _fully_shard._get_post_forward_mesh_info
    with one_mesh_after_forward():
        assert _fully_shard._get_post_forward_mesh_info is not before
    assert _fully_shard._get_post_forward_mesh_info is before


def test_a_release_without_it_is_refused(monkeypatch):
    monkeypatch.delattr(_fully_shard, "_get_post_forward_mesh_info")
    with pytest.raises(UnsupportedRelease, match="no _get_post"), one_mesh_after_forward():
        pass
