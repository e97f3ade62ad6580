"""Named clusters: previewed anywhere, trained only where their cards are."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from harness.runs import write_rows
from shardwise.catalogue.cards import gpu
from shardwise.catalogue.cluster_file import write_cluster
from shardwise.machine import detect as module
from shardwise.machine.detect import detect, detect_cluster, host_bytes, host_cores, planned_devices
from shardwise.machine.prepare import preview
from shardwise.spec.job import Job
from shardwise.spec.problems import BadInput

GIB = 2**30


def job(cluster, **fields):
    return Job.model_validate(
        {"model": {"path": "m"}, "data": {"path": "d.jsonl"}, "cluster": cluster, "fsdp": {"strategy": "FULL_SHARD"}}
        | fields
    )


@pytest.fixture
def has(monkeypatch):
    """Return `has(count, name, gib)`: from now on this machine has these GPUs."""
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)

    def install(count, name="", gib=0.0):
        found = SimpleNamespace(name=name, total_memory=round(gib * GIB))
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: found)

    install(0)
    return install


def refusal(cluster, nproc=None):
    with pytest.raises(BadInput) as caught:
        detect(job(cluster), nproc)
    (problem,) = caught.value.problems
    assert problem.field == "cluster"
    return str(problem)


def test_no_gpu_here(has):
    assert "needs 8 x A10, and this machine has no GPU" in refusal("8xA10")


def test_another_number_of_gpus(has):
    has(4, "NVIDIA A10", 22.06)
    assert "needs 8 x A10, and this machine has 4: NVIDIA A10" in refusal("8xA10")


@pytest.mark.parametrize(
    ("name", "gib", "words"),
    [
        ("NVIDIA A10G", 22.06, "has NVIDIA A10G (22.1 GiB), which is A10G in the catalogue"),
        ("NVIDIA A100-SXM4-80GB", 79.2, "which is A100-SXM-80GB in the catalogue"),
        ("NVIDIA GeForce GTX 1080", 8.0, "has NVIDIA GeForce GTX 1080 (8.0 GiB), which is not in the catalogue"),
    ],
)
def test_another_card(has, name, gib, words):
    has(8, name, gib)
    assert words in refusal("8xA10")


def test_the_same_card_with_other_memory(has):
    has(2, "NVIDIA A100-SXM4-40GB", 39.5)
    assert "which is A100-SXM-40GB in the catalogue" in refusal("2xA100-80GB")
    has(2, "NVIDIA GeForce RTX 4090", 47.4)
    assert "which is RTX-4090-48GB in the catalogue" in refusal("2x4090")


def test_the_named_cards_are_here(has):
    has(8, "NVIDIA A10", 22.06)
    found = detect(job("8xA10"))
    assert (found.device_type, found.world, found.per_node) == ("cuda", 8, 8)
    assert found.backend == "cpu:gloo,cuda:nccl"


def test_several_machines_need_torchrun(has, monkeypatch):
    has(8, "NVIDIA H100 80GB HBM3", 79.2)
    assert "has 2 machines" in refusal("2x8xH100")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert "torchrun has started 4 on this one" in refusal("2x8xH100", nproc=16)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    found = detect(job("2x8xH100"), nproc=16)
    assert (found.world, found.per_node) == (16, 8)


@pytest.mark.parametrize("cluster", ["8xA10", "2xcpu"])
def test_another_number_of_ranks(has, cluster):
    has(8, "NVIDIA A10", 22.06)
    assert f"'{cluster}': contradicts 3 ranks" in refusal(cluster, nproc=3)


def test_cpu_processes_need_nothing(has):
    has(8, "NVIDIA A10", 22.06)
    found = detect(job("3xcpu"))
    assert (found.device_type, found.world, found.per_node) == ("cpu", 3, None)


@pytest.mark.parametrize(("cluster", "words"), [("8xA11", "did you mean 'A10'?"), ("8xa100", "A100-SXM-40GB")])
def test_unknown_cards(has, cluster, words):
    assert words in refusal(cluster)
    with pytest.raises(BadInput):
        planned_devices(job(cluster))


def test_a_preview_is_of_the_named_cluster(has, tiny):
    cluster = "2x4xH100-SXM-80GB ib-8x400"
    seen = preview(job(cluster, model={"path": str(tiny("llama"))}, fsdp={"strategy": "HYBRID_SHARD"}))
    assert (seen.devices.device_type, seen.devices.world) == ("cuda", 8)
    assert (seen.plan.mesh.replicate, seen.plan.mesh.shard) == (2, 4)
    assert seen.plan.optimizer_implementation == "fused"
    assert seen.devices.why == "cluster: H100-SXM-80GB"
    with pytest.raises(BadInput, match="contradicts 2 ranks"):
        preview(job(cluster, model={"path": str(tiny("llama"))}), nproc=2)


def test_a_preview_without_the_model_knows_the_machines(has, tmp_path):
    seen = preview(job("3x8xA10", model={"path": str(tmp_path / "absent")}, fsdp={"strategy": "HYBRID_SHARD"}))
    assert (seen.plan.mesh.replicate, seen.plan.mesh.shard) == (3, 8)


def test_training_is_refused_before_anything_is_written(has, tiny, tmp_path):
    from harness.runs import make_run

    write_rows(tmp_path / "rows.jsonl", 9)
    with pytest.raises(BadInput, match="this machine has no GPU"):
        make_run(tmp_path, tiny("llama"), cluster="8xA10")
    assert [path.name for path in tmp_path.iterdir()] == ["rows.jsonl"]


def test_this_machine_as_a_cluster(has, monkeypatch):
    here = detect_cluster()
    assert here.gpu is None
    assert here.name == f"{here.per_node}xcpu"
    assert here.host_bytes == host_bytes() > GIB
    assert here.host_cores == host_cores() > 0
    has(4, "NVIDIA A10", 21.5)
    here = detect_cluster()
    assert (here.name, here.world, here.gpu.name) == ("4xA10", 4, "A10")
    assert here.gpu.usable.bytes == round(21.5 * GIB)
    assert here.gpu.usable.bytes < gpu("A10").usable.bytes
    assert here.gpu.link == "pcie"
    has(2, "NVIDIA GeForce GTX 1080", 8)
    here = detect_cluster()
    assert (here.gpu.name, here.gpu.link) == ("NVIDIA GeForce GTX 1080", None)


def test_a_container_has_less(monkeypatch, tmp_path):
    limit = tmp_path / "memory.max"
    monkeypatch.setattr(module, "_GROUP_LIMIT", limit)
    limit.write_text("1234567\n")
    assert host_bytes() == 1234567
    limit.write_text("max\n")
    assert host_bytes() > GIB
    limit.unlink()
    assert host_bytes() > GIB


def test_cores_are_physical_and_those_of_a_container(monkeypatch, tmp_path):
    """96 threads on 48 cores; a container may run on 40 threads, or for 2.5 cores' time, which needs 3."""
    monkeypatch.setattr(module.psutil, "cpu_count", lambda logical: 96 if logical else 48)
    monkeypatch.setattr(module.os, "sched_getaffinity", lambda process: set(range(96)), raising=False)
    share = tmp_path / "cpu.max"
    monkeypatch.setattr(module, "_GROUP_CORES", share)
    assert host_cores() == 48
    monkeypatch.setattr(module.os, "sched_getaffinity", lambda process: set(range(40)), raising=False)
    assert host_cores() == 40
    share.write_text("max 100000\n")
    assert host_cores() == 40
    share.write_text("250000 100000\n")
    assert host_cores() == 3


def test_a_card_of_a_file_need_not_be_in_the_catalogue(has, tmp_path):
    """The file of a probe on this machine; here it may be trained on, elsewhere it may not."""
    has(2, "NVIDIA GeForce GTX 1080", 8)
    path = tmp_path / "here.yaml"
    write_cluster(detect_cluster(), path)
    found = detect(job(str(path)))
    assert (found.device_type, found.world) == ("cuda", 2)
    has(2, "NVIDIA A10", 21.5)
    assert "which is A10 in the catalogue" in refusal(str(path))
