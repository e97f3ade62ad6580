"""The catalogue's data files."""

from __future__ import annotations

from importlib.resources import files
from typing import Any

import yaml


def read_data(name: str) -> Any:
    """Return what one YAML file of the catalogue holds, such as `gpus.yaml`."""
    text = files(__package__).joinpath(name).read_text(encoding="utf-8")
    loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    return yaml.load(text, Loader=loader)
