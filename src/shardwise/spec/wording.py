"""What each field of the Job accepts, in plain words made from its type."""

from __future__ import annotations

import math
import re
import types
from collections.abc import Iterable
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import annotated_types
from pydantic.fields import FieldInfo

from shardwise.spec.job import Job
from shardwise.spec.problems import Problem, did_you_mean
from shardwise.spec.strict import Strict

SECTIONS: dict[str, type[Strict]] = {
    name: kind
    for name, info in Job.model_fields.items()
    for kind in (info.annotation, *get_args(info.annotation))
    if isinstance(kind, type) and issubclass(kind, Strict)
}
"""Keys of the Job that hold a mapping of their own."""

FIELDS: dict[str, FieldInfo] = {name: info for name, info in Job.model_fields.items() if name not in SECTIONS} | {
    f"{section}.{name}": info for section, model in SECTIONS.items() for name, info in model.model_fields.items()
}
"""Dotted key -> field, for every key that holds a value."""

_PATTERNED = {
    "activation_checkpointing": "true, false, full, none, selective, or every_2, every_3, ...",
    "cluster": "detect, cards (8xA10, 2x8xH100-SXM-80GB ib-8x400), machines of a cloud (2xp5.48xlarge), "
    "CPU processes (2xcpu), or a file (cluster.yaml)",
    "lora_targets": "all_linear, or a list of module names ([q_proj, v_proj])",
    "units.wrap": "a list of class names ([LlamaDecoderLayer])",
}
"""Fields whose type says less than a person needs."""

_YES_NO = {"yes": "true", "on": "true", "true": "true", "no": "false", "off": "false", "false": "false"}


def field_problem(field: str, written: str, value: object, line: int | None) -> Problem:
    """Return the problem of a value that `field` does not accept."""
    choices, phrases, kinds = _accepted(FIELDS[field])
    if field in _PATTERNED:
        reason, allowed = "is not one of the choices", _PATTERNED[field]
    elif choices and not phrases:
        reason, allowed = "is not one of the choices", ", ".join(choices)
    else:
        reason, allowed = "must be " + " or ".join([*phrases, *choices]), ""
    if value is None:
        reason = f"has no value; it {reason}" if reason.startswith("must") else "has no value"
    fix = _fix(value, kinds) or (did_you_mean(value, choices) if isinstance(value, str) else "")
    return Problem(field=written, value=value, reason=reason, allowed=allowed, fix=fix, line=line)


def accepted_text(field: str) -> str:
    """Return what `field` accepts, for documents."""
    choices, phrases, _ = _accepted(FIELDS[field])
    return _PATTERNED.get(field) or ", or ".join([*phrases, *([", ".join(choices)] if choices else [])])


def nullable(field: str) -> bool:
    """Tell whether null is a value of `field`."""
    return type(None) in get_args(FIELDS[field].annotation)


def unusable(value: object) -> str:
    """Return why no field can hold `value`, or ""."""
    if isinstance(value, list):
        return next((f"holds an item that {reason}" for reason in map(unusable, value) if reason), "")
    if isinstance(value, str) and not value.strip():
        return "is empty text"
    if isinstance(value, str) and ("\0" in value or any("\ud800" <= char <= "\udfff" for char in value)):
        return "holds what is not a character of text"
    if isinstance(value, int) and abs(value) >= 2**63:
        return "is too large a number"
    return ""


def _accepted(info: FieldInfo) -> tuple[list[str], list[str], set[type]]:
    """Return the literal choices of a field, phrases for everything else it accepts, and the types among these."""
    choices: list[str] = []
    phrases: list[str] = []
    kinds: set[type] = set()
    for base, bounds in _branches(info.annotation, info.metadata):
        if get_origin(base) is Literal:
            choices += [str(choice) for choice in get_args(base)]
        elif base is not type(None):
            phrases.append(_phrase(base, bounds))
            kinds.add(get_origin(base) or base)
    return choices, phrases, kinds


def _branches(annotation: Any, metadata: Iterable[Any]) -> list[tuple[Any, list[Any]]]:
    """Flatten unions and Annotated into pairs of a plain type and its constraints."""
    origin = get_origin(annotation)
    if origin in (Union, types.UnionType):
        return [branch for part in get_args(annotation) for branch in _branches(part, [])]
    if origin is Annotated:
        base, *extra = get_args(annotation)
        inner = [limit for item in extra for limit in (item.metadata if isinstance(item, FieldInfo) else [item])]
        return _branches(base, [*metadata, *inner])
    return [(annotation, list(metadata))]


def _phrase(base: Any, bounds: list[Any]) -> str:
    """Put one accepted type in words."""
    if base is bool:
        return "true or false"
    if base is str:
        return "text"
    if get_origin(base) is list:
        return "a list of names"
    words = "a whole number" if base is int else "a number"
    limits = []
    for bound in bounds:
        if isinstance(bound, annotated_types.Gt):
            limits.append(f"above {bound.gt}")
        elif isinstance(bound, annotated_types.Ge):
            limits.append(f"of {bound.ge} or more")
        elif isinstance(bound, annotated_types.Lt):
            limits.append(f"below {bound.lt}")
    return f"{words} {' and '.join(limits)}".strip()


def _fix(value: object, kinds: set[type]) -> str:
    """Return how to write a value of the wrong type, when that is plain."""
    numeric = bool(kinds & {int, float})
    if isinstance(value, str) and bool in kinds and value.lower() in _YES_NO:
        word = _YES_NO[value.lower()]
        return f"write {word} without quotes" if value.lower() == word else f"write true or false (here {word})"
    if isinstance(value, str) and numeric:
        plain = value.strip().replace("_", "").replace(",", "")
        number = bool(re.fullmatch(r"[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?", plain))
        return f"write {plain} without quotes" if number else ""
    if isinstance(value, float) and not math.isfinite(value):
        return "the number must be finite"
    if isinstance(value, float) and value.is_integer() and int in kinds and float not in kinds:
        return f"write {int(value)}"
    if isinstance(value, bool | int | float) and kinds == {str}:
        return "put text in quotes"
    return ""
