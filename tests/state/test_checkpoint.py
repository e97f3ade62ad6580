"""Save and load on several ranks."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from harness.ranks import run_ranks
from shardwise.spec.problems import BadInput
from shardwise.state import checkpoint
from shardwise.state.checkpoint import CheckpointError, TrainingProgress, latest, load, save

from .sharded import adamw, assert_same, build, everything, step


def save_at(folder: Path, model, optimizer, at: int, keep: int = 2, **extra) -> Path:
    progress = TrainingProgress(step=at, samples_seen=4 * at)
    return save(folder, model=model, optimizer=optimizer, progress=progress, extra=extra, keep=keep, fingerprint="f00d")


def train_and_save(rank, world, source, folder, options, steps=3, at=3):
    """Take some steps, save, and return everything."""
    model = build(source, **options)
    optimizer = adamw(model)
    for index in range(steps):
        step(model, optimizer, index, rank, world)
    save_at(folder, model, optimizer, at)
    return everything(model, optimizer)


@pytest.mark.parametrize(
    ("world", "family", "tied", "options"),
    [
        (1, "llama", False, {}),
        (2, "llama", False, {}),
        (2, "llama", True, {"wrapped": True}),
        (2, "qwen2", True, {"reshard": False}),
        (1, "llama", True, {"lora": True, "dropout": 0.3}),
        (2, "llama", False, {"lora": True, "dropout": 0.3, "wrapped": True}),
        (4, "qwen2", True, {"lora": True, "dropout": 0.3, "rank_of_lora": 1}),
        (2, "llama", False, {"lora": True, "dtype": torch.bfloat16, "replicate": True}),
    ],
)
def test_resumed_run_is_bitwise_the_uninterrupted_one(tiny, tmp_path, world, family, tied, options):
    def body(rank, world, source, folder):
        torch.manual_seed(7 + rank)
        model = build(source, **options)
        optimizer = adamw(model)
        for index in range(3):
            step(model, optimizer, index, rank, world)
        save_at(folder, model, optimizer, 3, scheduler={"last": 3})
        losses = [step(model, optimizer, index, rank, world) for index in range(3, 6)]
        expected = everything(model, optimizer)

        torch.manual_seed(999)
        model = build(source, **options)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.add_(1.0)
        optimizer = adamw(model)
        loaded = load(latest(folder), model=model, optimizer=optimizer)
        assert loaded.progress == TrainingProgress(step=3, samples_seen=12)
        assert loaded.extra == {"scheduler": {"last": 3}}
        assert loaded.notes == ()
        assert "updates taken: 3" in " ".join(loaded.restored)
        assert [step(model, optimizer, index, rank, world) for index in range(3, 6)] == losses
        assert_same(everything(model, optimizer), expected)
        assert int(next(iter(optimizer.state.values()))["step"]) == 6

    run_ranks(body, world, tiny(family, tied=tied, layers=2), tmp_path)


@pytest.mark.parametrize("implementation", [{"fused": True}, {"foreach": True, "amsgrad": True}])
def test_load_takes_no_hidden_step_and_keeps_the_live_implementation(tiny, tmp_path, implementation):
    def body(rank, world, source, folder):
        model = build(source)
        optimizer = adamw(model, foreach=False, amsgrad="amsgrad" in implementation)
        step(model, optimizer, 0, rank, world)
        save_at(folder, model, optimizer, 1)
        before = everything(model, optimizer)
        fresh = adamw(model, **implementation)
        load(latest(folder), model=model, optimizer=fresh)
        assert_same(everything(model, fresh), before)
        assert all(int(state["step"]) == 1 for state in fresh.state.values())
        assert all(group["lr"] == 1e-2 for group in fresh.param_groups)
        assert bool(fresh.param_groups[0]["fused"]) == ("fused" in implementation)
        step(model, fresh, 1, rank, world)

    run_ranks(body, 2, tiny("llama", layers=2), tmp_path)


@pytest.mark.parametrize(("worlds", "lora"), [((2, 4), False), ((2, 4), True), ((2, 1), True), ((1, 2), False)])
def test_another_number_of_ranks_gets_equal_weights_and_optimizer(tiny, tmp_path, worlds, lora):
    options = {"lora": lora, "rank_of_lora": 3}

    def reload(rank, world, source, folder):
        model = build(source, **options, replicate=world == 4)
        optimizer = adamw(model)
        torch.manual_seed(0)
        loaded = load(latest(folder), model=model, optimizer=optimizer)
        assert f"saved by {worlds[0]} ranks, loaded by {world}" in loaded.notes[0]
        return everything(model, optimizer), torch.rand(1).item(), random.random(), np.random.rand()

    source = tiny("llama", layers=2)
    saved = run_ranks(train_and_save, worlds[0], source, tmp_path, options)[0]
    results = run_ranks(reload, worlds[1], source, tmp_path)
    for result in results:
        assert_same(result[0], saved)
    assert len({result[1] for result in results}) == worlds[1], "every rank draws its own numbers"
    if worlds[1] == 1:
        again = run_ranks(reload, worlds[1], source, tmp_path)
        assert [result[1:] for result in again] == [result[1:] for result in results], "seeding anew is repeatable"


def test_random_generators_of_every_rank_come_back(tiny, tmp_path):
    def draw():
        return torch.rand(3).tolist(), random.random(), np.random.rand()

    def body(rank, world, source, folder):
        torch.manual_seed(rank)
        random.seed(rank)
        np.random.seed(rank)
        model = build(source, lora=True)
        optimizer = adamw(model)
        draw()
        save_at(folder, model, optimizer, 1)
        expected = draw()
        load(latest(folder), model=model, optimizer=optimizer)
        assert draw() == expected
        return expected

    first, second = run_ranks(body, 2, tiny("llama", layers=2), tmp_path)
    assert first != second


def test_only_what_trains_is_saved(tiny, tmp_path):
    run_ranks(train_and_save, 2, tiny("llama", layers=2), tmp_path / "lora", {"lora": True, "wrapped": True})
    run_ranks(train_and_save, 2, tiny("llama", layers=2), tmp_path / "full", {})
    lora, whole = (json.loads((latest(tmp_path / kind) / "checkpoint.json").read_text()) for kind in ("lora", "full"))
    assert len(lora["contents"]["weights"]) == 28
    assert all(".lora_" in name and "_checkpoint_wrapped_module" not in name for name in lora["contents"]["weights"])
    assert lora["contents"]["frozen_tensors"] == 21
    assert len(whole["contents"]["weights"]) == 21
    assert whole["contents"]["weights"]["model.embed_tokens.weight"] == {"shape": [101, 64], "dtype": "float32"}
    assert whole["contents"]["optimizer"]["updates"] == [3]
    assert whole["step"] == 3
    assert whole["samples_seen"] == 12
    assert whole["fingerprint"] == "f00d"
    assert whole["world"] == 2
    assert whole["versions"]["torch"].startswith("2.")
    on_disk = {path.name for path in latest(tmp_path / "full").iterdir()}
    assert on_disk == {*whole["files"], "checkpoint.json"}


def test_rank_specific_values_all_come_back(tiny, tmp_path):
    """Every rank's slice is in the checkpoint, not rank 0's alone."""

    def body(rank, world, source, folder):
        model = build(source, lora=True)
        optimizer = adamw(model)
        trained = [p for p in model.parameters() if p.requires_grad]
        with torch.no_grad():
            for parameter in trained:
                parameter.to_local().fill_(rank + 1)
        save_at(folder, model, optimizer, 1)
        with torch.no_grad():
            for parameter in trained:
                parameter.to_local().zero_()
        load(latest(folder), model=model, optimizer=optimizer)
        assert all((parameter.to_local() == rank + 1).all() for parameter in trained)

    run_ranks(body, 2, tiny("llama", layers=2), tmp_path)


def test_saving_after_an_evaluation_with_weights_left_gathered(tiny, tmp_path):
    def body(rank, world, source, folder):
        model = build(source, reshard=False)
        optimizer = adamw(model)
        step(model, optimizer, 0, rank, world)
        with torch.no_grad():
            model(input_ids=torch.ones(1, 4, dtype=torch.long))
        save_at(folder, model, optimizer, 1)
        before = everything(model, optimizer)
        with torch.no_grad():
            model(input_ids=torch.ones(1, 4, dtype=torch.long))
        fresh = adamw(model) if world == 0 else optimizer
        load(latest(folder), model=model, optimizer=fresh)
        assert_same(everything(model, fresh), before)
        step(model, optimizer, 1, rank, world)

    run_ranks(body, 2, tiny("llama", layers=2), tmp_path)


def test_no_process_group_is_needed(tiny, tmp_path):
    def body(rank, world, source, folder):
        model = build(source, lora=True)
        dist.destroy_process_group()
        optimizer = adamw(model)
        save_at(folder, model, optimizer, 1)
        return load(latest(folder), model=model, optimizer=optimizer).progress.step

    assert run_ranks(body, 1, tiny("llama", layers=2), tmp_path) == [1]


def test_retention_keeps_the_newest_saves(tiny, tmp_path):
    def body(rank, world, source, folder):
        model = build(source, lora=True)
        optimizer = adamw(model)
        kept = []
        for at in (10, 20, 30, 20, 5):
            path = save_at(folder, model, optimizer, at, keep=2)
            assert path == folder / f"step-{at:06d}" == latest(folder)
            kept.append(sorted(int(one.name[5:]) for one in folder.iterdir()))
            dist.barrier()  # the next save begins with a folder of another name
        return kept

    kept = run_ranks(body, 2, tiny("llama", layers=2), tmp_path / "deep" / "down")[0]
    assert kept == [[10], [10, 20], [20, 30], [20, 30], [5, 20]]


def test_killed_in_the_middle_of_a_save_leaves_the_previous_one(tiny, tmp_path):
    def body(rank, world, source, folder):
        model = build(source, lora=True)
        optimizer = adamw(model)
        save_at(folder, model, optimizer, 1)
        write = FileSystemWriter.write_data

        def dies(self, plan, planner):
            done = write(self, plan, planner)
            if rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            return done

        FileSystemWriter.write_data = dies
        save_at(folder, model, optimizer, 2)

    with pytest.raises(AssertionError, match="rank 1 of 2 failed:\ndied"):
        run_ranks(body, 2, tiny("llama", layers=2), tmp_path)
    assert (tmp_path / ".tmp-step-000002").is_dir()
    assert latest(tmp_path) == tmp_path / "step-000001"


@pytest.mark.parametrize(("where", "failing"), [("write_data", 0), ("write_data", 1), ("hash_files", 1), ("finish", 0)])
def test_failed_write_on_one_rank_is_an_error_on_all(tiny, tmp_path, where, failing):
    def body(rank, world, source, folder):
        model = build(source, lora=True)
        optimizer = adamw(model)
        save_at(folder, model, optimizer, 1)

        def full_disk(*args, **options):
            raise OSError(28, "No space left on device")

        owner = FileSystemWriter if where != "hash_files" else checkpoint
        if rank == failing:
            setattr(owner, where, full_disk)
        with pytest.raises(CheckpointError) as caught:
            save_at(folder, model, optimizer, 2)
        assert sorted(path.name for path in folder.iterdir()) == ["step-000001"]
        load(latest(folder), model=model, optimizer=optimizer)
        return str(caught.value)

    messages = run_ranks(body, 2, tiny("llama", layers=2), tmp_path)
    assert messages[0] == messages[1]
    assert messages[0].startswith("saving step 2 to ")
    assert f"rank {failing}: OSError: [Errno 28] No space left on device" in messages[0]
    assert messages[0].count("No space left") == 1


def test_unwritable_folder(tiny, tmp_path):
    def body(rank, world, source, folder):
        model = build(source, lora=True)
        with pytest.raises(CheckpointError, match=r"rank 0: (NotADirectory|FileExists)Error"):
            save_at(folder, model, adamw(model), 1)

    (tmp_path / "file").write_text("")
    run_ranks(body, 2, tiny("llama", layers=2), tmp_path / "file" / "checkpoints")


@pytest.fixture(scope="module")
def lora_checkpoint(tiny, tmp_path_factory) -> Path:
    """A checkpoint of two ranks, LoRA of rank 4 on an untied Llama; not to be changed."""
    folder = tmp_path_factory.mktemp("lora")
    run_ranks(train_and_save, 2, tiny("llama", layers=2), folder, {"lora": True}, 1, 1)
    return latest(folder)


def test_flipped_byte_is_an_error_on_all_ranks_before_anything_changes(tiny, tmp_path, lora_checkpoint):
    copy = shutil.copytree(lora_checkpoint, tmp_path / "copy")
    content = bytearray((copy / "__1_0.distcp").read_bytes())
    content[len(content) // 2] ^= 1
    (copy / "__1_0.distcp").write_bytes(content)

    def body(rank, world, source):
        model = build(source, lora=True)
        optimizer = adamw(model)
        before = everything(model, optimizer)
        with pytest.raises(CheckpointError, match=r"content of __1_0.distcp is not what was saved"):
            load(copy, model=model, optimizer=optimizer)
        assert_same(everything(model, optimizer), before)

    run_ranks(body, 2, tiny("llama", layers=2))


@pytest.mark.parametrize(
    ("family", "tied", "options", "told"),
    [
        ("llama", False, {"lora": True, "rank_of_lora": 8}, r"lora_A.default.weight: float32 \[4, 64\] in the ch"),
        ("llama", False, {}, "in the checkpoint, missing here"),
        ("llama", True, {"lora": True}, "frozen elements: .* in the checkpoint, .* here"),
        ("qwen2", False, {"lora": True}, "frozen elements"),
    ],
)
def test_checkpoint_of_another_model_is_refused_before_anything_changes(
    tiny, lora_checkpoint, family, tied, options, told
):
    def body(rank, world, source):
        model = build(source, **options)
        optimizer = adamw(model)
        before = everything(model, optimizer)
        with pytest.raises(BadInput, match=f"checkpoint of another model: .*{told}") as caught:
            load(lora_checkpoint, model=model, optimizer=optimizer)
        assert str(caught.value).count("; ") <= 4
        assert_same(everything(model, optimizer), before)

    run_ranks(body, 2, tiny(family, tied=tied, layers=2))


def test_other_optimizer_is_refused(tiny, lora_checkpoint):
    def body(rank, world, source):
        model = build(source, lora=True)
        trained = [p for p in model.parameters() if p.requires_grad]
        with pytest.raises(BadInput, match="optimizer: AdamW in the checkpoint, SGD here"):
            load(lora_checkpoint, model=model, optimizer=torch.optim.SGD(trained))
        with pytest.raises(BadInput, match="other groups of parameters"):
            load(lora_checkpoint, model=model, optimizer=torch.optim.AdamW(trained[::-1]))

    run_ranks(body, 1, tiny("llama", layers=2))


def test_incomplete_checkpoint_is_refused(tiny, tmp_path, lora_checkpoint):
    copy = shutil.copytree(lora_checkpoint, tmp_path / "copy")
    (copy / "checkpoint.json").unlink()

    def body(rank, world, source):
        model = build(source, lora=True)
        with pytest.raises(BadInput, match="its save did not finish"):
            load(copy, model=model, optimizer=adamw(model))

    run_ranks(body, 2, tiny("llama", layers=2))
