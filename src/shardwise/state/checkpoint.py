"""Sharded checkpoints: everything a run needs to go on as if it had not stopped.

`<folder>/step-000030/` holds the files of torch.distributed.checkpoint (every rank writes its own shards) and
`checkpoint.json`, written last. The folder gets its name only when it is complete, so a killed save leaves the previous
checkpoint as the newest. What torch's writer has copied from a GPU stays in host memory until the files are written
(`predict.host` counts it).
"""

from __future__ import annotations

import pickle
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load as load_shards
from torch.distributed.checkpoint.state_dict_saver import save as save_shards

from shardwise.report.run_folder import versions
from shardwise.spec.problems import BadInput, Problem
from shardwise.state import folders, live, random_state, together
from shardwise.state.folders import latest, resolve_resume
from shardwise.state.manifest import Contents, Manifest, damaged_files, hash_files, read_manifest

__all__ = ["CheckpointError", "Loaded", "TrainingProgress", "latest", "load", "resolve_resume", "save"]


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read; raised on every rank, with the ranks at fault and their reasons."""


@dataclass(frozen=True, kw_only=True)
class TrainingProgress:
    """How far a run has come, whatever its number of ranks."""

    step: int
    """Optimizer steps taken."""
    samples_seen: int
    """Training rows consumed over all ranks."""


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """What a checkpoint gave back."""

    progress: TrainingProgress
    """Where the run continues."""
    extra: dict[str, Any]
    """What was given to `save` as `extra`."""
    restored: tuple[str, ...]
    """What was restored, for the log."""
    notes: tuple[str, ...]
    """What is not as it was: other number of ranks, random numbers that start anew."""


def save(
    folder: Path,
    *,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    progress: TrainingProgress,
    extra: Mapping[str, object],
    keep: int,
    fingerprint: str = "",
) -> Path:
    """Write `folder/step-<step>`, remove all but the newest `keep` checkpoints, and return the new one.

    Every rank calls it between two steps. Random generators are saved as they are now, per rank.

    Args:
        folder: The run's folder of checkpoints; made when it is not there.
        model: The sharded model.
        optimizer: Its optimizer.
        progress: How far the run has come.
        extra: Further picklable state, equal on all ranks (learning-rate schedule, loss scaler).
        keep: How many complete checkpoints stay, this one included; at least 1.
        fingerprint: Of the plan.

    Raises:
        CheckpointError: on every rank, when one could not write. The previous checkpoints are as they were.
    """
    final = folder / folders.step_name(progress.step)
    staging = folders.staging_for(final)
    task = f"saving step {progress.step} to {folder}"
    contents = live.contents(model, optimizer)
    entries = live.weight_entries(model) | live.optimizer_entries(model, optimizer)
    # Pickled here: torch.distributed.checkpoint would take nested dictionaries apart.
    entries |= {"extra": pickle.dumps(dict(extra)), f"random/{together.rank()}": pickle.dumps(random_state.capture())}
    try:
        together.attempt_on_rank0(task, lambda: _make_room(final), CheckpointError)
        together.attempt(task, lambda: _write(entries, staging), CheckpointError)
        files = together.attempt(task, lambda: hash_files(staging, together.rank(), together.world()), CheckpointError)
        manifest = Manifest(
            step=progress.step,
            samples_seen=progress.samples_seen,
            sequence=1,
            world=together.world(),
            fingerprint=fingerprint,
            versions=versions(),
            contents=contents,
            files={name: described for share in files for name, described in share.items()},
        )
        together.attempt_on_rank0(task, lambda: _publish(manifest, staging, final), CheckpointError)
    except CheckpointError:
        if together.rank() == 0:
            shutil.rmtree(staging, ignore_errors=True)
        together.gather(None)
        raise
    together.attempt_on_rank0("removing old checkpoints", lambda: folders.retain(folder, keep), CheckpointError)
    return final


def load(path: Path, *, model: nn.Module, optimizer: torch.optim.Optimizer) -> Loaded:
    """Restore model, optimizer and random generators in place, bit for bit; every rank calls it.

    The number of ranks and the sharding may differ from those of the save; random generators are then seeded anew,
    which the notes say. The optimizer takes no hidden step.

    Args:
        path: A complete checkpoint folder.
        model: The sharded model, built as for the run that saved.
        optimizer: Its optimizer, with or without state.

    Raises:
        BadInput: no complete checkpoint, or that of another model; nothing has been changed.
        CheckpointError: on every rank, when files are damaged or cannot be read.
    """
    task = f"loading {path}"
    manifest, problem = together.attempt_on_rank0(task, lambda: read_manifest(path), CheckpointError)
    if manifest is None:
        raise BadInput(Problem(field="resume", value=str(path), reason=problem))
    _refuse_other_model(path, manifest.contents, live.contents(model, optimizer))
    together.attempt(task, lambda: _refuse_damage(path, manifest), CheckpointError)

    same_world = manifest.world == together.world()
    generator = f"random/{together.rank() if same_world else 0}"
    entries = live.weight_entries(model) | live.empty_entries(model, optimizer, manifest.contents.optimizer)
    entries |= {"extra": b"", generator: b""}
    together.attempt(task, lambda: _read(entries, path), CheckpointError)
    together.attempt(task, lambda: _install(entries, manifest, model, optimizer), CheckpointError)
    extra = pickle.loads(entries["extra"])
    return Loaded(
        progress=TrainingProgress(step=manifest.step, samples_seen=manifest.samples_seen),
        extra=extra,
        restored=_restored(manifest, extra),
        notes=_restore_generators(pickle.loads(entries[generator]), manifest, same_world),
    )


def _make_room(final: Path) -> None:
    folders.clear_leftovers(final.parent)
    folders.prepare(final)


def _write(entries: dict[str, Any], staging: Path) -> None:
    save_shards(
        entries,
        storage_writer=FileSystemWriter(staging),
        process_group=together.patient_group(),
        no_dist=not dist.is_initialized(),
    )


def _publish(manifest: Manifest, staging: Path, final: Path) -> None:
    numbered = manifest.model_copy(update={"sequence": folders.next_sequence(final.parent)})
    numbered.write(staging)
    folders.publish(staging, final)


def _read(entries: dict[str, Any], path: Path) -> None:
    load_shards(
        entries,
        storage_reader=FileSystemReader(path),
        planner=DefaultLoadPlanner(allow_partial_load=False),
        process_group=together.patient_group(),
        no_dist=not dist.is_initialized(),
    )


def _install(entries: dict[str, Any], manifest: Manifest, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    live.install_entries(model, optimizer, manifest.contents.optimizer, entries)
    if (counts := live.update_counts(optimizer)) != manifest.contents.optimizer.updates:
        raise ValueError(f"update counters are {counts}, the checkpoint has {manifest.contents.optimizer.updates}")


def _refuse_damage(path: Path, manifest: Manifest) -> None:
    damaged = damaged_files(path, manifest, together.rank(), together.world())
    if damaged:
        raise OSError(f"the content of {', '.join(damaged[:3])} is not what was saved")


def _refuse_other_model(path: Path, saved: Contents, here: Contents) -> None:
    different = saved.differences(here)
    if different:
        more = f" (and {len(different) - 3} more)" if len(different) > 3 else ""
        raise BadInput(
            Problem(
                field="resume",
                value=str(path),
                reason="checkpoint of another model: " + "; ".join(different[:3]) + more,
                fix="resume with the configuration that saved it",
            )
        )


def _restore_generators(state: dict[str, Any], manifest: Manifest, same_world: bool) -> tuple[str, ...]:
    if same_world:
        return tuple(random_state.restore(state))
    random_state.reseed(state, together.rank(), together.world())
    return (
        f"saved by {manifest.world} ranks, loaded by {together.world()}: weights and optimizer are equal,"
        " random numbers (dropout) are seeded anew",
    )


def _restored(manifest: Manifest, extra: Mapping[str, object]) -> tuple[str, ...]:
    tensors = sum(len(keys) for keys in manifest.contents.optimizer.state.values())
    counts = ", ".join(str(count) for count in manifest.contents.optimizer.updates) or "none"
    return (
        f"step {manifest.step}, {manifest.samples_seen} samples seen",
        f"{len(manifest.contents.weights)} weights",
        f"{tensors} optimizer tensors, updates taken: {counts}",
        f"further state: {', '.join(sorted(extra)) or 'none'}",
    )
