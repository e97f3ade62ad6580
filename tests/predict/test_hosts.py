"""Bytes between two hosts by formula, against the counters of their interfaces."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from engine.training import make_job, make_plan
from shardwise.predict.wire import between_hosts
from shardwise.spec.collectives import Collectives
from shardwise.trials.lab import Lab
from trials.conditions import needs_lab

pytestmark = [needs_lab, pytest.mark.slow]

FULL = {"fsdp": {"strategy": "FULL_SHARD"}}
GRAD_OP = {"fsdp": {"strategy": "SHARD_GRAD_OP"}}
HYBRID = {"fsdp": {"strategy": "HYBRID_SHARD"}, "mesh": {"replicate": 2, "shard": 2}}
TENSOR = {**FULL, "mesh": {"shard": 2, "tensor": 2}}
REPLICAS = {"fsdp": {"strategy": "NO_SHARD"}}


@pytest.mark.parametrize(
    ("ranks_per_host", "choices"),
    [(1, [FULL, GRAD_OP, REPLICAS]), (2, [FULL, GRAD_OP, HYBRID, TENSOR])],
    ids=["1x2", "2x2"],
)
def test_what_crosses_between_hosts_within_5_percent(tiny, tmp_path, ranks_per_host, choices):
    world = 2 * ranks_per_host
    folder = tiny(layers=2, vocab=4000, heads=4, kv=2)
    jobs = [make_job(folder, micro_batch=1, global_batch=world, **choice) for choice in choices]
    (tmp_path / "jobs").write_text("\n".join(job.model_dump_json() for job in jobs))
    script = [str(Path(__file__).with_name("host_steps.py")), str(tmp_path / "jobs")]
    with Lab(mbit_per_s=None) as lab:
        factor = lab.header_factor()
        outputs = lab.torchrun(script, ranks_per_host=ranks_per_host, timeout_s=240)
    by_host = [[json.loads(line) for line in output.stdout.splitlines()] for output in outputs]
    hosts = [rank // ranks_per_host for rank in range(world)]
    for job, *seen in zip(jobs, *by_host, strict=True):
        counted = Collectives.model_validate_json(json.dumps(seen[0]["collectives"]))
        crossing = between_hosts(counted, make_plan(job, world).mesh, hosts)
        predicted = sum(traffic.on_wire(factor) for traffic in crossing.values())
        sent = sum(host["sent"] for host in seen)
        assert predicted == pytest.approx(sent, rel=0.05)
        assert crossing[0, 1].payload_bytes == pytest.approx(crossing[1, 0].payload_bytes)
