"""The catalogue of public model shapes: its entries, and every name that people give them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from importlib import resources
from typing import Any

import yaml

from shardwise.catalogue.families.registry import spec_by_formula
from shardwise.spec.model_spec import ModelSpec
from shardwise.spec.problems import did_you_mean

_SUFFIXES = ("instruct", "chat", "base", "hf", "it", "pt")
"""Ends of names that leave the shape as it is."""


def model_names() -> tuple[str, ...]:
    """Return the names in the catalogue, in its order."""
    return tuple(_entries())


def catalogue_name(text: str) -> str | None:
    """Return the name of the entry that a text means; None when there is none.

    Case and the signs `-`, `_`, `.` do not matter, nor does an end like `-Instruct`.
    """
    names, key = _by_key(), _key(text)
    return names.get(key) or names.get(_shortened(key))


def nearest_name(text: str) -> str:
    """Return "did you mean 'x'?" for the nearest name of any entry, or ""."""
    return did_you_mean(text, [name for entry in _entries() for name in names_of(entry)])


def names_of(entry: str) -> Iterator[str]:
    """Yield everything that an entry is called."""
    content = _entries()[entry]
    yield entry
    yield from content.get("also", ())
    for hub_id in content["hub"]:
        yield hub_id
        yield hub_id.rpartition("/")[2]


def published_parameters(entry: str) -> float:
    """Return the published number of parameters of an entry, tied weights counted once."""
    return float(_entries()[entry]["parameters"])


def config_of_entry(entry: str) -> dict[str, Any]:
    """Return the configuration of an entry."""
    return dict(_entries()[entry]["config"])


@cache
def spec_of_entry(entry: str) -> ModelSpec:
    """Return the shape of an entry, the same object each time."""
    return spec_by_formula(config_of_entry(entry), name=entry, note=_entries()[entry].get("note", ""))


@cache
def _entries() -> dict[str, dict[str, Any]]:
    text = resources.files("shardwise.catalogue").joinpath("models.yaml").read_text(encoding="utf-8")
    loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    entries: dict[str, dict[str, Any]] = yaml.load(text, Loader=loader)
    return entries


@cache
def _by_key() -> dict[str, str]:
    found: dict[str, str] = {}
    for entry in _entries():
        for name in names_of(entry):
            found.setdefault(_key(name), entry)
    for key, entry in list(found.items()):
        found.setdefault(_shortened(key), entry)
    return found


def _key(name: str) -> str:
    """Return what stays of a name: signs are dropped, but between digits, where all are one (`1.3b` is not `13b`)."""
    return re.sub(r"[-_. ]", "", re.sub(r"(?<=\d)[-_. ]+(?=\d)", ":", name.lower()))


def _shortened(key: str) -> str:
    """Return a key without ends that leave the shape as it is."""
    while True:
        end = next((suffix for suffix in _SUFFIXES if key.endswith(suffix)), None)
        if end is None:
            return key
        key = key.removesuffix(end)
