"""The repeated decoder blocks of a model, found by structure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from shardwise.spec.problems import BadInput, Problem


@dataclass(frozen=True, kw_only=True)
class Blocks:
    """The list of decoder blocks inside a model."""

    name: str
    """Dotted name of the list in the model ("model.layers")."""
    modules: nn.ModuleList
    """The live list; replacing an element replaces the block."""


def _num_parameters(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def find_blocks(model: nn.Module) -> Blocks:
    """Return the outermost module list whose elements all hold parameters and that holds most of them.

    Experts of a mixture sit in lists inside a block, so the outermost list is the list of blocks.

    Raises:
        BadInput: when no list holds at least a third of the parameters outside embeddings and head.
    """
    candidates = []
    taken: list[str] = []
    for name, module in model.named_modules():
        if not isinstance(module, nn.ModuleList) or any(name.startswith(outer + ".") for outer in taken):
            continue
        if len(module) > 0 and all(_num_parameters(element) > 0 for element in module):
            taken.append(name)
            candidates.append(Blocks(name=name, modules=module))
    head = getattr(model, "get_output_embeddings", lambda: None)()
    outside = {id(p) for m in model.modules() if isinstance(m, nn.Embedding) or m is head for p in m.parameters()}
    total = sum(p.numel() for p in model.parameters() if id(p) not in outside)
    best = max(candidates, key=lambda blocks: _num_parameters(blocks.modules), default=None)
    if best is None or 3 * _num_parameters(best.modules) < total:
        raise BadInput(
            Problem(
                field="model",
                value=type(model).__name__,
                reason="no repeated decoder blocks found, so there is nothing to shard by",
                fix="use a causal LM of transformers whose layers are in one list",
            )
        )
    return best


def keep_blocks(model: Any, numbers: Sequence[int]) -> None:
    """Take all blocks but these out of a transformers model, in place; for what needs no more than one of a kind.

    The configuration follows: its number of layers, and its lists with an entry per layer.
    """
    blocks, config = find_blocks(model).modules, model.config
    depth = len(blocks)
    kept = [blocks[number] for number in numbers]
    while len(blocks):
        del blocks[-1]
    blocks.extend(kept)
    for name, value in list(vars(config).items()):
        if isinstance(value, list) and len(value) == depth:
            setattr(config, name, [value[number] for number in numbers])
    config.num_hidden_layers = len(kept)
