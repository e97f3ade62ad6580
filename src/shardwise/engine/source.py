"""Where a model comes from: its folder, its configuration, its weight files."""

from __future__ import annotations

import difflib
import hashlib
import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from shardwise.engine.dtypes import DTYPE_NAME
from shardwise.spec.job import ModelChoice
from shardwise.spec.problems import BadInput, Problem
from shardwise.spec.strict import Dtype

_SAMPLES, _SAMPLE_BYTES = 16, 65536
_STORED_DTYPE = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


class ModelNotHere(BadInput):
    """The model is neither a local folder nor cached nor reachable."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """A model on disk."""

    folder: Path
    """Folder with `config.json`, tokenizer and safetensors."""
    config: Any
    """transformers' configuration."""
    files: dict[str, Path]
    """Tensor name in the checkpoint -> file that holds it."""
    dtype: Dtype
    """Dtype in which most of the checkpoint's bytes are stored."""

    def tokenizer(self) -> Any:
        """Load the model's tokenizer; raises BadInput when the folder has none that works."""
        try:
            return AutoTokenizer.from_pretrained(self.folder)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, ImportError) as error:
            reason = f"its tokenizer cannot be loaded: {str(error).strip().splitlines()[0]}"
            fix = "put tokenizer.json and tokenizer_config.json beside the weights"
            raise BadInput(Problem(field="model", value=str(self.folder), reason=reason, fix=fix)) from error

    def digest(self) -> str:
        """Return a hash of each weight file's name, size, header and samples of its content."""
        found = hashlib.sha256()
        for path in sorted(set(self.files.values())):
            size = path.stat().st_size
            found.update(f"{path.name}:{size}".encode())
            with path.open("rb") as raw:
                for part in range(_SAMPLES):
                    raw.seek(max(0, size - _SAMPLE_BYTES) * part // (_SAMPLES - 1))
                    found.update(raw.read(_SAMPLE_BYTES))
        return found.hexdigest()


def locate(choice: ModelChoice, *, weights: bool = True) -> Path:
    """Return the local folder of a model, downloading it from the hub when it is a hub id.

    Args:
        choice: The job's `model`.
        weights: Fetch the weight files too, not only configuration and tokenizer.

    Raises:
        ModelNotHere: when there is no such folder and the hub does not give it.
    """
    folder = Path(choice.path).expanduser()
    if folder.is_dir():
        if choice.revision is not None:
            reason = f"has no effect: {choice.path} is a folder, not a hub id"
            raise BadInput(Problem(field="model.revision", value=choice.revision, reason=reason, fix="remove it"))
        return folder
    if choice.path.count("/") != 1 or choice.path.startswith((".", "/", "~")):
        siblings = [p.name for p in folder.parent.iterdir() if p.is_dir()] if folder.parent.is_dir() else []
        near = difflib.get_close_matches(folder.name, siblings, n=1)
        fix = (
            f"did you mean {str(folder.parent / near[0])!r}?" if near else "give a folder with config.json, or a hub id"
        )
        raise ModelNotHere(Problem(field="model", value=choice.path, reason="is not a folder", fix=fix))
    return _download(choice, weights)


def _download(choice: ModelChoice, weights: bool) -> Path:
    from huggingface_hub import snapshot_download

    wanted = ["*.json", "*.txt", "*.model", "*.jinja"] + (["*.safetensors"] if weights else [])
    for local_only in (True, False):
        try:
            found = Path(
                snapshot_download(
                    choice.path, revision=choice.revision, allow_patterns=wanted, local_files_only=local_only
                )
            )
        except Exception as error:  # noqa: BLE001 - the hub client raises many kinds; the last is reported
            last: Exception = error
            continue
        if not weights or any(found.glob("*.safetensors")):
            return found
    raise ModelNotHere(
        Problem(
            field="model",
            value=choice.path,
            reason=f"is neither a local folder nor cached, and the hub did not give it ({type(last).__name__})",
            fix="check the name and the network, or download it first and give its folder",
        )
    )


def read_config(folder: Path) -> Any:
    """Read a model folder's configuration.

    Raises:
        BadInput: no or unreadable `config.json`, or a model type that transformers does not know.
    """
    if not (folder / "config.json").is_file():
        raise BadInput(
            Problem(
                field="model", value=str(folder), reason="has no config.json", fix="give a transformers model folder"
            )
        )
    try:
        return AutoConfig.from_pretrained(folder)
    except (ValueError, OSError, KeyError) as error:
        reason = str(error).strip().splitlines()[0]
        raise BadInput(
            Problem(field="model", value=str(folder), reason=f"its config.json cannot be used: {reason}")
        ) from error


def _weight_files(folder: Path) -> dict[str, Path]:
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        names = json.loads(index.read_text())["weight_map"]
        missing = sorted({file for file in names.values() if not (folder / file).is_file()})
        if missing:
            raise BadInput(
                Problem(
                    field="model",
                    value=str(folder),
                    reason=f"the index names weight files that are not here: {', '.join(missing[:3])}",
                    fix="download the model again",
                )
            )
        return {name: folder / file for name, file in names.items()}
    single = folder / "model.safetensors"
    if not single.is_file():
        raise BadInput(
            Problem(
                field="model",
                value=str(folder),
                reason="has no model.safetensors and no index of safetensors files",
                fix="convert the weights with save_pretrained of transformers",
            )
        )
    with safe_open(single, framework="pt") as opened:
        return dict.fromkeys(opened.keys(), single)


def _stored_dtype(folder: Path, files: dict[str, Path]) -> Dtype:
    counts: Counter[str] = Counter()
    for path in sorted(set(files.values())):
        with path.open("rb") as raw:
            header = json.loads(raw.read(int.from_bytes(raw.read(8), "little")))
        for name, entry in header.items():
            if name != "__metadata__":
                begin, end = entry["data_offsets"]
                counts[entry["dtype"]] += end - begin
    most = counts.most_common(1)[0][0] if counts else "none"
    if most not in _STORED_DTYPE:
        raise BadInput(
            Problem(
                field="model",
                value=str(folder),
                reason=f"its weights are stored as {most}",
                allowed="F32, BF16, F16",
                fix="quantised checkpoints are not built yet: give the original weights",
            )
        )
    return DTYPE_NAME[_STORED_DTYPE[most]]


def open_source(choice: ModelChoice) -> Source:
    """Find a model (downloading it when it is a hub id), read its configuration and list its weights.

    Raises:
        BadInput: the model is not here or not usable.
    """
    return open_folder(locate(choice))


def declared_dtype(config: Any) -> Dtype:
    """Return the dtype that a configuration declares for its weights; fp32, transformers' default, when none."""
    return DTYPE_NAME.get(config.dtype, "fp32")


def has_weights(folder: Path) -> bool:
    """Whether a model folder holds weight files, whole or not."""
    return any(folder.glob("*.safetensors*"))


def open_folder(folder: Path) -> Source:
    """Read a model folder's configuration and list its weights (no weight is read yet).

    Raises:
        BadInput: the folder is not a usable model.
    """
    config = read_config(folder)
    try:
        files = _weight_files(folder)
        dtype = _stored_dtype(folder, files)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BadInput(
            Problem(field="model", value=str(folder), reason=f"its weight files cannot be read: {error}")
        ) from error
    except Exception as error:
        if type(error).__name__ != "SafetensorError":
            raise
        raise BadInput(
            Problem(field="model", value=str(folder), reason=f"its weight files are damaged: {error}")
        ) from error
    return Source(folder=folder, config=config, files=files, dtype=dtype)


def build_on_meta(config: Any, *, attention: str | None, dtype: torch.dtype) -> Any:
    """Return the causal LM of a configuration without memory behind it, in training mode, cache off.

    Args:
        config: transformers' configuration.
        attention: Its attention implementation; None: transformers' choice.
        dtype: Storage dtype of the weights.

    Raises:
        BadInput: no causal LM for this configuration, or the attention implementation is not usable here.
    """
    asked = {} if attention is None else {"attn_implementation": attention}
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=dtype, **asked)
    except ImportError as error:
        reason = str(error).strip().splitlines()[0]
        raise BadInput(
            Problem(field="model.attention", value=attention, reason=f"cannot be used here: {reason}", fix="use sdpa")
        ) from error
    except ValueError as error:
        reason = str(error).strip().splitlines()[0]
        field = "model.attention" if attention is not None and "attention" in reason.lower() else "model"
        raise BadInput(
            Problem(field=field, value=attention if "." in field else config.model_type, reason=reason)
        ) from error
    model.config.use_cache = False
    return model.train()
