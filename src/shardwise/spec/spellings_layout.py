"""Accepted spellings of what lays a model out: strategy and its options, units, prefetch, offload, accumulation."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from shardwise.spec.keys import FOREIGN, Given
from shardwise.spec.problems import did_you_mean
from shardwise.spec.wording import FIELDS, accepted_text
from shardwise.spec.yaml_text import shown

STRATEGIES = {
    "full_shard": "FULL_SHARD",
    "zero3": "FULL_SHARD",
    "shard_grad_op": "SHARD_GRAD_OP",
    "zero2": "SHARD_GRAD_OP",
    "hybrid_shard": "HYBRID_SHARD",
    "hsdp": "HYBRID_SHARD",
    "hybrid_shard_zero2": "HYBRID_SHARD_ZERO2",
    "_hybrid_shard_zero2": "HYBRID_SHARD_ZERO2",
    "no_shard": "NO_SHARD",
    "ddp": "NO_SHARD",
    "auto": "auto",
}
"""Word in lower case -> strategy."""

OPTIONS: dict[str, dict[str, object]] = {
    "auto_wrap": {},
    "offload": {"offload.parameters": True},
    "cpu_offload": {"offload.parameters": True},
    "prefetch": {"prefetch.forward": 1, "prefetch.backward": 1},
    "forward_prefetch": {"prefetch.forward": 1},
    "backward_prefetch": {"prefetch.backward": 1},
    "backward_pre": {"prefetch.backward": 1},
    "no_prefetch": {"prefetch.backward": 0},
}
"""Word that may stand beside a strategy -> what it sets."""

_NAMES = "auto, full_shard (ZERO3), shard_grad_op (ZERO2), hybrid_shard (HSDP), hybrid_shard_zero2, no_shard (DDP)"
_POST = "FSDP2 gathers the next unit before it reduces the gradients of this one, and has no order in between"
_POST_FIX = "write backward_pre (one unit ahead) or no_prefetch"
_OFFLOADS = {"optimizer": "optimizer", "parameters": "parameters", "params": "parameters", "activations": "activations"}


def fsdp(given: Given) -> dict[str, object]:
    """Read a string or a list of options, as in transformers' Trainer and accelerate."""
    items = given.value if isinstance(given.value, list) else [given.value]
    if isinstance(given.value, bool):
        raise given.refusal("must name a strategy", fix="write no_shard to shard nothing, or auto")
    if not all(isinstance(item, str) for item in items):
        raise given.refusal("must be a strategy, a list of options, or a mapping", allowed=_NAMES)
    words = [word for item in items for word in re.split(r"[\s,]+", str(item)) if word]
    if not words:
        raise given.refusal("names no strategy", fix="write auto to have one chosen")
    said: dict[str, tuple[object, str]] = {}
    for word in words:
        for key, value in _word(word, given, beside=len(words) > 1).items():
            before, by = said.setdefault(key, (value, word))
            if before != value:
                both = f"{before} and {value}" if key == "fsdp.strategy" else f"{shown(by)} and {shown(word)}"
                fix = "name one strategy" if key == "fsdp.strategy" else "keep one of the two"
                raise given.refusal(f"contradicts itself: {both}", fix=fix)
    return {"fsdp.strategy": "auto"} | {key: value for key, (value, _) in said.items()}


def _word(word: str, given: Given, *, beside: bool) -> dict[str, object]:
    token = _token(word)
    if token == "backward_post":
        raise given.refusal(f"{shown(word)} cannot be had: {_POST}", fix=_POST_FIX)
    return OPTIONS[token] if token in OPTIONS else {"fsdp.strategy": _named(word, given, beside=beside)}


def strategy(given: Given) -> object:
    """Read a strategy by any of its names."""
    return _named(given.value, given) if isinstance(given.value, str) else given.value


def _named(word: str, given: Given, *, beside: bool = False) -> str:
    """Return the strategy of a word; `beside`: it stands beside others, so an option may be meant."""
    token = _token(word)
    found = STRATEGIES.get(token) or STRATEGIES.get(token.replace("_", ""))
    if found is None:
        fix = did_you_mean(token, [*STRATEGIES, *OPTIONS])
        allowed = f"{_NAMES}; options: {', '.join(OPTIONS)}" if beside else _NAMES
        raise given.refusal(f"{shown(word)} is not a strategy or option", allowed=allowed, fix=fix)
    return found


def _token(word: str) -> str:
    return re.sub(r"^(shardingstrategy|backwardprefetch)\.", "", word.lower()).replace("-", "_")


def reshard(given: Given) -> object:
    """Refuse a group of one rank, which PyTorch takes for false."""
    if given.value == 1 and not isinstance(given.value, bool):
        raise given.refusal("means false: a group of one rank keeps whole weights", fix="write false, or 2 or more")
    return given.value


def mapping_only(section: str) -> Callable[[Given], dict[str, object]]:
    """Return the reader of a section that has no short form."""
    fields = ", ".join(key.removeprefix(f"{section}.") for key in FIELDS if key.startswith(f"{section}."))

    def read(given: Given) -> dict[str, object]:
        raise given.refusal("must be a mapping", allowed=fields)

    return read


def units(given: Given) -> dict[str, object]:
    """Read class names without the mapping around them."""
    if not isinstance(given.value, str | list):
        raise given.refusal("must be class names, or a mapping", allowed="wrap, embedding, head")
    return {"units.wrap": wrap(given)}


def wrap(given: Given) -> object:
    """Read class names from a list or from one text with commas."""
    names = [name for name in re.split(r"[\s,]+", given.value) if name] if isinstance(given.value, str) else []
    return names or given.value


def prefetch(given: Given) -> dict[str, object]:
    """Read one depth for both directions; true and false are depths 1 and 0."""
    if not isinstance(given.value, int):
        raise given.refusal("must be a depth in units, or a mapping", allowed="forward, backward, async_all_gather")
    return {"prefetch.forward": int(given.value), "prefetch.backward": int(given.value)}


def depth(given: Given) -> object:
    """Read true and false as depths 1 and 0, and the names of FSDP1's two orders."""
    if given.value is None and given.name == "backward_prefetch":
        raise given.refusal("has no value", fix="write no_prefetch, or backward_pre; or remove it for the default")
    if isinstance(given.value, bool):
        return int(given.value)
    if isinstance(given.value, str):
        token = _token(given.value)
        if token == "backward_post":
            raise given.refusal(f"cannot be had: {_POST}", fix=_POST_FIX)
        if token in ("none", "no_prefetch"):
            return 0
        if token == "backward_pre" and given.target == "prefetch.backward":
            return 1
    return given.value


def offload(given: Given) -> dict[str, object]:
    """Read what is kept in host memory, as one word or a list; what is not named stays on the device."""
    allowed = "none, optimizer, parameters, activations, or a list of them"
    if given.value is True:
        fix = "write parameters for what other trainers call CPU offload: shards, gradients and optimizer"
        raise given.refusal("does not say what to offload", allowed=allowed, fix=fix)
    items = given.value if isinstance(given.value, list) else [given.value]
    words = [word.lower() for item in items if isinstance(item, str) for word in re.split(r"[\s,]+", item) if word]
    nothing = given.value is False or words == ["none"]
    unknown = [word for word in words if word not in _OFFLOADS]
    if not nothing and (unknown or not words or not all(isinstance(item, str) for item in items)):
        fix = did_you_mean(unknown[0], _OFFLOADS) if unknown else ""
        if "none" in words:
            fix = "write none alone, or leave it out"
        raise given.refusal("must say what to offload", allowed=allowed, fix=fix)
    named = set() if nothing else {_OFFLOADS[word] for word in words}
    if "parameters" in named:
        named.add("optimizer")
    return {f"offload.{part}": part in named for part in ("optimizer", "parameters", "activations")}


def accumulation(given: Given) -> object:
    """Read the mode; `no_sync` is DDP's name of one."""
    if isinstance(given.value, int) and not isinstance(given.value, bool):
        fix = FOREIGN["gradient_accumulation_steps"]
        raise given.refusal("is a mode, not a number of micro-batches", allowed=accepted_text(given.target), fix=fix)
    return _one_of({"no_sync": "defer_all"}, given.value)


def loss_head(given: Given) -> dict[str, object]:
    """Read the loss head by name, or Trainer's flag for Liger's kernels."""
    if given.name != "use_liger_kernel":
        return {"loss_head": _one_of({"liger": "fused"}, given.value)}
    if not isinstance(given.value, bool):
        raise given.refusal("must be true or false", fix="or write loss_head: fused")
    return {"loss_head": "fused"} if given.value else {}


def _one_of(other_names: Mapping[str, str], value: object) -> object:
    return other_names.get(value, value) if isinstance(value, str) else value
