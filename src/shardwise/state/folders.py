"""Folders of checkpoints: which are usable, which is the newest, which may go. Nothing here imports torch."""

from __future__ import annotations

import contextlib
import shutil
from dataclasses import dataclass
from pathlib import Path

from shardwise.spec.problems import BadInput, Problem, did_you_mean
from shardwise.state.manifest import Manifest, read_manifest, sync

_STEP = "step-"
_STAGING = ".tmp-"
_REPLACED = ".old-"


@dataclass(frozen=True, kw_only=True)
class Found:
    """One `step-...` folder."""

    path: Path
    """The folder."""
    manifest: Manifest | None
    """What it holds; None when it is not usable."""
    problem: str
    """Why it is not usable; empty when it is."""


def step_name(step: int) -> str:
    """Return the folder name of a step: `step-000030`."""
    return f"{_STEP}{step:06d}"


def staging_for(folder: Path) -> Path:
    """Return the hidden sibling in which `folder` is written before it is renamed."""
    return folder.with_name(_STAGING + folder.name)


def survey(folder: Path) -> list[Found]:
    """Return all checkpoints of a folder, usable ones newest first, then the unusable ones with the reason."""
    found = []
    for path in sorted(folder.glob(_STEP + "*")) if folder.is_dir() else []:
        manifest, problem = read_manifest(path)
        found.append(Found(path=path, manifest=manifest, problem=problem))
    return sorted(found, key=lambda one: one.manifest.sequence if one.manifest else -1, reverse=True)


def latest(folder: Path) -> Path | None:
    """Return the newest complete checkpoint (all files there, with the sizes of its manifest), or None."""
    usable = [one.path for one in survey(folder) if one.manifest]
    return usable[0] if usable else None


def resolve_resume(value: str, checkpoints: Path) -> Path | None:
    """Return the checkpoint that a job's `resume` means; None: start from the beginning.

    Args:
        value: `never`, `auto` (the newest usable one; none at all is a fresh start), or a checkpoint folder, as a
            path or as a name inside `checkpoints`.
        checkpoints: The run's folder of checkpoints; it need not exist.

    Raises:
        BadInput: the given folder is not a complete checkpoint; or `auto` finds only unusable ones, where a silent
            fresh start would throw away work.
    """
    if value == "never":
        return None
    if value == "auto":
        return _newest_or_refuse(checkpoints)
    given = Path(value).expanduser()
    path = checkpoints / value if not given.exists() and (checkpoints / value).is_dir() else given
    manifest, problem = read_manifest(path)
    if manifest is not None:
        return path
    usable = [one.path for one in survey(checkpoints) if one.manifest] + [
        one.path for one in survey(path) if one.manifest
    ]
    raise BadInput(
        Problem(
            field="resume",
            value=value,
            reason=problem if path.exists() else "does not exist",
            allowed=", ".join(["never", "auto", *(str(one) for one in usable[:5])]),
            fix=did_you_mean(str(path), [str(one) for one in usable]),
        )
    )


def _newest_or_refuse(checkpoints: Path) -> Path | None:
    found = survey(checkpoints)
    if not found or found[0].manifest:
        return found[0].path if found else None
    raise BadInput(
        Problem(
            field="resume",
            value="auto",
            reason="no checkpoint is usable: " + "; ".join(f"{one.path.name} {one.problem}" for one in found[:3]),
            fix=f"use 'never' to start again, or remove them from {checkpoints}",
        )
    )


def next_sequence(folder: Path) -> int:
    """Return the sequence number of the next save into `folder`."""
    return 1 + max((one.manifest.sequence for one in survey(folder) if one.manifest), default=0)


def clear_leftovers(folder: Path) -> None:
    """Remove what dead runs left in a folder of checkpoints; one that was just being replaced is put back."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.glob(f"{_STAGING}{_STEP}*"):
        shutil.rmtree(path)
    for path in folder.glob(f"{_REPLACED}{_STEP}*"):
        original = path.with_name(path.name.removeprefix(_REPLACED))
        if original.exists():
            shutil.rmtree(path)
        else:
            path.rename(original)


def prepare(final: Path) -> Path:
    """Make and return the empty staging folder of `final`."""
    staging = staging_for(final)
    if staging.exists():
        shutil.rmtree(staging)
    staging.mkdir(parents=True)
    return staging


def publish(staging: Path, final: Path) -> None:
    """Flush the written folder to the disk and rename it to its name; what was there goes after that."""
    for path in staging.iterdir():
        sync(path)
    sync(staging)
    replaced = final.with_name(_REPLACED + final.name)
    if final.exists():
        final.rename(replaced)
    staging.rename(final)
    sync(final.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def retain(folder: Path, keep: int) -> list[Path]:
    """Remove all usable checkpoints but the newest `keep`; returns the removed. Unusable ones are left for people.

    One that cannot be removed stays: the run goes on.
    """
    removed = []
    for one in [found for found in survey(folder) if found.manifest][keep:]:
        with contextlib.suppress(OSError):
            # Renamed first: a folder that is half removed must not look like a damaged checkpoint.
            shutil.rmtree(one.path.rename(staging_for(one.path)))
            removed.append(one.path)
    return removed
