"""A Cluster as a file: written by a probe or by hand, read where a cluster's name may stand."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from shardwise.catalogue.cards import cards, find_gpu, gpu
from shardwise.catalogue.networks import check_network
from shardwise.spec.cluster import CLUSTER_FILES, CPU, Cluster
from shardwise.spec.problems import BadInput, Problem, did_you_mean
from shardwise.spec.yaml_text import YamlText, dump_yaml, read_yaml, shown

HEADING = """# A cluster for shardwise: set `cluster` in a job, or --cluster, to the name of this file.
# gpu is a card of the catalogue, a card given whole, or cpu. Sizes are bytes, rates bytes per second in one direction.
"""

LEAST_BYTES = 2**28
"""Of a card or a host: less is gigabytes taken for bytes."""
LEAST_FLOPS = 1e9
"""Per second: less is TFLOPS taken for FLOPs."""
LEAST_RATE = 1e6
"""Bytes per second: less is GB taken for bytes."""

_EXAMPLES = {
    "bytes": "80 GB are 80000000000",
    "FLOPs per second": "312 TFLOPS are 312.0e+12",
    "bytes per second": "300 GB/s are 300.0e+9",
}
"""Unit -> how a figure is written in it."""

_NO_YAML = re.compile("[\x7f-\x9f\u2028\u2029\ufeff\ufffe\uffff]")
"""Characters that JSON allows in text as they are, and YAML does not or takes for the end of a line."""


def read_cluster(path: Path) -> Cluster:
    """Read a cluster from a `.yaml`, `.yml` or `.json` file; without a `name` it has the file's.

    Raises:
        BadInput: no such file; fields that are unknown, missing or of no use, each by its name and line.
    """
    content = read_yaml(path, needs="'nodes' and 'per_node'")
    if content.problems:
        raise BadInput(content.problems)
    values: dict[str, Any] = {"name": path.name, **content.values}
    with _at_line(content, "gpu"):
        values["gpu"] = _card(values.get("gpu", CPU), _place(path, "gpu"))
    if isinstance(values.get("network"), str):
        values["network"] = values["network"].strip().lower()
    try:
        found = Cluster.model_validate_json(json.dumps(values))
    except ValidationError as error:
        details = error.errors(include_url=False, include_context=False)
        raise BadInput(_problem(path, content, detail) for detail in details) from None
    problems = [problem for each in _implausible(found) for problem in _too_small(path, content, *each)]
    if problems:
        raise BadInput(problems)
    if found.network is not None:
        with _at_line(content, "network"):
            check_network(found.network, found.gpu, found.world, field=_place(path, "network"))
    return found


def _card(card: object, field: str) -> object:
    """Return a card of the catalogue whole, and anything else as it stands; None: CPU processes."""
    if isinstance(card, int) and not isinstance(card, bool):
        card = str(card)
    if card is None or (isinstance(card, str) and card.strip().lower() == CPU):
        return None
    if isinstance(card, str):
        return find_gpu(card, field=field).model_dump(mode="json")
    if not isinstance(card, dict):
        allowed = f"a card of the catalogue, {CPU}, or a card given whole with at least name and usable"
        raise BadInput(Problem(field=field, value=card, reason="is no card", allowed=allowed))
    return card


@contextmanager
def _at_line(content: YamlText, field: str) -> Iterator[None]:
    """Say in which line of the file a refused field stands."""
    try:
        yield
    except BadInput as error:
        line = content.lines.get(field)
        raise BadInput(replace(problem, line=line) for problem in error.problems) from None


def _implausible(cluster: Cluster) -> Iterator[tuple[str, float, float, str]]:
    """Yield figures that are too small for their unit: field, value, the least that is one, and the unit.

    Whoever writes 80 for a card of 80 GB, or 312 for 312 TFLOPS, gets an answer otherwise that is off by 10^9.
    """
    if cluster.host_bytes is not None:
        yield "host_bytes", cluster.host_bytes, LEAST_BYTES, "bytes"
    if cluster.gpu is None:
        return
    yield "gpu.usable.bytes", cluster.gpu.usable.bytes, LEAST_BYTES, "bytes"
    rates = cluster.gpu.rates
    if rates is None:
        return
    for dtype, figure in rates.products.items():
        yield f"gpu.rates.products.{dtype}.value", figure.value, LEAST_FLOPS, "FLOPs per second"
    for name in ("memory", "link", "host"):
        yield f"gpu.rates.{name}.value", getattr(rates, name).value, LEAST_RATE, "bytes per second"


def _too_small(path: Path, content: YamlText, field: str, value: float, least: float, unit: str) -> list[Problem]:
    if value >= least:
        return []
    reason, fix = f"is too little to be {unit}", f"write it in {unit}: {_EXAMPLES[unit]}"
    return [Problem(field=_place(path, field), value=value, reason=reason, fix=fix, line=_line(content, field))]


def write_cluster(cluster: Cluster, path: Path) -> None:
    """Write a cluster to a new file, from which `read_cluster` makes an equal one.

    A card that is just as in the catalogue is written by its name.

    Raises:
        BadInput: there is such a file already, its folder is not there, or its name does not end as a cluster's does.
    """
    if path.suffix.lower() not in CLUSTER_FILES:
        reason = "does not end as a cluster's file does"
        raise BadInput(Problem(field=shown(str(path)), reason=reason, allowed=", ".join(CLUSTER_FILES)))
    values = cluster.model_dump(mode="json", exclude_defaults=True)
    if cluster.gpu is None:
        values["gpu"] = CPU
    elif cluster.gpu.name in cards() and cluster.gpu == gpu(cluster.gpu.name):
        values["gpu"] = cluster.gpu.name
    text = _json(values) if path.suffix.lower() == ".json" else HEADING + dump_yaml(values, short_lists=True)
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        reason = "is there already, and is not written over"
        raise BadInput(Problem(field=shown(str(path)), reason=reason, fix="choose another name")) from None
    except OSError as error:
        raise BadInput(Problem(field=shown(str(path)), reason=f"cannot be written ({error.strerror})")) from None


def _json(values: dict[str, Any]) -> str:
    """Return JSON that YAML reads as the same: what it does not allow in text is escaped, and nothing else is."""
    text = json.dumps(values, indent=1, ensure_ascii=False) + "\n"
    return _NO_YAML.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def _place(path: Path, field: str) -> str:
    return f"{shown(str(path))}: {field}"


def _problem(path: Path, content: YamlText, detail: ErrorDetails) -> Problem:
    """Put what pydantic says of one field in words."""
    place = detail["loc"]
    field = _place(path, _dotted(place))
    line = _line(content, _dotted(place))
    if detail["type"] == "missing":
        return Problem(field=field, reason="is missing", line=line)
    if detail["type"] == "extra_forbidden":
        near = did_you_mean(str(place[-1]), Cluster.model_fields) if len(place) == 1 else ""
        return Problem(field=field, reason="is not a field of a cluster", fix=near, line=line)
    value = detail["input"]
    reason = detail["msg"].removeprefix("Value error, ").replace("Input should be", "has to be")
    if detail["type"] in ("too_short", "model_type", "dict_type"):
        reason = "is empty" if detail["type"] == "too_short" else "has to be a mapping of keys to values"
    shown_value = value if isinstance(value, str | int | float) else None
    return Problem(field=field, value=shown_value, reason=reason, line=line)


def _line(content: YamlText, field: str) -> int | None:
    """Return the line of a field, or of the nearest that it is part of."""
    parts = field.split(".")
    parents = (".".join(parts[:end]) for end in range(len(parts), 0, -1))
    return next((content.lines[parent] for parent in parents if parent in content.lines), None)


def _dotted(place: tuple[int | str, ...]) -> str:
    return ".".join(str(part) for part in place)
