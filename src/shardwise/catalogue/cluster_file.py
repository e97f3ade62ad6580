"""A Cluster as a file: written by a probe or by hand, read where a cluster's name may stand."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from shardwise.catalogue.clusters import cards, find_gpu, gpu
from shardwise.catalogue.networks import check_network
from shardwise.spec.cluster import CLUSTER_FILES, CPU, Cluster
from shardwise.spec.problems import BadInput, Problem, did_you_mean
from shardwise.spec.yaml_text import YamlText, dump_yaml, read_yaml, shown

HEADING = """# A cluster for shardwise: set `cluster` in a job, or --cluster, to the name of this file.
# gpu is a card of the catalogue, a card given whole, or cpu. Sizes are bytes, rates bytes per second in one direction.
"""

_NO_YAML = re.compile("[\x7f-\x9f\u2028\u2029\ufeff\ufffe\uffff]")
"""Characters that JSON allows in text as they are, and YAML does not or takes for the end of a line."""


def read_cluster(path: Path) -> Cluster:
    """Read a cluster from a `.yaml`, `.yml` or `.json` file; without a `name` it has the file's.

    Raises:
        BadInput: no such file; fields that are unknown, missing or of no use, each by its name and line.
    """
    content = read_yaml(path)
    if content.problems:
        raise BadInput(content.problems)
    values: dict[str, Any] = {"name": path.name, **content.values}
    card = values.get("gpu", CPU)
    if isinstance(card, str):
        field = _place(path, "gpu")
        values["gpu"] = None if card.lower() == CPU else find_gpu(card, field=field).model_dump(mode="json")
    try:
        found = Cluster.model_validate_json(json.dumps(values))
    except ValidationError as error:
        details = error.errors(include_url=False, include_context=False)
        raise BadInput(_problem(path, content, detail) for detail in details) from None
    if found.network is not None:
        check_network(found.network, found.gpu, found.world, field=_place(path, "network"))
    return found


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
    parents = (_dotted(place[:end]) for end in range(len(place), 0, -1))
    line = next((content.lines[parent] for parent in parents if parent in content.lines), None)
    if detail["type"] == "missing":
        return Problem(field=field, reason="is missing", line=line)
    if detail["type"] == "extra_forbidden":
        near = did_you_mean(str(place[-1]), Cluster.model_fields) if len(place) == 1 else ""
        return Problem(field=field, reason="is not a field of a cluster", fix=near, line=line)
    value = detail["input"]
    reason = detail["msg"].removeprefix("Value error, ").replace("Input should be", "has to be")
    shown_value = value if isinstance(value, str | int | float) else None
    return Problem(field=field, value=shown_value, reason=reason, line=line)


def _dotted(place: tuple[int | str, ...]) -> str:
    return ".".join(str(part) for part in place)
