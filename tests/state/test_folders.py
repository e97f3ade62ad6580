"""Which checkpoints are usable, which is the newest, what `resume` means."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from shardwise.spec.problems import BadInput
from shardwise.state import folders
from shardwise.state.folders import latest, resolve_resume, survey
from shardwise.state.manifest import Contents, Manifest, OptimizerInfo, TensorInfo, hash_files


def make(folder: Path, step: int, sequence: int | None = None) -> Path:
    """Write a complete checkpoint with made-up content."""
    path = folder / f"step-{step:06d}"
    path.mkdir(parents=True)
    (path / "__0_0.distcp").write_bytes(b"x" * (step + 1))
    (path / ".metadata").write_bytes(b"m")
    manifest = Manifest(
        step=step,
        samples_seen=step,
        sequence=folders.next_sequence(folder) if sequence is None else sequence,
        world=1,
        fingerprint="",
        versions={},
        contents=contents(),
        files=hash_files(path, 0, 1),
    )
    manifest.write(path)
    return path


def contents(**changes) -> Contents:
    """Return the description of a small model."""
    weight = TensorInfo(shape=(2, 3), dtype="float32")
    optimizer = OptimizerInfo(name="AdamW", groups=(("a", "b"),), state={"a": {"exp_avg": weight}}, updates=(1,))
    base = Contents(weights={"a": weight, "b": weight}, frozen_tensors=1, frozen_elements=7, optimizer=optimizer)
    return base.model_copy(update=changes)


def delete_manifest(path: Path) -> None:
    (path / "checkpoint.json").unlink()


def cut_manifest(path: Path) -> None:
    text = (path / "checkpoint.json").read_text()
    (path / "checkpoint.json").write_text(text[: len(text) // 2])


def truncate_shard(path: Path) -> None:
    (path / "__0_0.distcp").write_bytes(b"x")


def delete_metadata(path: Path) -> None:
    (path / ".metadata").unlink()


BREAKS = [
    (delete_manifest, "its save did not finish"),
    (cut_manifest, "checkpoint.json cannot be read"),
    (truncate_shard, "__0_0.distcp has 1 bytes instead of 21"),
    (delete_metadata, ".metadata is missing"),
]


def test_nothing_there(tmp_path):
    assert latest(tmp_path) is None
    assert latest(tmp_path / "missing") is None
    assert survey(tmp_path / "missing") == []


@pytest.mark.parametrize(("damage", "told"), BREAKS)
def test_damaged_one_is_passed_over_and_said(tmp_path, damage, told):
    first, second = make(tmp_path, 10), make(tmp_path, 20)
    assert latest(tmp_path) == second
    damage(second)
    assert latest(tmp_path) == first
    assert resolve_resume("auto", tmp_path) == first
    good, bad = survey(tmp_path)
    assert good.path == first
    assert bad.path == second
    assert told in bad.problem


def test_half_written_one_is_invisible(tmp_path):
    first = make(tmp_path, 10)
    shutil.copytree(first, tmp_path / ".tmp-step-000020")
    assert latest(tmp_path) == first
    assert len(survey(tmp_path)) == 1


def test_the_newest_is_the_last_saved_not_the_highest_step(tmp_path):
    make(tmp_path, 50)
    make(tmp_path, 60)
    again = make(tmp_path, 40)
    assert latest(tmp_path) == again
    assert folders.retain(tmp_path, 2) == [tmp_path / "step-000050"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000040", "step-000060"]


def test_retention_counts_and_removes_usable_ones_only(tmp_path):
    paths = [make(tmp_path, step) for step in (10, 20, 30)]
    truncate_shard(paths[2])
    assert folders.retain(tmp_path, 2) == []
    assert folders.retain(tmp_path, 1) == [paths[0]]
    assert survey(tmp_path)[1].path == paths[2]


def test_leftovers(tmp_path):
    replaced, kept = make(tmp_path, 10), make(tmp_path, 20)
    shutil.copytree(kept, tmp_path / ".tmp-step-000030")
    shutil.copytree(kept, tmp_path / ".old-step-000020")
    replaced.rename(tmp_path / ".old-step-000010")
    (tmp_path / ".tmp-mine").mkdir()
    folders.clear_leftovers(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".tmp-mine", "step-000010", "step-000020"]


def test_publish_replaces_a_folder_of_the_same_name(tmp_path):
    old = make(tmp_path, 10)
    staging = folders.prepare(old)
    (staging / "new").write_text("")
    folders.publish(staging, old)
    assert [path.name for path in tmp_path.iterdir()] == [old.name]
    assert [path.name for path in old.iterdir()] == ["new"]


def test_resume_values(tmp_path):
    path = make(tmp_path / "run" / "checkpoints", 10)
    checkpoints = path.parent
    assert resolve_resume("never", checkpoints) is None
    assert resolve_resume("auto", checkpoints) == path
    assert resolve_resume("auto", tmp_path / "fresh" / "checkpoints") is None
    assert resolve_resume(str(path), tmp_path / "elsewhere") == path
    assert resolve_resume("step-000010", checkpoints) == path


def test_resume_from_what_is_not_a_checkpoint_lists_the_usable_ones(tmp_path):
    first, second = make(tmp_path, 10), make(tmp_path, 20)
    with pytest.raises(BadInput, match="does not exist") as caught:
        resolve_resume(str(tmp_path / "step-000011"), tmp_path)
    assert f"allowed: never, auto, {second}, {first}" in str(caught.value)
    assert "did you mean" in str(caught.value)
    truncate_shard(second)
    with pytest.raises(BadInput, match=r"__0_0\.distcp has 1 bytes instead of 21") as caught:
        resolve_resume(str(second), tmp_path)
    assert f"allowed: never, auto, {first};" in str(caught.value)
    with pytest.raises(BadInput, match=r"has no checkpoint\.json") as caught:
        resolve_resume(str(tmp_path), tmp_path / "other")
    assert str(first) in str(caught.value)


def test_auto_refuses_a_silent_fresh_start_over_damaged_checkpoints(tmp_path):
    delete_manifest(make(tmp_path, 10))
    with pytest.raises(BadInput, match=r"no checkpoint is usable: step-000010 has no checkpoint\.json"):
        resolve_resume("auto", tmp_path)


def test_differences_are_named(tmp_path):
    saved = contents()
    assert saved.differences(contents()) == []
    other = TensorInfo(shape=(4, 3), dtype="bfloat16")
    here = contents(weights={"a": other, "c": saved.weights["a"]}, frozen_elements=8)
    assert saved.differences(here) == [
        "a: float32 [2, 3] in the checkpoint, bfloat16 [4, 3] here",
        "b: float32 [2, 3] in the checkpoint, missing here",
        "c: missing in the checkpoint, float32 [2, 3] here",
        "frozen elements: 7 in the checkpoint, 8 here",
    ]
    regrouped = saved.optimizer.model_copy(update={"groups": (("a",), ("b",))})
    assert saved.differences(contents(optimizer=regrouped)) == [
        "optimizer: other groups of parameters in the checkpoint"
    ]


@pytest.mark.slow
def test_resume_is_resolved_without_torch():
    code = "import sys, shardwise.state.folders; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
