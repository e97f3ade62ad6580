"""Weights for use elsewhere: a transformers folder, or a PEFT adapter, from the live sharded model.

Tensors are gathered one at a time on all ranks; rank 0 keeps them in host memory (one whole model in the export dtype)
and writes. Every file is read back and compared before the folder gets its name.
"""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft.utils import get_peft_model_state_dict
from safetensors.torch import save_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.core_model_loading import revert_weight_conversion

from shardwise.engine.dtypes import TORCH_DTYPE
from shardwise.engine.names import base_name, unwrapped_name
from shardwise.engine.source import Source
from shardwise.state import folders, live, merge, together
from shardwise.state.weight_files import compare_files, stored_tensors, weight_bytes

_SHARD_SIZE = "5GB"
_GENERATION = "generation_config.json"

_Written = tuple[dict[str, torch.Tensor], tuple[str, ...]]
"""What the files must hold, and notes for the user."""


class ExportError(RuntimeError):
    """Nothing usable could be written; raised on every rank, with the reason. An older export is as it was."""


@dataclass(frozen=True, kw_only=True)
class Exported:
    """What was written."""

    path: Path
    """The folder."""
    tensors: int
    """Number of tensors."""
    bytes: int
    """Size of the weight files."""
    source_bytes: int
    """Size of the weight files of the model that was trained."""
    dtype: torch.dtype
    """Of the weights."""
    notes: tuple[str, ...]
    """Where the names differ from the source's."""


def export_adapter(
    folder: Path, model: nn.Module, *, source: Source, base: str = "", tokenizer: object = None
) -> Exported:
    """Write the adapter of a sharded PEFT model as PEFT itself does, in the dtype it was trained in.

    Modules trained whole are in it. PEFT rounds them to the base's dtype when it loads them.

    Every rank calls it. Older files of an export in `folder` are replaced.

    Args:
        folder: Becomes the adapter's folder.
        model: The live PEFT model.
        source: The base model.
        base: What `adapter_config.json` names as the base model; default: the source's folder.
        tokenizer: Saved beside the adapter when given.

    Raises:
        ExportError: on every rank.
    """

    def write(staging: Path, tensors: dict[str, torch.Tensor]) -> _Written:
        return _write_adapter(staging, model, tensors, base or str(source.folder)), ()

    gathered = _Gathered(f"exporting the adapter to {folder}", folder)
    live.reshard(model)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad or "lora_" in name:
            gathered.add(name, parameter)
    for name, buffer in model.named_buffers():
        if ".modules_to_save." in name:
            gathered.add(name, buffer)
    return gathered.write(write, source, tokenizer)


def export_merged(
    folder: Path, model: nn.Module, *, source: Source, dtype: torch.dtype | None = None, tokenizer: object = None
) -> Exported:
    """Write a transformers folder, with adapters merged when there are any.

    A merged weight is W + (B @ A) * scale in fp32, rounded once. Names and shapes are those that `save_pretrained` of
    the source model writes; tied weights are written once. Every rank calls it. Older files of an export in `folder`
    are replaced.

    Args:
        folder: Becomes the model's folder.
        model: The live sharded model, with or without adapters.
        source: The model that was trained.
        dtype: Of the weights; default: the source's.
        tokenizer: Saved beside the weights when given.

    Raises:
        ExportError: on every rank.
    """
    wanted = dtype or TORCH_DTYPE[source.dtype]
    task = f"exporting the model to {folder}"
    try:
        adapters = merge.adapters(model)
    except merge.NotMergeable as error:
        raise ExportError(f"{task} failed: {error}; export the adapter instead") from error
    gathered = _Gathered(task, folder)
    for name, weight in live.all_weights(model).items():
        if "lora_" not in name and ".original_module." not in name:
            gathered.add(base_name(name), weight, adapters.get(id(weight), ()), wanted)

    def write(staging: Path, tensors: dict[str, torch.Tensor]) -> _Written:
        state = _write_model(staging, tensors, source, wanted)
        return state, _other_names(source, state)

    return gathered.write(write, source, tokenizer)


class _Gathered:
    """Whole tensors in rank 0's host memory on their way into a folder.

    A failure of rank 0 while others gather waits until they can hear of it.
    """

    def __init__(self, task: str, folder: Path) -> None:
        self.task, self.folder, self.staging = task, folder, folders.staging_for(folder)
        self.tensors: dict[str, torch.Tensor] = {}
        self.failure: Exception | None = None
        together.attempt_on_rank0(task, self._make_room, ExportError)

    def add(
        self,
        name: str,
        tensor: torch.Tensor,
        adapters: Sequence[merge.LowRank] = (),
        dtype: torch.dtype | None = None,
    ) -> None:
        """Gather a tensor and its adapters on all ranks; merge, round and keep it on rank 0."""
        parts = [adapter.gathered() for adapter in adapters]
        full = merge.whole(tensor)
        if together.rank() != 0 or self.failure is not None:
            return
        try:
            self.tensors[name] = _merged(name, full, parts, dtype).cpu().contiguous()
        except Exception as error:  # noqa: BLE001 - the other ranks wait in the next gather
            self.tensors.clear()
            self.failure = error

    def write(
        self,
        write: Callable[[Path, dict[str, torch.Tensor]], _Written],
        source: Source,
        tokenizer: Any,
    ) -> Exported:
        """Let `write` fill the staging folder on rank 0, compare its files with what it returns, and rename it."""
        try:
            return together.attempt_on_rank0(self.task, lambda: self._write(write, source, tokenizer), ExportError)
        except ExportError:
            if together.rank() == 0:
                shutil.rmtree(self.staging, ignore_errors=True)
            together.gather(None)
            raise

    def _make_room(self) -> None:
        known = ("config.json", "adapter_config.json")
        there = self.folder
        if there.exists() and any(there.iterdir()) and not any((there / name).is_file() for name in known):
            raise FileExistsError(f"{there} holds something else than an export")
        folders.prepare(there)

    def _write(
        self,
        write: Callable[[Path, dict[str, torch.Tensor]], _Written],
        source: Source,
        tokenizer: Any,
    ) -> Exported:
        if self.failure is not None:
            raise self.failure
        state, notes = write(self.staging, self.tensors)
        if tokenizer is not None:
            tokenizer.save_pretrained(self.staging)
        compare_files(self.staging, state)
        folders.publish(self.staging, self.folder)
        return Exported(
            path=self.folder,
            tensors=len(state),
            bytes=weight_bytes(self.folder),
            source_bytes=weight_bytes(source.folder),
            dtype=next(tensor.dtype for tensor in state.values() if tensor.is_floating_point()),
            notes=notes,
        )


def _merged(
    name: str, weight: torch.Tensor, adapters: Sequence[merge.LowRank], dtype: torch.dtype | None
) -> torch.Tensor:
    if dtype is None or not weight.is_floating_point():
        return weight
    for adapter in adapters:
        weight = adapter.added_to(weight)
    rounded = weight.to(dtype)
    if dtype is torch.float16 and rounded.isinf().any() and not weight.isinf().any():
        raise OverflowError(f"{name} holds {float(weight.abs().max()):.3g}, too large for fp16: export in bf16 or fp32")
    return rounded


def _write_adapter(staging: Path, model: Any, tensors: dict[str, torch.Tensor], base: str) -> dict[str, torch.Tensor]:
    adapter = model.active_adapter
    state = get_peft_model_state_dict(model, state_dict=tensors, adapter_name=adapter, save_embedding_layers=False)
    state = {unwrapped_name(name): tensor for name, tensor in state.items()}
    config = copy.deepcopy(model.peft_config[adapter])
    config.inference_mode = True
    config.base_model_name_or_path = base
    if isinstance(config.target_modules, set):
        config.target_modules = sorted(config.target_modules)
    save_file(state, staging / "adapter_model.safetensors", metadata={"format": "pt"})
    config.save_pretrained(staging)
    return state


def _write_model(
    staging: Path, tensors: dict[str, torch.Tensor], source: Source, dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    with torch.device("meta"):
        plain = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(source.folder), dtype=dtype)
    _check_complete(plain, tensors)
    state: dict[str, torch.Tensor] = revert_weight_conversion(plain, tensors)
    plain.save_pretrained(staging, state_dict=dict(state), max_shard_size=_SHARD_SIZE, save_original_format=False)
    (staging / _GENERATION).unlink(missing_ok=True)
    if (source.folder / _GENERATION).is_file():
        shutil.copyfile(source.folder / _GENERATION, staging / _GENERATION)
    if (said := AutoConfig.from_pretrained(staging).dtype) != dtype:
        raise ValueError(f"config.json says {said}, the weights are {dtype}")
    return state


def _check_complete(plain: nn.Module, tensors: dict[str, torch.Tensor]) -> None:
    """Raise unless the gathered tensors are exactly those of the model of the source's configuration."""
    wanted = {name: tuple(weight.shape) for name, weight in live.all_weights(plain).items()}
    given = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    different = sorted(name for name in wanted.keys() | given.keys() if wanted.get(name) != given.get(name))
    if different:
        shown = "; ".join(f"{name}: {given.get(name)} gathered, {wanted.get(name)} wanted" for name in different[:3])
        raise ValueError(f"{len(different)} weights do not fit the source's config.json: {shown}")


def _other_names(source: Source, state: dict[str, torch.Tensor]) -> tuple[str, ...]:
    there = stored_tensors(source.folder).keys()
    pairs = (("only in the source", there - state.keys()), ("not in the source", state.keys() - there))
    return tuple(f"{len(names)} {where}: {', '.join(sorted(names)[:3])}" for where, names in pairs if names)
