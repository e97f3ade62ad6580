"""What the design has and this release has not: refused by name, with what to do instead."""

from __future__ import annotations

import re
from dataclasses import dataclass

NEUTRAL = (None, False, "none")
"""Values by which a key asks for nothing; accepted everywhere below."""


@dataclass(frozen=True)
class NotBuilt:
    """A configuration key that is not built yet."""

    instead: str
    """What to do instead."""
    neutral: tuple[object, ...] = NEUTRAL
    """Values that ask for nothing, or for what happens anyway; they are accepted and dropped."""

    def asks_for_nothing(self, value: object) -> bool:
        """Tell whether `value` is one of the neutral ones."""
        return any(value is word or (isinstance(word, str) and value == word) for word in self.neutral)


_NO_PREFETCH = NotBuilt("remove it: blocks are gathered in PyTorch's default order", (None,))
_OFFLOAD = NotBuilt("shard over more ranks, lower micro_batch, or set activation_checkpointing: true")
_QUANTIZATION = NotBuilt("keep the frozen base in half precision: 'model: {path: ..., dtype: bf16}'")
_UNITS = NotBuilt("remove it: every block is one unit, the rest is the root unit")

KEYS: dict[str, NotBuilt] = {
    "mesh": NotBuilt("remove it: fsdp: FULL_SHARD shards over all ranks, NO_SHARD replicates over all", (None,)),
    "plan": NotBuilt("remove it: the plan is made from this file at start", (None,)),
    "quantization": _QUANTIZATION,
    "load_in_4bit": _QUANTIZATION,
    "load_in_8bit": _QUANTIZATION,
    "offload": _OFFLOAD,
    "prefetch": _NO_PREFETCH,
    "accumulation": NotBuilt(
        "set global_batch and micro_batch; gradients are reduced each time", (None, "reduce_each")
    ),
    "loss_head": NotBuilt("lower micro_batch or seq_len when the logits do not fit", (None, "eager")),
    "units": _UNITS,
    "compile": NotBuilt("set compile: false"),
    "on_oom": NotBuilt("lower micro_batch, or set activation_checkpointing: true"),
    "data.packing": NotBuilt("remove it: every row is a sequence of its own"),
    "fsdp.mesh": NotBuilt("remove it: the strategy says it all", (None,)),
    "fsdp.offload": _OFFLOAD,
    "fsdp.offload_params": _OFFLOAD,
    "fsdp.cpu_offload": _OFFLOAD,
    "fsdp.prefetch": _NO_PREFETCH,
    "fsdp.backward_prefetch": _NO_PREFETCH,
    "fsdp.forward_prefetch": NotBuilt(_NO_PREFETCH.instead),
    "fsdp.units": _UNITS,
    "fsdp.compile": NotBuilt("set compile: false"),
}
"""Dotted keys that are not built yet."""

_HYBRID = "use full_shard or shard_grad_op"

VALUES: dict[str, dict[str, str]] = {
    "fsdp": {
        "hybrid_shard": _HYBRID,
        "hybrid_shard_zero2": _HYBRID,
        "_hybrid_shard_zero2": _HYBRID,
        "offload": _OFFLOAD.instead,
        "cpu_offload": _OFFLOAD.instead,
        "prefetch": _NO_PREFETCH.instead,
        "backward_prefetch": _NO_PREFETCH.instead,
        "backward_pre": _NO_PREFETCH.instead,
        "backward_post": _NO_PREFETCH.instead,
        "forward_prefetch": _NO_PREFETCH.instead,
    },
    "activation_checkpointing": {"selective": "use true, or every_2 to recompute every second block"},
    "mixed_precision": {"fp8": "use bf16", "float8": "use bf16"},
    "optimizer": dict.fromkeys(
        (
            *("adafactor", "muon", "sgd", "lion", "adam", "adagrad", "lamb", "rmsprop", "apollo", "galore"),
            *("adamw_8bit", "adamw_bnb_8bit", "paged_adamw_8bit", "paged_adamw_32bit", "paged_adamw"),
        ),
        "use adamw",
    ),
}
"""Key -> value in lower case -> what to do instead."""

_CLUSTER_NAME = re.compile(r"^\d+x(?!cpu$).+|[/\\]|\.(ya?ml|json)$", re.IGNORECASE)


def cluster_instead(value: str) -> str:
    """Return what to do instead of a catalogue name or a file as `cluster`; "" when `value` is neither."""
    return "use detect (all GPUs of this machine), or 2xcpu" if _CLUSTER_NAME.search(value) else ""
