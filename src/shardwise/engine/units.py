"""Which modules become communication units, decided before anything is sharded."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
from peft.utils import ModulesToSaveWrapper
from torch import nn

from shardwise.engine.blocks import Blocks, find_blocks
from shardwise.engine.names import unwrapped_name
from shardwise.spec.layout import Units, is_checkpointed
from shardwise.spec.plan import Plan
from shardwise.spec.problems import BadInput, Problem, did_you_mean


@dataclass(frozen=True, kw_only=True)
class PlannedUnit:
    """Modules that one `fully_shard` call takes together."""

    name: str
    """Dotted name of the module in the model; of two tied modules both, joined by ` + `; `root` for the rest."""
    kind: str
    """Class of the module, or what the unit is."""
    modules: tuple[nn.Module, ...]
    """The modules."""
    parameters: tuple[tuple[str, nn.Parameter], ...]
    """Name and parameter of all that no inner unit holds; tied ones once."""
    stays_gathered: bool
    """Its backward comes right after its forward, so it is not freed in between: the head, and the root."""
    block: int | None
    """Number of the decoder block that it is or lies in; None outside."""
    checkpointed: bool
    """That block recomputes its activations."""
    has_backward: bool
    """Whether backward needs its weights: a gradient flows into it, or its block is recomputed for one that does."""

    @property
    def is_root(self) -> bool:
        """Whether it holds what no other unit does."""
        return self.name == ROOT


ROOT = "root"


def plan_units(model: nn.Module, plan: Plan) -> list[PlannedUnit]:
    """Return the units of a model in the order in which forward uses them, the root last.

    Args:
        model: Adapters included, not yet sharded; on any device.
        plan: What is decided.

    Raises:
        BadInput: class names that match nothing, that would gather several blocks at once, or that leave nothing to
            shard; trained parameters of several dtypes in one unit.
    """
    blocks, units = find_blocks(model), plan.units
    chosen = [*_embedding_and_head(model, units), *_wrapped(model, units, blocks)]
    order = {id(module): place for place, module in enumerate(model.modules())}
    last = _head(model)
    chosen.sort(key=lambda entry: (entry[1][0] is last, order[id(entry[1][0])]))
    taken: set[int] = set()
    parameters: dict[str, tuple[tuple[str, nn.Parameter], ...]] = {}
    for name, modules in sorted(chosen, key=lambda entry: -order[id(entry[1][0])]):
        parameters[name] = tuple(_own_parameters(model, modules, taken))
    planned: list[PlannedUnit] = []
    flows = False
    for name, modules in chosen:
        block = _block_of(modules[0], blocks)
        recomputed = block is not None and is_checkpointed(plan.activation_checkpointing, block)
        around = (*modules, blocks.modules[block]) if recomputed and block is not None else modules
        flows = flows or any(p.requires_grad for _, p in parameters[name])
        if parameters[name]:
            planned.append(
                PlannedUnit(
                    name=name,
                    kind=" + ".join(type(module).__name__ for module in modules),
                    modules=modules,
                    parameters=parameters[name],
                    stays_gathered=last in modules,
                    block=block,
                    checkpointed=recomputed,
                    has_backward=flows or any(p.requires_grad for module in around for p in module.parameters()),
                )
            )
    rest = tuple(_own_parameters(model, (model,), taken))
    root = PlannedUnit(
        name=ROOT,
        kind=_rest_kind(model, rest),
        modules=(model,),
        parameters=rest,
        stays_gathered=True,
        block=None,
        checkpointed=False,
        has_backward=True,
    )
    for unit in [*planned, root]:
        _refuse_mixed_dtypes(unit)
    return [*planned, root]


def _wrapped(model: nn.Module, units: Units, blocks: Blocks) -> list[tuple[str, tuple[nn.Module, ...]]]:
    """Return (name, module) of every block, or of every outermost module of each wanted class."""
    if not units.wrap:
        return [(f"{blocks.name}.{index}", (block,)) for index, block in enumerate(blocks.modules)]
    apart = {id(inner) for part in (_embedding(model), _head(model)) if part is not None for inner in part.modules()}
    apart |= {id(inner) for unused in _unused(model) for inner in unused.modules()}
    found: list[tuple[str, tuple[nn.Module, ...]]] = []
    for wanted in units.wrap:
        outermost: list[str] = []
        for name, module in model.named_modules():
            inside = any(name.startswith(outer + ".") for outer in outermost)
            if type(module).__name__ != wanted or inside or id(module) in apart or not _has_parameters(module):
                continue
            outermost.append(name)
            if not any(modules[0] is module for _, modules in found):
                found.append((name, (module,)))
        if not outermost:
            raise BadInput(_no_such_class(model, wanted))
    for name, (module, *_) in found:
        held = sum(any(inner is block for inner in module.modules()) for block in blocks.modules)
        if held > 1:
            raise BadInput(
                Problem(
                    field="units.wrap",
                    value=type(module).__name__,
                    reason=f"{name or 'the model'} holds {held} blocks: as one unit they would all be gathered at once",
                    fix=f"write {type(blocks.modules[0]).__name__}, or remove it",
                )
            )
    return found


def _no_such_class(model: nn.Module, wanted: str) -> Problem:
    known = sorted({type(module).__name__ for module in model.modules() if _has_parameters(module)})
    return Problem(
        field="units.wrap",
        value=wanted,
        reason="no module of this class, outside embedding and head, holds parameters",
        allowed=", ".join(known),
        fix=did_you_mean(wanted, known),
    )


def _embedding_and_head(model: nn.Module, units: Units) -> Iterator[tuple[str, tuple[nn.Module, ...]]]:
    """Yield embedding and head where they are units of their own; tied, they are one."""
    names = {id(module): name for name, module in model.named_modules()}
    embedding, head = _embedding(model), _head(model)
    if embedding is not None and head is not None and is_tied(embedding, head):
        if "own" in (units.embedding, units.head):
            yield f"{names[id(embedding)]} + {names[id(head)]}", (embedding, head)
        return
    for module, place, field in ((embedding, units.embedding, "embedding"), (head, units.head, "head")):
        if place == "own" and module is None:
            reason = f"this model shows no {field}"
            raise BadInput(Problem(field=f"units.{field}", value="own", reason=reason, fix="write root"))
        if place == "own" and module is not None:
            yield names[id(module)], (module,)


def is_tied(embedding: nn.Module, head: nn.Module) -> bool:
    """Whether two modules share a parameter."""
    return bool({id(p) for p in embedding.parameters()} & {id(p) for p in head.parameters()})


def _embedding(model: nn.Module) -> nn.Module | None:
    return cast("nn.Module | None", getattr(model, "get_input_embeddings", lambda: None)())


def _unused(model: nn.Module) -> Iterator[nn.Module]:
    """Yield modules that no forward reaches: the frozen originals of what PEFT trains whole."""
    for module in model.modules():
        if isinstance(module, ModulesToSaveWrapper):
            yield module.original_module


def _head(model: nn.Module) -> nn.Module | None:
    return cast("nn.Module | None", getattr(cast(Any, model), "get_output_embeddings", lambda: None)())


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _own_parameters(
    model: nn.Module, modules: tuple[nn.Module, ...], taken: set[int]
) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the parameters of `modules` that no unit has taken yet, and take them."""
    wanted = {id(p) for module in modules for p in module.parameters()} - taken
    for name, parameter in model.named_parameters():
        if id(parameter) in wanted:
            taken.add(id(parameter))
            yield unwrapped_name(name), parameter


def _block_of(module: nn.Module, blocks: Blocks) -> int | None:
    for index, block in enumerate(blocks.modules):
        if any(inner is module for inner in block.modules()):
            return index
    return None


def _rest_kind(model: nn.Module, rest: tuple[tuple[str, nn.Parameter], ...]) -> str:
    """Say in words what the root unit holds."""
    held = {id(p) for _, p in rest}
    parts = []
    for word, module in (("embedding", _embedding(model)), ("head", _head(model))):
        mine = {id(p) for p in module.parameters()} if module is not None else set()
        if mine & held:
            parts.append(word)
            held -= mine
    if held:
        parts.insert(1 if parts[:1] == ["embedding"] else 0, "norms and the rest" if len(held) > 2 else "norm")
    return ", ".join(parts) or "nothing"


def _refuse_mixed_dtypes(unit: PlannedUnit) -> None:
    """FSDP2 reduces the gradients of a unit in one buffer of one dtype."""
    by_dtype: dict[torch.dtype, str] = {}
    for name, parameter in unit.parameters:
        if parameter.requires_grad:
            by_dtype.setdefault(parameter.dtype, name)
    if len(by_dtype) > 1:
        listed = ", ".join(f"{name} in {dtype}" for dtype, name in by_dtype.items())
        raise BadInput(
            Problem(
                field="units",
                value=unit.name,
                reason=f"its trained parameters have several dtypes ({listed}), but a unit is reduced in one",
                fix="store them in one dtype, or make units of their own by units.wrap",
            )
        )
