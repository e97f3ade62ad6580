"""Which modules tensor parallelism splits, and how: from the model's own plan, or derived from its shapes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, cast

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor.placement_types import Partial, Placement, Replicate, Shard

from shardwise.engine.blocks import find_blocks
from shardwise.engine.names import unwrapped_name
from shardwise.spec.problems import BadInput, Problem


@dataclass(frozen=True, kw_only=True)
class Style:
    """How one module with a weight is laid out on the tensor axis."""

    weight: Placement = field(default_factory=Replicate)
    """The stored weight."""
    bias: Placement = field(default_factory=Replicate)
    """The stored bias."""
    takes: Placement = field(default_factory=Replicate)
    """The input that the module is called with."""
    takes_grad: Placement | None = None
    """The gradient that it hands back for that input; None: as the input."""
    computes: Placement | None = None
    """The input that it computes with; None: as it is called with."""
    gives: Placement = field(default_factory=Replicate)
    """Its output."""


_ROW = Style(weight=Shard(1), takes=Shard(-1), gives=Replicate())

STYLES: dict[str, Style] = {
    "colwise": Style(weight=Shard(0), bias=Shard(0), gives=Shard(-1)),
    "colwise_gather_output": Style(weight=Shard(0), bias=Shard(0)),
    "rowwise": _ROW,
    "rowwise_split_input": Style(weight=Shard(1), computes=Shard(-1)),
    "embedding_rowwise": Style(weight=Shard(0)),
    "replicated_with_grad_allreduce": Style(takes=Shard(-2), gives=Shard(-2)),
}
"""What the words of transformers' plans mean; other words are refused."""

COLUMN = ("colwise", "colwise_gather_output")
ROW = ("rowwise", "rowwise_split_input")

WHOLE_FOR_PARTIAL = Style(takes_grad=Partial())
"""A whole weight on a whole input whose gradients are being summed over the axis."""

ON_SEQUENCE = Style(takes=Shard(1), gives=Shard(1))
"""A whole weight on a part of the sequence; its gradient is summed over the axis."""

_SPLIT_BY_HEAD = ("gpt_neox",)
"""Model types whose fused projection holds query, key and value of a head side by side, so that it splits by heads."""


@dataclass(frozen=True, kw_only=True)
class TensorPlan:
    """The words of the plan, by module name in the plain model."""

    words: dict[str, str]
    """Module name -> key of `STYLES`."""
    origin: str
    """Where the words come from."""
    notes: tuple[str, ...]
    """What stays whole on every rank although it could be split, and why."""


@dataclass(frozen=True, kw_only=True)
class Site:
    """A module that may be split: a linear layer or an embedding, or the adapter around one."""

    name: str
    """Name in the plain model."""
    module: nn.Module
    """The module, or the adapter around it."""
    base: nn.Module
    """The module without its adapter."""


def plain_model(model: nn.Module) -> Any:
    """Return the transformers model inside a PEFT model, or the model itself."""
    return cast(Any, model).get_base_model() if hasattr(model, "get_base_model") else model


def plain_class(module: nn.Module) -> type[nn.Module]:
    """Return the class that a module had before `fully_shard` gave it another."""
    kinds = (kind for kind in type(module).__mro__ if issubclass(kind, nn.Module) and not issubclass(kind, FSDPModule))
    return next(kinds)


def sites(plain: nn.Module) -> Iterator[Site]:
    """Yield every module of the plain model that has parameters of its own; an adapted one with its adapter."""
    adapted = None
    for full, module in plain.named_modules():
        name = unwrapped_name(full + ".").removesuffix(".")
        if adapted is not None and name.startswith(adapted + "."):
            continue
        base = getattr(module, "base_layer", None)
        if isinstance(base, nn.Module):
            adapted = name
            yield Site(name=name, module=module, base=base)
        elif next(module.parameters(recurse=False), None) is not None:
            yield Site(name=name, module=module, base=module)


def container(name: str, blocks: str) -> str | None:
    """Return the direct child of a block that holds a module ("model.layers.0.self_attn"); None elsewhere."""
    if not name.startswith(blocks + "."):
        return None
    parts = name.removeprefix(blocks + ".").split(".")
    return f"{blocks}.{parts[0]}.{parts[1]}" if len(parts) > 2 else None


def blocks_name(plain: nn.Module) -> str:
    """Return the name of the list of blocks."""
    return find_blocks(plain).name


def tensor_plan(model: nn.Module, ranks: int) -> TensorPlan:
    """Return how `ranks` ranks split a model; depends on the model's structure only, sharded or not.

    Raises:
        BadInput: a word or a structure that cannot be split correctly.
    """
    plain = plain_model(model)
    blocks = blocks_name(plain)
    all_sites = list(sites(plain))
    words = _own_words(plain, all_sites)
    origin = f"the tensor-parallel plan of {plain_class(plain).__name__} in transformers"
    if not any(name.startswith(blocks + ".") for name in words):
        words |= _derived(plain, all_sites, blocks)
        origin = "derived from the shapes of the linear layers"
    notes: list[str] = []
    _settle_vocabulary(plain, all_sites, words, ranks, notes)
    _refuse_unsafe(plain, all_sites, words, blocks)
    return TensorPlan(words=words, origin=origin, notes=tuple(notes))


def refused(plain: nn.Module, reason: str) -> BadInput:
    """Return the refusal of a model."""
    name = plain_class(plain).__name__
    return BadInput(
        Problem(
            field="mesh.tensor",
            value=name,
            reason=f"cannot be split over a tensor axis: {reason}",
            fix="remove mesh.tensor",
        )
    )


def _generic(name: str) -> str:
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)


def _own_words(plain: Any, all_sites: list[Site]) -> dict[str, str]:
    """Return what the model's own plan says of its modules."""
    rules: dict[str, str] = plain.tp_plan or {}
    present = {_generic(unwrapped_name(name + ".").removesuffix(".")) for name, _ in plain.named_modules()}
    present |= {_generic(unwrapped_name(name)) for name, _ in plain.named_parameters()}
    unknown = sorted({word for rule, word in rules.items() if rule in present and word not in STYLES})
    if unknown:
        raise refused(plain, f"its plan says {', '.join(unknown)}, which is not supported")
    return {site.name: rules[_generic(site.name)] for site in all_sites if _generic(site.name) in rules}


def _derived(plain: Any, all_sites: list[Site], blocks: str) -> dict[str, str]:
    """Split an attention's projections with whole activations between them, and two-layer MLPs with split ones.

    Whole activations are right whatever the attention does with heads and fused projections.
    """
    hidden = plain.config.hidden_size
    groups: dict[str, list[Site]] = {}
    for site in all_sites:
        if site.name.startswith(blocks + "."):
            holder = container(site.name, blocks) or site.name.rpartition(".")[0]
            groups.setdefault(holder, []).append(site)
    words: dict[str, str] = {}
    for group in groups.values():
        linears = [site for site in group if isinstance(site.base, nn.Linear)]
        inner = _inner_width(group, linears, hidden)
        for site in linears:
            base = cast(nn.Linear, site.base)
            if inner is not None:
                words[site.name] = "rowwise" if base.in_features == inner else "colwise"
            else:
                last = site is linears[-1] and base.out_features == hidden
                words[site.name] = "rowwise_split_input" if last else "colwise_gather_output"
    odd = [site.name for group in groups.values() for site in group if site.name not in words and _has_matrix(site)]
    if odd or not words:
        reason = f"{odd[0]} is not a plain linear layer" if odd else "its blocks hold no linear layers"
        raise refused(plain, f"transformers has no plan for it, and {reason}")
    return words


def _has_matrix(site: Site) -> bool:
    return any(p.ndim > 1 for p in site.base.parameters(recurse=False))


def _inner_width(group: list[Site], linears: list[Site], hidden: int) -> int | None:
    """Return the width between the layers of an MLP: into it from `hidden`, and back; None for anything else."""
    shapes = [(cast(nn.Linear, s.base).in_features, cast(nn.Linear, s.base).out_features) for s in linears]
    backs = [shape[0] for shape in shapes if shape[1] == hidden and shape[0] != hidden]
    if len(backs) != 1 or any(shape not in ((hidden, backs[0]), (backs[0], hidden)) for shape in shapes):
        return None
    others = [p for site in group if site not in linears for p in site.base.parameters(recurse=False)]
    return None if any(backs[0] in p.shape for p in others) else backs[0]


def _settle_vocabulary(plain: Any, all_sites: list[Site], words: dict[str, str], ranks: int, notes: list[str]) -> None:
    """Split embedding and head by the vocabulary where it divides and both allow it, else keep them whole."""
    by_module = {id(site.module): site for site in all_sites}
    embedding, head = (by_module.get(id(m)) for m in (plain.get_input_embeddings(), plain.get_output_embeddings()))
    if embedding is None or head is None:
        return
    tied = bool({id(p) for p in embedding.base.parameters()} & {id(p) for p in head.base.parameters()})
    reason = None
    size = cast(Any, head.base).weight.shape[0]
    if tied and head.name in words:
        words[embedding.name] = "embedding_rowwise"
    if size % ranks:
        reason = f"vocabulary {size} is not a multiple of {ranks}"
    elif plain_class(embedding.base) is not nn.Embedding and embedding.name in words:
        reason = f"{plain_class(embedding.base).__name__} does more than look up"
    elif tied and (words.get(head.name), words.get(embedding.name)) != ("colwise_gather_output", "embedding_rowwise"):
        reason = "they are one tensor, and the plan does not split both by the vocabulary"
    if reason is not None:
        whole = [site.name for site in (embedding, head) if words.get(site.name) in ("embedding_rowwise", COLUMN[1])]
        kept = whole if tied or size % ranks else [name for name in whole if name == embedding.name]
        for name in kept:
            del words[name]
        if kept:
            notes.append(f"{' and '.join(kept)} stay whole on every rank: {reason}")


def _refuse_unsafe(plain: Any, all_sites: list[Site], words: dict[str, str], blocks: str) -> None:
    """Refuse what would train without an error on wrong gradients."""
    for site in all_sites:
        word = words.get(site.name)
        if word in COLUMN + ROW and plain_class(site.base) is not nn.Linear:
            raise refused(plain, f"{site.name} is a {plain_class(site.base).__name__}, not a plain linear layer")
    for holder, group in local_containers(all_sites, words, blocks).items():
        unnamed = [site.name for site in group if site.name not in words]
        if unnamed:
            reason = f"{unnamed[0]} works on a part of the heads or channels of {holder}, but its plan does not name it"
            raise refused(plain, reason)
        rows = [cast(nn.Linear, site.base).in_features for site in group if words[site.name] == "rowwise"]
        if not rows:
            raise refused(plain, f"its plan splits the output of {group[0].name}, but nothing in {holder} joins it")
        for site in group:
            wide = words[site.name] == "colwise" and cast(nn.Linear, site.base).out_features > max(rows)
            if wide and plain.config.model_type not in _SPLIT_BY_HEAD:
                raise refused(plain, f"{site.name} holds several projections in one, and a plain split would mix them")


def local_containers(all_sites: list[Site], words: dict[str, str], blocks: str) -> dict[str, list[Site]]:
    """Return the modules in each direct child of a block whose activations are split between its layers."""
    local = {container(name, blocks) for name, word in words.items() if word == "colwise"}
    found: dict[str, list[Site]] = {}
    for site in all_sites:
        holder = site.name if site.name in local else container(site.name, blocks)
        if holder is not None and holder in local:
            found.setdefault(holder, []).append(site)
    return found
