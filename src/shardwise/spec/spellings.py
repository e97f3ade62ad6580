"""Every accepted spelling of a value, brought to the Job's own form or refused: one small function per key."""

from __future__ import annotations

import re
from collections.abc import Callable

from shardwise.spec import not_built
from shardwise.spec.keys import Given, unknown
from shardwise.spec.problems import did_you_mean
from shardwise.spec.wording import FIELDS, SECTIONS
from shardwise.spec.yaml_text import shown

_STRATEGIES = {
    "full_shard": "FULL_SHARD",
    "zero3": "FULL_SHARD",
    "shard_grad_op": "SHARD_GRAD_OP",
    "zero2": "SHARD_GRAD_OP",
    "no_shard": "NO_SHARD",
    "ddp": "NO_SHARD",
    "auto": "auto",
}
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


def resolve(given: Given) -> dict[str, object]:
    """Return the values of the Job's dotted keys that a setting stands for; raise BadInput when it is refused."""
    if given.name in ("fp16", "bf16") and given.target == "mixed_precision":
        return _precision_flag(given)
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


def _log(given: Given) -> dict[str, object]:
    raise given.refusal("must be a mapping", allowed="every, evaluate_every, tensorboard")


def _fsdp(given: Given) -> dict[str, object]:
    """Read a string or a list of options, as in transformers' Trainer and accelerate."""
    items = given.value if isinstance(given.value, list) else [given.value]
    if isinstance(given.value, bool):
        raise given.refusal("must name a strategy", fix="write no_shard to shard nothing, or auto")
    if not all(isinstance(item, str) for item in items):
        raise given.refusal("must be a strategy, a list of options, or a mapping", allowed=_strategy_names())
    tokens = [token for item in items for token in re.split(r"[\s,]+", str(item)) if token]
    named = [_strategy_of(token, given) for token in tokens if _token(token) != "auto_wrap"]
    if not tokens:
        raise given.refusal("names no strategy", fix="write auto to have one chosen")
    if len(set(named)) > 1:
        raise given.refusal(f"contradicts itself: {' and '.join(dict.fromkeys(named))}", fix="name one strategy")
    return {"fsdp.strategy": named[0] if named else "auto"}


def _strategy(given: Given) -> object:
    return _strategy_of(given.value, given) if isinstance(given.value, str) else given.value


def _strategy_of(word: str, given: Given) -> str:
    token = _token(word)
    instead = not_built.VALUES["fsdp"].get(token)
    if instead is not None:
        raise given.refusal(f"{shown(word)} is not built yet", fix=instead)
    strategy = _STRATEGIES.get(token) or _STRATEGIES.get(token.replace("_", ""))
    if strategy is None:
        fix = did_you_mean(token, [*_STRATEGIES, "auto_wrap"])
        raise given.refusal(f"{shown(word)} is not a strategy or option", allowed=_strategy_names(), fix=fix)
    return strategy


def _token(word: str) -> str:
    return word.lower().removeprefix("shardingstrategy.").replace("-", "_")


def _strategy_names() -> str:
    return "auto, full_shard (ZERO3), shard_grad_op (ZERO2), no_shard (DDP), auto_wrap"


def _reshard(given: Given) -> object:
    if isinstance(given.value, int) and not isinstance(given.value, bool):
        raise given.refusal("resharding to a smaller group is not built yet", fix="write true or false")
    return given.value


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
    if isinstance(given.value, bool):
        return "full" if given.value else "none"
    _refuse_not_built(given)
    return given.value


def _lora_targets(given: Given) -> object:
    value = given.value
    if value == "all-linear":
        return "all_linear"
    if isinstance(value, str) and value != "all_linear" and value.strip():
        names = ", ".join(re.split(r"[\s,]+", value.strip()))
        raise given.refusal("must be a list of module names, or all_linear", fix=f"write [{shown(names)}]")
    return value


def _optimizer(given: Given) -> object:
    _refuse_not_built(given)
    if given.value == "adamw_torch_fused":
        raise given.refusal("names an implementation", fix="write adamw: where fused kernels help, they are used")
    return "adamw" if given.value in ("AdamW", "adamw_torch") else given.value


def _refuse_not_built(given: Given) -> None:
    values = not_built.VALUES[given.target]
    word = given.value.lower() if isinstance(given.value, str) else ""
    if word in values:
        raise given.refusal("is not built yet", fix=values[word])


def _cluster(given: Given) -> object:
    instead = not_built.cluster_instead(given.value) if isinstance(given.value, str) else ""
    if instead:
        raise given.refusal("planning for another machine is not built yet", fix=instead)
    return given.value


_SECTION_READERS: dict[str, Callable[[Given], dict[str, object]]] = {
    "model": _text_section("model.path", "a folder or a hub id"),
    "data": _text_section("data.path", "a file"),
    "fsdp": _fsdp,
    "mixed_precision": _mixed_precision,
    "checkpoint": _checkpoint,
    "log": _log,
}
_FIELD_READERS: dict[str, Callable[[Given], object]] = {
    "model.dtype": _dtype,
    "data.path": _refuse_list,
    "lora_targets": _lora_targets,
    "optimizer": _optimizer,
    "fsdp.strategy": _strategy,
    "fsdp.reshard_after_forward": _reshard,
    **{f"mixed_precision.{role}_dtype": _dtype for role in ("param", "reduce", "output", "buffer")},
    "activation_checkpointing": _activation_checkpointing,
    "cluster": _cluster,
}
