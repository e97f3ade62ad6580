"""Sequence parallelism: between attention and MLP, each rank of the `tensor` axis works on a part of the sequence."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Replicate, Shard

from shardwise.engine.tp_plan import COLUMN, ON_SEQUENCE, ROW, Site, Style, container, plain_class
from shardwise.spec.problems import BadInput, Problem

_INPUTS = {"input_ids": 0, "inputs_embeds": 0.0, "attention_mask": 0, "position_ids": 0}
"""Inputs of a decoder that have one entry per token (dim 1), and what pads them on the right."""


def sequence_norms(plain: Any, all_sites: list[Site], words: dict[str, str], blocks: str) -> dict[str, Style]:
    """Return the styles of the modules that work on a part of the sequence: the norms of the blocks and the last one.

    Raises:
        BadInput: the model has another structure than norms around an attention and an MLP.
    """
    decoder = blocks.rpartition(".")[0]
    found: dict[str, Style] = {}
    last: list[str] = []
    for site in all_sites:
        if site.name.startswith(blocks + "."):
            if container(site.name, blocks) is None:
                _check_norm(plain, site, words)
                found[site.name] = ON_SEQUENCE
        elif site.name.startswith(decoder + ".") and not isinstance(site.base, nn.Embedding):
            _check_norm(plain, site, words)
            last.append(site.name)
    if len(last) != 1:
        raise _refused(
            plain, f"{decoder} has {len(last)} norms after its blocks ({', '.join(last) or 'none'}), not one"
        )
    found[last[0]] = replace(ON_SEQUENCE, gives=Replicate())
    _check_parts(plain, all_sites, words, blocks)
    return found


def _check_norm(plain: Any, site: Site, words: dict[str, str]) -> None:
    is_norm = "norm" in plain_class(site.base).__name__.lower()
    if site.name in words or not is_norm or any(p.ndim != 1 for p in site.base.parameters()):
        raise _refused(plain, f"{site.name} is a {plain_class(site.base).__name__}, not a norm, an attention or an MLP")


def _check_parts(plain: Any, all_sites: list[Site], words: dict[str, str], blocks: str) -> None:
    """Every part of a block takes a whole activation in and gives the sum of the ranks' parts."""
    inside: dict[str, set[str | None]] = {}
    for site in all_sites:
        holder = container(site.name, blocks)
        if holder is not None:
            inside.setdefault(holder, set()).add(words.get(site.name))
    for holder, given in inside.items():
        if not given & set(COLUMN) or not given & set(ROW):
            raise _refused(plain, f"{holder} is not split into columns and rows")
    for name, module in plain.get_submodule(blocks).named_modules():
        if isinstance(module, nn.Dropout) and module.p > 0 and name.count(".") == 1:
            raise _refused(plain, f"{blocks}.{name} drops activations between the parts of a block")


def _refused(plain: Any, reason: str) -> BadInput:
    name = plain_class(plain).__name__
    return BadInput(
        Problem(
            field="mesh.sequence_parallel",
            value=True,
            reason=f"{name} cannot be split along the sequence: {reason}",
            fix="set mesh.sequence_parallel to false",
        )
    )


def enter_sequence(mesh: DeviceMesh) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return the step from whole activations to this rank's part of the sequence."""

    def enter(whole: torch.Tensor) -> torch.Tensor:
        return DTensor.from_local(whole, mesh, [Replicate()]).redistribute(placements=[Shard(1)]).to_local()

    return enter


class WholeParts:
    """Hooks that make a decoder work on a multiple of `ranks` tokens, unseen by its caller."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._length = 0

    def pad(
        self, decoder: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Pad the inputs on the right; a mask hides the padding, and without one causal attention does."""
        given = dict(zip(inspect.signature(decoder.forward).parameters, inputs, strict=False)) | named
        present = {name: given[name] for name in _INPUTS if given.get(name) is not None}
        self._length = present["input_ids" if "input_ids" in present else "inputs_embeds"].shape[1]
        missing = -self._length % self._ranks
        for name, value in present.items() if missing else ():
            if name == "attention_mask" and value.ndim != 2:
                raise TypeError("with sequence parallelism, an attention mask is [rows, length]")
            given[name] = F.pad(value, (0, 0) * (name == "inputs_embeds") + (0, missing), value=_INPUTS[name])
        return (), given

    def cut(self, _: nn.Module, __: tuple[Any, ...], output: Any) -> Any:
        """Cut the output back to the tokens that were given."""
        output.last_hidden_state = output.last_hidden_state[:, : self._length]
        return output
