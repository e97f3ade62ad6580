"""Machines of the large clouds by the names of their types: `p5.48xlarge`, `a3-megagpu-8g`, `ND96isr_H100_v5`."""

from __future__ import annotations

import re
from functools import cache

from shardwise.catalogue.data import read_data
from shardwise.spec.strict import PositiveInt, Strict


class Instance(Strict):
    """One entry of `instances.yaml`."""

    cloud: str
    """Who rents it out."""
    devices: PositiveInt
    """Devices, as torch counts them."""
    card: str
    """Name in `gpus.yaml`."""
    network: str | None = None
    """To its like, as `Cluster.network`; None: not stated."""
    gib: PositiveInt | None = None
    """Host memory in GiB; None: not stated."""
    cpus: PositiveInt
    """vCPUs, as the cloud counts them."""
    cores: PositiveInt
    """Physical cores."""
    peer_to_peer: bool | None = None
    """Where devices reach each other's memory otherwise than the card can."""
    note: str = ""
    """What else tells it from a machine of one's own."""
    source: str
    """Of all of this."""


@cache
def instances() -> dict[str, Instance]:
    """Return every type by its name in the catalogue."""
    content = read_data("instances.yaml")
    found = {}
    for cloud in content["clouds"]:
        shared = {key: value for key, value in cloud.items() if key not in ("types", "name", "threads")}
        for name, entry in cloud["types"].items():
            cores = {"cores": entry["cpus"] // cloud["threads"]} if "cores" not in entry else {}
            found[name] = Instance.model_validate({"cloud": cloud["name"], **shared, **cores, **entry})
    return found


def find_instance(text: str) -> tuple[str, Instance] | None:
    """Return the type that people mean by `text` with its name; None: there is none."""
    name = _by_key().get(_key(text))
    return None if name is None else (name, instances()[name])


@cache
def _by_key() -> dict[str, str]:
    return {_key(name): name for name in instances()}


def _key(text: str) -> str:
    """Return a name without case and separators, and without what clouds put before it or people cut off behind."""
    plain = re.sub(r"[^a-z0-9]", "", text.lower().removeprefix("ml.").removeprefix("standard_"))
    return re.sub(r"(?<=\d)xl$", "xlarge", plain)
