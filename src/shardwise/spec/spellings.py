"""Every accepted spelling of a value, brought to the Job's own form or refused: one small function per key."""

from __future__ import annotations

import re
from collections.abc import Callable

from shardwise.spec import not_built
from shardwise.spec import spellings_layout as layout
from shardwise.spec.keys import Given, unknown
from shardwise.spec.problems import did_you_mean
from shardwise.spec.wording import FIELDS, SECTIONS
from shardwise.spec.yaml_text import shown

_DTYPES = {
    "fp32": "fp32",
    "float32": "fp32",
    "float": "fp32",
    "bf16": "bf16",
    "bfloat16": "bf16",
    "fp16": "fp16",
    "float16": "fp16",
    "half": "fp16",
}
_OPTIMIZERS = {"adamw": "adamw", "adamw_torch": "adamw", "adamw_torch_8bit": "adamw_8bit", "sgd": "sgd"}


def resolve(given: Given) -> dict[str, object]:
    """Return the values of the Job's dotted keys that a setting stands for; raise BadInput when it is refused."""
    if given.name in ("fp16", "bf16") and given.target == "mixed_precision":
        return _precision_flag(given)
    if given.target == "optimizer":
        return _optimizer(given)
    if given.target == "loss_head":
        return layout.loss_head(given)
    if given.target in SECTIONS:
        return _SECTION_READERS[given.target](given)
    if given.target in FIELDS:
        read = _FIELD_READERS.get(given.target)
        return {given.target: read(given) if read is not None else given.value}
    missing = not_built.KEYS.get(given.target)
    if missing is None:
        raise unknown(given)
    if missing.asks_for_nothing(given.value):
        return {}
    raise given.refusal("is not built yet", fix=missing.instead)


def _text_section(field: str, what: str) -> Callable[[Given], dict[str, object]]:
    """Return the reader of a section that may be given as one text, the value of `field`."""

    def read(given: Given) -> dict[str, object]:
        if field == "data.path":
            _refuse_list(given)
        if not isinstance(given.value, str):
            raise given.refusal(
                f"must be {what}, or a mapping", fix="" if given.value is None else "put text in quotes"
            )
        return {field: given.value}

    return read


def _refuse_list(given: Given) -> object:
    if isinstance(given.value, list):
        raise given.refusal("a list of data sets is not built yet", fix="join the files into one")
    return given.value


def _checkpoint(given: Given) -> dict[str, object]:
    if given.value is False:
        raise given.refusal("a run always ends with a checkpoint", fix="write 0 for no others")
    if isinstance(given.value, bool) or not isinstance(given.value, int):
        raise given.refusal("must be a whole number of optimizer steps, or a mapping", allowed="every, keep")
    return {"checkpoint.every": given.value}


def _mixed_precision(given: Given) -> dict[str, object]:
    if not isinstance(given.value, str):
        raise given.refusal("must be a dtype or a mapping", allowed="fp32, bf16, fp16, {param_dtype: ...}")
    return _with_fp32_sums(_dtype(given))


def _precision_flag(given: Given) -> dict[str, object]:
    """Read `bf16: true` and `fp16: true`; false says nothing by itself."""
    if not isinstance(given.value, bool):
        raise given.refusal("must be true or false", fix=f"or write mixed_precision: {given.name}")
    return _with_fp32_sums(given.name) if given.value else {}


def _with_fp32_sums(param: object) -> dict[str, object]:
    roles = {"param_dtype": param, "reduce_dtype": "fp32", "output_dtype": "fp32"}
    return {f"mixed_precision.{role}": dtype for role, dtype in roles.items()}


def _dtype(given: Given) -> object:
    """Read a dtype name in any usual spelling."""
    if not isinstance(given.value, str):
        return given.value
    name = given.value.lower().removeprefix("torch.")
    if name in _DTYPES:
        return _DTYPES[name]
    if name in not_built.VALUES["mixed_precision"]:
        raise given.refusal("is not built yet", fix=not_built.VALUES["mixed_precision"][name])
    fix = "write fp32" if name in ("none", "no", "off") else did_you_mean(name, _DTYPES)
    raise given.refusal("is not a dtype that is built", allowed="fp32, bf16, fp16", fix=fix)


def _activation_checkpointing(given: Given) -> object:
    """Read true and false beside the names."""
    if isinstance(given.value, bool):
        return "full" if given.value else "none"
    return given.value


def _lora_targets(given: Given) -> object:
    value = given.value
    if value == "all-linear":
        return "all_linear"
    return value if value == "all_linear" else _module_names(given, ", or all_linear")


def _modules_to_save(given: Given) -> object:
    return _module_names(given, "")


def _module_names(given: Given, otherwise: str) -> object:
    if isinstance(given.value, str) and given.value.strip():
        names = ", ".join(re.split(r"[\s,]+", given.value.strip()))
        raise given.refusal(f"must be a list of module names{otherwise}", fix=f"write [{shown(names)}]")
    return given.value


def _optimizer(given: Given) -> dict[str, object]:
    """Read an optimizer by this tool's or by Trainer's name, some of which name an implementation too."""
    if not isinstance(given.value, str):
        return {"optimizer": given.value}
    name = given.value.lower()
    if name in not_built.VALUES["optimizer"]:
        raise given.refusal("is not built yet", fix=not_built.VALUES["optimizer"][name])
    if name.startswith("paged_"):
        fix = "write adamw with offload: optimizer, which keeps states in host memory"
        raise given.refusal("pages its states, which bitsandbytes does not do for sharded parameters", fix=fix)
    if "bnb" in name:
        fix = "write adamw_8bit, which is torchao's"
        raise given.refusal("is bitsandbytes', which does not know sharded parameters (DTensor)", fix=fix)
    if name == "adamw_torch_fused":
        return {"optimizer": "adamw", "optimizer_implementation": "fused"}
    return {"optimizer": _OPTIMIZERS.get(name, given.value)}


def _implementation(given: Given) -> object:
    return given.value.lower().replace("-", "_") if isinstance(given.value, str) else given.value


_SECTION_READERS: dict[str, Callable[[Given], dict[str, object]]] = {
    "model": _text_section("model.path", "a folder or a hub id"),
    "data": _text_section("data.path", "a file"),
    "fsdp": layout.fsdp,
    "mixed_precision": _mixed_precision,
    "mesh": layout.mapping_only("mesh"),
    "units": layout.units,
    "prefetch": layout.prefetch,
    "reduce_scatter": layout.mapping_only("reduce_scatter"),
    "offload": layout.offload,
    "checkpoint": _checkpoint,
    "log": layout.mapping_only("log"),
}
_FIELD_READERS: dict[str, Callable[[Given], object]] = {
    "model.dtype": _dtype,
    "data.path": _refuse_list,
    "lora_targets": _lora_targets,
    "lora_modules_to_save": _modules_to_save,
    "optimizer_implementation": _implementation,
    "optimizer_state_dtype": _dtype,
    "fsdp.strategy": layout.strategy,
    "fsdp.reshard_after_forward": layout.reshard,
    **{f"mixed_precision.{role}_dtype": _dtype for role in ("param", "reduce", "storage", "output", "buffer")},
    "activation_checkpointing": _activation_checkpointing,
    "units.wrap": layout.wrap,
    "prefetch.forward": layout.depth,
    "prefetch.backward": layout.depth,
    "accumulation": layout.accumulation,
}
