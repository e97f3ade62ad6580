"""A model with its adapters by formula: the modules and parameters that PEFT makes of a ModelSpec. Needs no torch."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from shardwise.spec.method import Lora, goes_by
from shardwise.spec.model_spec import ModelSpec, Module, Tensor
from shardwise.spec.problems import BadInput, Problem, did_you_mean

LINEAR = ("Linear", "Conv1D")
"""Classes of plain linear layers; a subclass, whose name ends in the same word, gets no adapter."""

EXPERT_TARGETS = ("gate", "gate_proj", "up_proj", "down_proj")
"""Targets that PEFT turns into adapters on fused experts in the mixtures below, whatever linear layers they name."""

_TURNED = ("deepseek_v2", "deepseek_v3", "mixtral", "olmoe", "qwen3_moe")
"""Model types in which it does (PEFT 0.21, `utils/transformers_weight_conversion.py`)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Parameter:
    """One parameter."""

    name: str
    """Dotted name in its scope."""
    shape: tuple[int, ...]
    """Its whole shape."""
    trained: bool
    """It has a gradient."""
    fp32: bool = False
    """Frozen, it is stored in fp32, whatever the others are in."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Scope:
    """A block, or all that lies in no block."""

    modules: tuple[tuple[str, str], ...]
    """Name and class of modules with parameters, in the order of `named_modules()`, those of PEFT included."""
    parameters: tuple[Parameter, ...]
    """Its parameters, in the order of `named_parameters()`."""
    unreached: tuple[str, ...]
    """Modules that no forward reaches: frozen originals of what is trained whole."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Adapted:
    """A model as it trains."""

    outside: Scope
    """What lies in no block; names in the plain model."""
    variants: tuple[Scope, ...]
    """Kinds of blocks, told apart by their adapters too; names within the block."""
    kinds: tuple[int, ...]
    """Place in `ModelSpec.kinds` of each variant."""
    blocks: tuple[int, ...]
    """Variant of each block, as a place in `variants`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Choice:
    """Which modules of a scope get an adapter, and which are trained whole; names in the scope."""

    adapted: frozenset[str]
    whole: tuple[str, ...]
    rank: int


def adapted_model(model: ModelSpec, lora: Lora | None, *, tensor: int = 1) -> Adapted:
    """Return a model with its adapters.

    Args:
        model: The plain model.
        lora: Adapters; None: every weight trains.
        tensor: Ranks of the tensor axis.

    Raises:
        BadInput: as `engine.adapters.add_adapters`.
    """
    if lora is None:
        outside = _plain_scope(model.modules, model.outside)
        plain = tuple(_plain_scope(kind.modules, kind.tensors) for kind in model.kinds)
        places = tuple(range(len(plain)))
        return Adapted(outside=outside, variants=plain, kinds=places, blocks=model.blocks)
    names = _Names(model, lora, tensor)
    tied = {model.head: next(t for t in model.outside if t.name == f"{model.embedding}.weight")} if model.tied else {}
    outside = _scope(model.modules, model.outside, names.chosen("", model.modules), tied)
    variants: list[Scope] = []
    kinds: list[int] = []
    found: dict[tuple[int, _Choice], int] = {}
    blocks = []
    choices: dict[int, _Choice] = {}
    for index, kind in enumerate(model.blocks):
        if names.by_number or kind not in choices:
            choices[kind] = names.chosen(f"{model.block_list}.{index}.", model.kinds[kind].modules)
        key = (kind, choices[kind])
        if key not in found:
            found[key] = len(variants)
            block = model.kinds[kind]
            variants.append(_scope(block.modules, block.tensors, choices[kind]))
            kinds.append(kind)
        blocks.append(found[key])
    return Adapted(outside=outside, variants=tuple(variants), kinds=tuple(kinds), blocks=tuple(blocks))


def _plain_scope(modules: tuple[Module, ...], tensors: tuple[Tensor, ...]) -> Scope:
    return Scope(
        modules=tuple((module.name, module.kind) for module in modules),
        parameters=tuple(
            Parameter(name=tensor.name, shape=tensor.shape, trained=True, fp32=tensor.fp32) for tensor in tensors
        ),
        unreached=(),
    )


def lies_in(name: str, outer: str) -> bool:
    """Whether a module is another one or lies in it; an empty name is the whole scope."""
    return not outer or name == outer or name.startswith(outer + ".")


class _Names:
    """Resolves `lora_targets` and `lora_modules_to_save` against the names of a model, as the engine does."""

    def __init__(self, model: ModelSpec, lora: Lora, tensor: int) -> None:
        self._model, self._lora = model, lora
        given = (*(() if lora.targets == "all_linear" else lora.targets), *lora.modules_to_save)
        self.by_number = any(re.search(r"(^|\.)\d+(\.|$)", name) for name in given)
        """Some given name holds the number of a block, so that blocks of a kind may differ."""
        self._all = [(name, kind) for name, kind in self._named_modules()]
        self._check_whole(tensor)
        self._targets = self._suffixes() if lora.targets == "all_linear" else lora.targets
        self._check_targets()

    def chosen(self, prefix: str, modules: tuple[Module, ...]) -> _Choice:
        """Return what becomes of the modules of a scope whose names in the model begin with `prefix`."""
        whole = tuple(module.name for module in modules if self._is_whole(prefix + module.name))
        adapted = frozenset(
            module.name
            for module in modules
            if module.kind in LINEAR
            and any(goes_by(prefix + module.name, target) for target in self._targets)
            and not any(lies_in(module.name, outer) for outer in whole)
        )
        return _Choice(adapted=adapted, whole=whole, rank=self._lora.rank)

    def _named_modules(self) -> Iterator[tuple[str, str]]:
        """Yield (name, class) of all modules with parameters; of blocks of a kind the first stands for all."""
        model = self._model
        for module in model.modules:
            yield module.name, module.kind
        seen: set[int] = set()
        for index, kind in enumerate(model.blocks):
            if self.by_number or kind not in seen:
                seen.add(kind)
                for module in model.kinds[kind].modules:
                    name = f"{model.block_list}.{index}"
                    yield (f"{name}.{module.name}" if module.name else name), module.kind

    def _is_whole(self, name: str) -> bool:
        return bool(name) and any(goes_by(name, given) for given in self._lora.modules_to_save)

    def _suffixes(self) -> tuple[str, ...]:
        """Return the last parts of names of plain linear layers, the head and what is trained whole left out."""
        plain: set[str] = set()
        other: set[str] = set()
        outside: set[str] = set()
        whole = [name for name, _ in self._all if self._is_whole(name)]
        for name, kind in self._all:
            last = name.rpartition(".")[2]
            if not any(lies_in(name, outer) for outer in whole):
                outside.add(last)
            if name != self._model.head and kind.endswith(LINEAR):
                (plain if kind in LINEAR else other).add(last)
        found = tuple(sorted((plain - other) & outside))
        if not found:
            reason = "leaves no linear layer for an adapter" if whole else "no linear layer of this model takes one"
            field = "lora_modules_to_save" if whole else "lora_targets"
            value = list(self._lora.modules_to_save) if whole else "all_linear"
            raise BadInput(Problem(field=field, value=value, reason=reason, fix="train all weights: use_lora: false"))
        return found

    def _check_targets(self) -> None:
        linear = [name for name, kind in self._all if kind in LINEAR]
        known = sorted({name.rpartition(".")[2] for name in linear if name != self._model.head})
        problems = [
            Problem(
                field="lora_targets",
                value=target,
                reason="matches no linear layer of this model",
                allowed=f"all_linear, or names among {', '.join(known)}",
                fix=did_you_mean(target, known),
            )
            for target in self._targets
            if not any(goes_by(name, target) for name in linear)
        ]
        turned = [t for t in self._targets if t.rpartition(".")[2] in EXPERT_TARGETS]
        if self._model.model_type in _TURNED and turned and not problems:
            others = [suffix for suffix in known if suffix not in EXPERT_TARGETS]
            reason = f"PEFT turns {', '.join(turned)} into adapters on fused experts, which no formula covers"
            fix = f"name other layers ({', '.join(others)}), or use --by trace"
            problems = [Problem(field="lora_targets", value=self._lora.targets, reason=reason, fix=fix)]
        if problems:
            raise BadInput(problems)

    def _check_whole(self, tensor: int) -> None:
        """Refuse modules that cannot be trained whole, as the engine does."""
        given = self._lora.modules_to_save
        if given and tensor > 1:
            reason = f"contradicts mesh.tensor: {tensor}, which does not split modules that are trained whole"
            raise BadInput(
                Problem(field="lora_modules_to_save", value=list(given), reason=reason, fix="remove one of the two")
            )
        whole = {one: [name for name, _ in self._all if name and goes_by(name, one)] for one in given}
        every = [name for names in whole.values() for name in names]
        problems = []
        for one, names in whole.items():
            reason, allowed, fix = next(filter(None, (self._unfit(name, every) for name in names)), ""), "", "remove it"
            if not names:
                known = self._known_names()
                reason, allowed = "matches no module of this model", f"names among {', '.join(known)}"
                fix = did_you_mean(one, known)
            if reason:
                field = "lora_modules_to_save"
                problems.append(Problem(field=field, value=one, reason=reason, allowed=allowed, fix=fix))
        if problems:
            raise BadInput(problems)

    def _known_names(self) -> list[str]:
        """Return the last parts of names of modules that hold no block."""
        last = {name.rpartition(".")[2] for name, _ in self._all if not lies_in(self._model.block_list, name)}
        return sorted(part for part in last if not part.isdigit())

    def _unfit(self, name: str, whole: list[str]) -> str:
        """Return why a module cannot be trained whole; empty when it can."""
        model = self._model
        block = rf"{re.escape(model.block_list)}\.\d+"
        if lies_in(model.block_list, name) or re.fullmatch(block, name):
            return f"{name} holds a whole block, which full fine-tuning (use_lora: false) is for"
        outer = next((one for one in whole if one != name and lies_in(name, one)), None)
        if outer is not None:
            return f"{name} lies in {outer}, which is trained whole"
        if model.tied and name in (model.embedding, model.head):
            other = model.head if name == model.embedding else model.embedding
            return f"{name} shares its weights with {other}, and a trained copy would part the two"
        if self._lora.targets != "all_linear":
            for inner, kind in self._all:
                target = next((one for one in self._lora.targets if goes_by(inner, one)), None)
                if kind in LINEAR and lies_in(inner, name) and target is not None:
                    return f"contradicts lora_targets: {target}, which gives {inner} an adapter"
        return ""


def _scope(
    modules: tuple[Module, ...], tensors: tuple[Tensor, ...], choice: _Choice, tied: dict[str, Tensor] | None = None
) -> Scope:
    """Return what PEFT makes of a scope: adapters around layers, wrappers around what is trained whole.

    `tied` holds the weights of layers that have none of their own, as they are another module's.
    """
    own: dict[str, list[Tensor]] = {}
    for tensor in tensors:
        own.setdefault(tensor.name.rpartition(".")[0], []).append(tensor)
    made_modules: list[tuple[str, str]] = []
    made: list[Parameter] = []
    for module in modules:
        outer = next((one for one in choice.whole if lies_in(module.name, one)), None)
        if outer == module.name:
            inside = [inner for inner in modules if lies_in(inner.name, outer)]
            _wrap_whole(outer, inside, own, made_modules, made)
        elif outer is None and module.name in choice.adapted:
            weight = own[module.name][0] if module.name in own else (tied or {})[module.name]
            _wrap_layer(module, own.get(module.name, []), weight.shape, choice.rank, made_modules, made)
        elif outer is None:
            made_modules.append((module.name, module.kind))
            made += [
                Parameter(name=t.name, shape=t.shape, trained=False, fp32=t.fp32) for t in own.get(module.name, [])
            ]
    return Scope(
        modules=tuple(made_modules),
        parameters=tuple(made),
        unreached=tuple(f"{name}.original_module" for name in choice.whole),
    )


def _wrap_layer(
    module: Module,
    own: list[Tensor],
    shape: tuple[int, ...],
    rank: int,
    modules: list[tuple[str, str]],
    made: list[Parameter],
) -> None:
    """Add a linear layer with its adapter."""
    name = module.name
    rows, columns = shape
    inputs, outputs = (rows, columns) if module.kind == "Conv1D" else (columns, rows)
    modules += [
        (name, "Linear"),
        (f"{name}.base_layer", module.kind),
        (f"{name}.lora_A", "ModuleDict"),
        (f"{name}.lora_A.default", "Linear"),
        (f"{name}.lora_B", "ModuleDict"),
        (f"{name}.lora_B.default", "Linear"),
    ]
    made += [
        Parameter(name=f"{name}.base_layer.{t.name.rpartition('.')[2]}", shape=t.shape, trained=False, fp32=t.fp32)
        for t in own
    ]
    made.append(Parameter(name=f"{name}.lora_A.default.weight", shape=(rank, inputs), trained=True))
    made.append(Parameter(name=f"{name}.lora_B.default.weight", shape=(outputs, rank), trained=True))


def _wrap_whole(
    outer: str,
    inside: list[Module],
    own: dict[str, list[Tensor]],
    modules: list[tuple[str, str]],
    made: list[Parameter],
) -> None:
    """Add a module twice: frozen, and a copy that trains."""
    modules.append((outer, "ModulesToSaveWrapper"))
    for holder, trained in (("original_module", False), ("modules_to_save.default", True)):
        if trained:
            modules.append((f"{outer}.modules_to_save", "ModuleDict"))
        for module in inside:
            modules.append((f"{outer}.{holder}{module.name.removeprefix(outer)}", module.kind))
            made += [
                Parameter(
                    name=f"{outer}.{holder}{t.name.removeprefix(outer)}", shape=t.shape, trained=trained, fp32=t.fp32
                )
                for t in own.get(module.name, [])
            ]
