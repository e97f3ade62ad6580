"""Checkpoint tensors into a sharded model: every rank reads its own part only."""

from __future__ import annotations

import re
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn

from shardwise.engine.compat import WeightRead, convert, local_slices, weight_reads
from shardwise.engine.names import base_name
from shardwise.engine.shards import local
from shardwise.engine.source import Source
from shardwise.spec.problems import BadInput, Problem

_COMPUTED = re.compile(r"\.(rotary_emb\.inv_freq|(attn|attention)\.(masked_)?bias)$")
"""Buffers that older checkpoints hold: rotary tables and causal masks."""


@dataclass(frozen=True, kw_only=True)
class ReadPlan:
    """How the checkpoint's tensors become the model's; made from the plain model, before adapters and wrappers."""

    reads: list[WeightRead]
    """One entry per tensor or converted group."""
    unused: list[str]
    """Checkpoint keys that the model has no place for."""
    plain_model: nn.Module
    """The model whose names the reads use."""

    def notes(self) -> list[str]:
        """Return what the user should know of it: checkpoint tensors that are dropped, masks and rotary tables
        excepted, which the model computes."""
        dropped = [key for key in self.unused if not _COMPUTED.search(key)]
        if not dropped:
            return []
        listed = ", ".join(dropped[:3]) + (", ..." if len(dropped) > 3 else "")
        tensors = (
            "1 tensor of the checkpoint is" if len(dropped) == 1 else f"{len(dropped)} tensors of the checkpoint are"
        )
        return [f"note: {tensors} not used: {listed}"]


class _Files:
    """Open safetensors files, each once."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._open: dict[Path, Any] = {}
        self._stack = ExitStack()

    def __enter__(self) -> _Files:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def slice(self, key: str) -> Any:
        """Return the lazy slice of a checkpoint tensor."""
        path = self._source.files[key]
        if path not in self._open:
            self._open[path] = self._stack.enter_context(safe_open(path, framework="pt"))
        return self._open[path].get_slice(key)


def plan_reads(model: nn.Module, source: Source) -> ReadPlan:
    """Map the checkpoint to the model's tensors and check that nothing is missing.

    Raises:
        BadInput: the checkpoint lacks tensors of the model.
    """
    reads, unused = weight_reads(model, source.files)
    given = {read.first_target for read in reads if read.converter is None}
    converted = any(read.converter is not None for read in reads)
    aliases: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        aliases.setdefault(id(parameter), []).append(name)
    missing = sorted(names[0] for names in aliases.values() if not given & set(names))
    if missing and not converted:
        raise BadInput(
            Problem(
                field="model",
                value=str(source.folder),
                reason=f"{len(missing)} tensors of {type(model).__name__} are not in it: {', '.join(missing[:3])}",
                fix="give a complete checkpoint of this architecture",
            )
        )
    _check_shapes(model, reads, source)
    return ReadPlan(reads=reads, unused=unused, plain_model=model)


def _check_shapes(model: nn.Module, reads: list[WeightRead], source: Source) -> None:
    """Compare the shapes in the files' headers with the model's."""
    shapes = {name: list(tensor.shape) for name, tensor in model.state_dict().items()}
    problems = []
    with _Files(source) as files:
        for read in reads:
            if read.converter is not None:
                continue
            given = files.slice(read.sources[0][0]).get_shape()
            if given != shapes[read.first_target]:
                problems.append(_other_shape(read.first_target, given, shapes[read.first_target]))
    if problems:
        raise BadInput(problems[:3])


def _other_shape(name: str, given: list[int], wanted: list[int]) -> Problem:
    return Problem(
        field="model",
        value=name,
        reason=f"has shape {given} in the checkpoint and {wanted} in the model",
        fix="config.json and the weights belong to different models",
    )


@torch.no_grad()
def load_weights(model: nn.Module, plan: ReadPlan, source: Source) -> None:
    """Fill the parameters and persistent buffers of a materialised, sharded model from the checkpoint.

    A module that PEFT trains whole gets its weights twice: in the frozen original and in the copy that trains.
    Plain tensors are read as slices; a tensor that transformers builds from several (experts of a mixture) is built
    whole, cut, and freed before the next.

    Raises:
        BadInput: a tensor has another shape than the model's, or a parameter got no value.
    """
    live: dict[str, list[torch.Tensor]] = {}
    for name, tensor in [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]:
        live.setdefault(base_name(name), []).append(tensor)
    filled: set[int] = set()

    def fill(name: str, given: Any) -> None:
        for target in live[name]:
            _copy(target, name, given)
            filled.add(id(target))

    with _Files(source) as files:
        for read in plan.reads:
            if read.converter is None:
                fill(read.first_target, files.slice(read.sources[0][0]))
                continue
            whole = [files.slice(key)[:] for key, _ in read.sources]
            for name, tensor in convert(read, whole, plan.plain_model).items():
                fill(name, tensor)
    empty = [n for n, p in model.named_parameters() if id(p) not in filled and ".lora_" not in n]
    if empty:
        raise BadInput(
            Problem(field="model", value=str(source.folder), reason=f"no weights for {', '.join(empty[:3])}")
        )


def _copy(target: torch.Tensor, name: str, given: Any) -> None:
    shape = list(given.get_shape() if hasattr(given, "get_shape") else given.shape)
    if shape != list(target.shape):
        raise BadInput(_other_shape(name, shape, list(target.shape)))
    part = local(target)
    if part.numel() > 0:
        part.copy_(given[local_slices(target)] if shape else (given[:] if hasattr(given, "get_shape") else given))
