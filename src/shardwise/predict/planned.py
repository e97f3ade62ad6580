"""Which modules become units, by formula: the same decisions as `engine.units.plan_units`, without the model."""

from __future__ import annotations

from dataclasses import dataclass, replace

from shardwise.predict.adapted import Adapted, Parameter, Scope, lies_in
from shardwise.spec.layout import Units
from shardwise.spec.model_spec import ModelSpec
from shardwise.spec.problems import BadInput, Problem, did_you_mean

ROOT = "root"

OUTSIDE = -1
"""Stands for "no block" where a variant is asked for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Unit:
    """Modules that are gathered together; those of blocks of one variant are one Unit."""

    name: str
    """Name in the model; within its block for a unit that is a block (empty) or lies in one."""
    kind: str
    """Class of the module, or what the unit is."""
    parameters: tuple[Parameter, ...]
    """Its parameters; names within the block, or in the model."""
    stays_gathered: bool
    """It is not freed between forward and backward: the head, and the root."""
    variant: int
    """Place in `Adapted.variants` of its block; OUTSIDE."""
    trains_inside: bool
    """Some parameter of its modules is trained, those of units within included."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Planned:
    """The units of a model in the order in which forward uses them: before, those of each block, after, the root."""

    before: tuple[Unit, ...]
    """Units before the blocks."""
    inside: tuple[tuple[Unit, ...], ...]
    """Units of a block, by its variant."""
    after: tuple[Unit, ...]
    """Units after the blocks, the head last."""
    root: Unit
    """All that no other unit holds."""


def planned_units(model: ModelSpec, adapted: Adapted, units: Units) -> Planned:
    """Return the units of a model.

    Args:
        model: The plain model.
        adapted: The same with its adapters.
        units: What is asked for.

    Raises:
        BadInput: class names that match nothing, or that would gather several blocks at once.
    """
    outside = adapted.outside
    own = _embedding_and_head(model, units)
    wrapped = _wrapped_outside(model, adapted, units) if units.wrap else ()
    taken: set[str] = set()
    found: dict[str, Unit] = {}
    for name in (*own, *wrapped):
        modules = tuple(name.split(" + "))
        held = tuple(p for p in outside.parameters if any(lies_in(p.name, one) for one in modules))
        kinds = dict(outside.modules)
        found[name] = Unit(
            name=name,
            kind=" + ".join(kinds[one] for one in modules),
            parameters=tuple(p for p in held if p.name not in taken),
            stays_gathered=model.head in modules,
            variant=OUTSIDE,
            trains_inside=any(p.trained for p in held),
        )
        taken |= {p.name for p in held}
    order = {name: place for place, (name, _) in enumerate(outside.modules)}
    ordered = sorted(found.values(), key=lambda unit: (unit.name == model.head, order[unit.name.split(" + ")[0]]))
    blocks_at = order[model.block_list]
    found_inside = [_inside(scope, place, units) for place, scope in enumerate(adapted.variants)]
    rest = tuple(p for p in outside.parameters if p.name not in taken)
    rest += tuple(
        replace(p, name=f"{model.block_list}.{index}.{p.name}")
        for index, variant in enumerate(adapted.blocks)
        for p in found_inside[variant][1]
    )
    before = tuple(u for u in ordered if order[u.name.split(" + ")[0]] < blocks_at and u.parameters)
    return Planned(
        before=before,
        inside=tuple(made for made, _ in found_inside),
        after=tuple(u for u in ordered if u.parameters and u not in before),
        root=Unit(
            name=ROOT,
            kind=_rest_kind(model, rest),
            parameters=rest,
            stays_gathered=True,
            variant=OUTSIDE,
            trains_inside=True,
        ),
    )


def _embedding_and_head(model: ModelSpec, units: Units) -> tuple[str, ...]:
    """Return embedding and head where they are units of their own; tied, they are one."""
    if model.tied:
        return (f"{model.embedding} + {model.head}",) if "own" in (units.embedding, units.head) else ()
    asked = ((model.embedding, units.embedding), (model.head, units.head))
    return tuple(name for name, place in asked if place == "own")


def _wrapped_outside(model: ModelSpec, adapted: Adapted, units: Units) -> tuple[str, ...]:
    """Return the modules outside blocks whose class is wanted, innermost first; refuse what holds blocks."""
    outside = adapted.outside
    apart = (model.embedding, model.head, *outside.unreached)
    found: list[str] = []
    for wanted in units.wrap:
        holder = next(
            (name for name, kind in outside.modules if kind == wanted and lies_in(model.block_list, name)), None
        )
        if holder is not None:
            reason = (
                f"{holder or 'the model'} holds {model.layers} blocks: as one unit they would all be gathered at once"
            )
            block = model.kinds[0].modules[0].kind
            raise BadInput(Problem(field="units.wrap", value=wanted, reason=reason, fix=f"write {block}, or remove it"))
        here = _outermost(outside, wanted, apart)
        inside = any(_outermost(scope, wanted, scope.unreached) for scope in adapted.variants)
        if not here and not inside:
            known = sorted({kind for scope in (outside, *adapted.variants) for _, kind in scope.modules})
            reason = "no module of this class, outside embedding and head, holds parameters"
            allowed, fix = ", ".join(known), did_you_mean(wanted, known)
            raise BadInput(Problem(field="units.wrap", value=wanted, reason=reason, allowed=allowed, fix=fix))
        found += here
    order = {name: place for place, (name, _) in enumerate(outside.modules)}
    return tuple(sorted(dict.fromkeys(found), key=lambda name: -order[name]))


def _outermost(scope: Scope, wanted: str, apart: tuple[str, ...]) -> list[str]:
    """Return the outermost modules of a class, those in `apart` left out."""
    found: list[str] = []
    for name, kind in scope.modules:
        if kind == wanted and not any(name == one or lies_in(name, one) for one in (*found, *apart)):
            found.append(name)
    return found


def _inside(scope: Scope, variant: int, units: Units) -> tuple[tuple[Unit, ...], tuple[Parameter, ...]]:
    """Return the units of a block, in the order of its modules, and the parameters that it leaves to the root."""
    names = [""]
    if units.wrap:
        names = list(dict.fromkeys(n for wanted in units.wrap for n in _outermost(scope, wanted, scope.unreached)))
    order = {name: place for place, (name, _) in enumerate(scope.modules)}
    kinds = dict(scope.modules)
    taken: set[str] = set()
    made: list[Unit] = []
    for name in sorted(names, key=lambda name: -order[name]):
        held = tuple(p for p in scope.parameters if lies_in(p.name, name))
        own = tuple(p for p in held if p.name not in taken)
        taken |= {p.name for p in held}
        if own:
            made.append(
                Unit(
                    name=name,
                    kind=kinds[name],
                    parameters=own,
                    stays_gathered=False,
                    variant=variant,
                    trains_inside=any(p.trained for p in held),
                )
            )
    return tuple(reversed(made)), tuple(p for p in scope.parameters if p.name not in taken)


def _rest_kind(model: ModelSpec, rest: tuple[Parameter, ...]) -> str:
    """Say in words what the root unit holds."""
    held = {p.name for p in rest}
    parts = []
    for word, name in (("embedding", model.embedding), ("head", model.head)):
        mine = {one for one in held if lies_in(one, name)}
        if mine:
            parts.append(word)
            held -= mine
    if held:
        parts.insert(1 if parts[:1] == ["embedding"] else 0, "norms and the rest" if len(held) > 2 else "norm")
    return ", ".join(parts) or "nothing"
