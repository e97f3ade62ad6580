"""Trees of modules: what a family's formula builds, and how a ModelSpec is made of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from shardwise.catalogue.families.kinds import kind_names
from shardwise.spec.model_spec import Attention, BlockKind, Mlp, ModelSpec, Module, Tensor


@dataclass(frozen=True, kw_only=True)
class Part:
    """A module with parameters: its own, then those of the modules within."""

    name: str
    """Name in the module around it."""
    kind: str
    """Its class."""
    own: tuple[tuple[str, tuple[int, ...]], ...] = ()
    """Name and shape of its own parameters."""
    inner: tuple[Part, ...] = ()
    """Modules within, in the order in which the class makes them."""
    fp32: bool = False
    """Its own parameters are made in fp32 always."""


def module(name: str, kind: str, *inner: Part | None) -> Part:
    """Return a module without parameters of its own; None stands for a part that this model lacks."""
    return Part(name=name, kind=kind, inner=tuple(part for part in inner if part is not None))


def linear(name: str, into: int, out: int, bias: bool = False, kind: str = "Linear") -> Part:
    """Return a linear layer: weight [out, into]."""
    own = (("weight", (out, into)), ("bias", (out,)))
    return Part(name=name, kind=kind, own=own if bias else own[:1])


def conv1d(name: str, into: int, out: int) -> Part:
    """Return GPT-2's linear layer: weight [into, out], always with a bias."""
    return Part(name=name, kind="Conv1D", own=(("weight", (into, out)), ("bias", (out,))))


def norm(name: str, width: int, kind: str, bias: bool = False) -> Part:
    """Return a norm over `width` channels."""
    own = (("weight", (width,)), ("bias", (width,)))
    return Part(name=name, kind=kind, own=own if bias else own[:1])


def embedding(name: str, rows: int, width: int, kind: str = "Embedding") -> Part:
    """Return a table of `rows` vectors."""
    return Part(name=name, kind=kind, own=(("weight", (rows, width)),))


def tensors_of(part: Part, name: str = "") -> Iterator[Tensor]:
    """Yield all parameters, in the order of `named_parameters()`; `name` is what the part is called."""
    prefix = f"{name}." if name else ""
    for own, shape in part.own:
        yield Tensor(name=prefix + own, shape=shape, fp32=part.fp32)
    for inner in part.inner:
        yield from tensors_of(inner, prefix + inner.name)


def modules_of(part: Part, name: str = "") -> Iterator[Module]:
    """Yield the part and all modules within, in the order of `named_modules()`."""
    yield Module(name=name, kind=part.kind)
    prefix = f"{name}." if name else ""
    for inner in part.inner:
        yield from modules_of(inner, prefix + inner.name)


@dataclass(frozen=True, kw_only=True)
class Block:
    """One kind of decoder block."""

    attention: Attention
    """Its attention."""
    mlp: Mlp
    """Its feed-forward part."""
    part: Part
    """Its modules; the name is empty."""


@dataclass(frozen=True, kw_only=True)
class Skeleton:
    """A causal LM as a tree of modules."""

    kind: str
    """Class of the causal LM."""
    path: tuple[tuple[str, str], ...]
    """Name and class of the modules that lead to the list of blocks: `("model", "LlamaModel")`."""
    before: tuple[Part, ...]
    """What the innermost of these holds before the list; the embedding of tokens comes first."""
    blocks_name: str
    """Name of the list in it."""
    blocks: tuple[Block, ...]
    """One entry per block; equal kinds are one object."""
    after: tuple[Part, ...]
    """What comes after the list."""
    head: Part
    """The output projection."""
    tied: bool
    """The head's weight is the embedding's."""
    hidden: int
    """Elements of a hidden state."""
    vocab: int
    """Rows of the embedding."""
    max_positions: int | None
    """Longest sequence that it has positions for."""
    tensor_rules: Mapping[str, str] = field(default_factory=dict)
    """transformers' plan for a tensor axis, those rules too that fit no module of this model."""


def spec_of(skeleton: Skeleton, config: dict[str, Any], name: str, note: str = "") -> ModelSpec:
    """Return the ModelSpec of a tree."""
    kinds = list({id(block): block for block in skeleton.blocks}.values())
    places = {id(block): place for place, block in enumerate(kinds)}
    names = kind_names([(block.attention, block.mlp) for block in kinds])
    prefix = ".".join(part for part, _ in skeleton.path)
    block_list = f"{prefix}.{skeleton.blocks_name}"
    block_kinds = tuple(
        BlockKind(
            name=kind_name,
            attention=block.attention,
            mlp=block.mlp,
            tensors=tuple(tensors_of(block.part)),
            modules=tuple(modules_of(block.part)),
        )
        for kind_name, block in zip(names, kinds, strict=True)
    )
    whole = _whole(skeleton)
    modules = tuple(modules_of(whole))
    tied_weight = f"{skeleton.head.name}.weight" if skeleton.tied else None
    return ModelSpec(
        name=name,
        model_type=config["model_type"],
        config=config,
        hidden=skeleton.hidden,
        vocab=skeleton.vocab,
        max_positions=skeleton.max_positions,
        kinds=block_kinds,
        blocks=tuple(places[id(block)] for block in skeleton.blocks),
        block_list=block_list,
        embedding=f"{prefix}.{skeleton.before[0].name}",
        head=skeleton.head.name,
        tied=skeleton.tied,
        outside=tuple(tensor for tensor in tensors_of(whole) if tensor.name != tied_weight),
        modules=modules,
        tensor_rules=present_rules(skeleton.tensor_rules, modules, block_kinds, block_list),
        note=note,
    )


def _whole(skeleton: Skeleton) -> Part:
    """Return the causal LM with an empty list of blocks."""
    blocks = Part(name=skeleton.blocks_name, kind="ModuleList")
    inner: tuple[Part, ...] = (*skeleton.before, blocks, *skeleton.after)
    for name, kind in reversed(skeleton.path):
        inner = (Part(name=name, kind=kind, inner=inner),)
    return Part(name="", kind=skeleton.kind, inner=(*inner, skeleton.head))


def present_rules(
    rules: Mapping[str, str], modules: tuple[Module, ...], kinds: tuple[BlockKind, ...], block_list: str
) -> dict[str, str]:
    """Return those rules of a tensor plan that name a module or parameter of the model."""
    inside = {entry.name for kind in kinds for entry in kind.modules} | {
        entry.name for kind in kinds for entry in kind.tensors
    }
    present = {f"{block_list}.*.{inner}" for inner in inside} | {entry.name for entry in modules}
    return {rule: word for rule, word in rules.items() if rule in present}
