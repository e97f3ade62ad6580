"""`checkpoint.json`: what a checkpoint holds, written last. Nothing here imports torch."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Literal

from pydantic import ValidationError

from shardwise.spec.strict import Strict

MANIFEST = "checkpoint.json"
"""Name of the manifest inside a checkpoint; a folder without it is not a checkpoint."""


class TensorInfo(Strict):
    """Shape and dtype of one tensor, whole."""

    shape: tuple[int, ...]
    """Global shape."""
    dtype: str
    """Name in torch without the prefix: `float32`."""

    def __str__(self) -> str:
        """`float32 [64, 96]`."""
        return f"{self.dtype} {list(self.shape)}"


class FileInfo(Strict):
    """Size and hash of one file."""

    bytes: int
    """Size."""
    sha256: str
    """Hash of the content, in hex."""


class OptimizerInfo(Strict):
    """What of the optimizer was saved."""

    name: str
    """Class."""
    groups: tuple[tuple[str, ...], ...]
    """Names of the parameters of each group, in order."""
    state: dict[str, dict[str, TensorInfo]]
    """Parameter -> key of its state -> what it is."""
    updates: tuple[int, ...]
    """Distinct values of the update counters of all parameters; `(30,)` when all agree."""


class Contents(Strict):
    """What of a model and its optimizer a checkpoint holds."""

    weights: dict[str, TensorInfo]
    """Saved weights: the trained ones when something is frozen, else all."""
    frozen_tensors: int
    """Weights that are not saved because they never change."""
    frozen_elements: int
    """Elements of those."""
    optimizer: OptimizerInfo
    """Optimizer state."""

    def differences(self, here: Contents) -> list[str]:
        """Say why this checkpoint does not fit the live model `here`, one clause each; empty when it fits."""
        found = [
            f"{name}: {self.weights.get(name, 'missing')} in the checkpoint, {here.weights.get(name, 'missing')} here"
            for name in sorted(here.weights.keys() | self.weights.keys())
            if here.weights.get(name) != self.weights.get(name)
        ]
        if here.frozen_elements != self.frozen_elements:
            found.append(f"frozen elements: {self.frozen_elements} in the checkpoint, {here.frozen_elements} here")
        if here.optimizer.name != self.optimizer.name:
            found.append(f"optimizer: {self.optimizer.name} in the checkpoint, {here.optimizer.name} here")
        elif here.optimizer.groups != self.optimizer.groups:
            found.append("optimizer: other groups of parameters in the checkpoint")
        return found


class Manifest(Strict):
    """Everything about a checkpoint that can be known without reading its tensors."""

    format: Literal[1] = 1
    """Version of this layout."""
    step: int
    """Optimizer steps taken."""
    samples_seen: int
    """Training rows consumed over all ranks."""
    sequence: int
    """Grows with every save into one folder; the highest is the newest, whatever its step."""
    world: int
    """Ranks that saved it."""
    fingerprint: str
    """Of the plan; empty when the saver had none."""
    versions: dict[str, str]
    """Package -> version."""
    contents: Contents
    """Weights and optimizer state."""
    files: dict[str, FileInfo]
    """Every other file of the folder."""

    def write(self, folder: Path) -> None:
        """Write into `folder`."""
        (folder / MANIFEST).write_text(self.model_dump_json(indent=1))


def read_manifest(folder: Path) -> tuple[Manifest | None, str]:
    """Return a folder's manifest and "", or None and why it is not a complete checkpoint (file sizes are compared)."""
    if not folder.is_dir():
        return None, "is not a folder"
    try:
        manifest = Manifest.model_validate_json((folder / MANIFEST).read_text())
    except FileNotFoundError:
        return None, f"has no {MANIFEST}: its save did not finish"
    except (OSError, ValidationError, UnicodeDecodeError) as error:
        return None, f"its {MANIFEST} cannot be read ({type(error).__name__})"
    for name, info in manifest.files.items():
        path = folder / name
        if not path.is_file():
            return None, f"its file {name} is missing"
        if (size := path.stat().st_size) != info.bytes:
            return None, f"its file {name} has {size} bytes instead of {info.bytes}"
    return manifest, ""


def hash_files(folder: Path, share: int, shares: int) -> dict[str, FileInfo]:
    """Describe every `shares`-th file of `folder`, from the `share`-th on; so the ranks split the reading."""
    names = sorted(path.name for path in folder.iterdir() if path.is_file() and path.name != MANIFEST)
    return {name: _describe(folder / name) for name in names[share::shares]}


def damaged_files(folder: Path, manifest: Manifest, share: int, shares: int) -> list[str]:
    """Return the names of files whose content differs from the manifest, among this share of them."""
    names = sorted(manifest.files)[share::shares]
    return [name for name in names if _describe(folder / name) != manifest.files[name]]


def sync(path: Path) -> None:
    """Flush a file, or a folder's entries (new files, renames), to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _describe(path: Path) -> FileInfo:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256")
        return FileInfo(bytes=os.fstat(file.fileno()).st_size, sha256=digest.hexdigest())
