"""Model shapes: by name in the catalogue, of a folder or its config.json, of a hub id, or of sizes. No torch, and no
weights read.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from shardwise.catalogue.dimensions import model_from_dimensions
from shardwise.catalogue.entries import catalogue_name, model_names, nearest_name, spec_of_entry
from shardwise.catalogue.families.registry import spec_by_formula
from shardwise.spec.model_spec import ModelSpec
from shardwise.spec.problems import BadInput, Problem
from shardwise.spec.strict import Dtype

__all__ = [
    "catalogue_name",
    "checkpoint_dtype",
    "find_model",
    "model_from_config",
    "model_from_dimensions",
    "model_names",
]

_NOT_SHAPE = ("_name_or_path", "architectures", "auto_map", "quantization_config", "transformers_version")
"""Fields of a config.json that say nothing about the shape."""

_DTYPES: dict[str, Dtype] = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}

_HUB_SECONDS = 10.0
"""How long the hub may take to give a config.json."""


def find_model(text: str) -> ModelSpec:
    """Return the shape of a model.

    Args:
        text: A name in the catalogue (case and the signs `-`, `_`, `.` do not matter, nor does an end like
            `-Instruct`), a folder with config.json, the path of one, or a hub id, whose config.json is then read from
            the local cache or fetched.

    Raises:
        BadInput: nothing of the kind, with the nearest known name; or a configuration that cannot be used.
    """
    path = Path(text).expanduser()
    if (path / "config.json").is_file() and text.strip():
        return _from_file(path / "config.json", name=text)
    if path.is_file():
        return _from_file(path, name=text)
    known = catalogue_name(text)
    if known is not None:
        return spec_of_entry(known)
    is_folder = path.is_dir() and bool(text.strip())
    if re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", text) and not is_folder:
        return _from_hub(text)
    reason = "has no config.json" if is_folder else "is neither in the catalogue nor a folder with config.json"
    raise BadInput(Problem(field="model", value=text, reason=reason, fix=_remedy(text)))


def model_from_config(config: dict[str, Any], *, name: str) -> ModelSpec:
    """Return the shape of the causal LM that transformers builds of a configuration.

    Args:
        config: The content of a config.json.
        name: What it is called.

    Raises:
        BadInput: a kind of model that is not known by formula, or fields that are missing or wrong.
    """
    fields = {key: value for key, value in config.items() if key not in _NOT_SHAPE}
    if "torch_dtype" in fields:
        stored = fields.pop("torch_dtype")
        fields.setdefault("dtype", stored)
    quantised = "its checkpoint is quantised; the shape is that of the whole weights"
    return spec_by_formula(fields, name=name, note=quantised if config.get("quantization_config") else "")


def checkpoint_dtype(spec: ModelSpec) -> Dtype | None:
    """Return the dtype of a model's published weights; None when its configuration does not say."""
    return _DTYPES.get(str(spec.config.get("dtype")))


def _remedy(text: str) -> str:
    near = nearest_name(text)
    return near or "give a name in the catalogue, a folder with config.json, or a hub id (org/name)"


def _from_file(path: Path, *, name: str) -> ModelSpec:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BadInput(Problem(field="model", value=name, reason=f"{path.name} cannot be read: {error}")) from error
    if not isinstance(config, dict):
        raise BadInput(Problem(field="model", value=name, reason=f"{path.name} holds no mapping of fields"))
    return model_from_config(config, name=name)


def _from_hub(hub_id: str) -> ModelSpec:
    """Read a hub id's config.json from the local cache, else fetch it, once and without retries."""
    from huggingface_hub import get_session, get_token, hf_hub_url, try_to_load_from_cache

    cached = try_to_load_from_cache(hub_id, "config.json")
    if isinstance(cached, str):
        return _from_file(Path(cached), name=hub_id)
    token = get_token()
    headers = {"authorization": f"Bearer {token}"} if token else {}
    try:
        answer = get_session().get(hf_hub_url(hub_id, "config.json"), headers=headers, timeout=_HUB_SECONDS)
        answer.raise_for_status()
        config = answer.json()
    except Exception as error:
        raise _not_given(hub_id, error) from error
    if not isinstance(config, dict):
        raise BadInput(Problem(field="model", value=hub_id, reason="its config.json holds no mapping of fields"))
    return model_from_config(config, name=hub_id)


def _not_given(hub_id: str, error: Exception) -> BadInput:
    what = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    reason = f"is not in the catalogue, not cached, and the hub did not give its config.json: {what}"
    near = nearest_name(hub_id)
    return BadInput(Problem(field="model", value=hub_id, reason=reason, fix=near or "check the name and the network"))
