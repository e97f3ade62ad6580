"""What the design has and this release has not: refused by name, with what to do instead."""

from __future__ import annotations

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


_QUANTIZATION = NotBuilt("keep the frozen base in half precision: 'model: {path: ..., dtype: bf16}'")

KEYS: dict[str, NotBuilt] = {
    "plan": NotBuilt("remove it: the plan is made from this file at start", (None,)),
    "quantization": _QUANTIZATION,
    "load_in_4bit": _QUANTIZATION,
    "load_in_8bit": _QUANTIZATION,
    "on_oom": NotBuilt("lower micro_batch, or set activation_checkpointing: true"),
    "data.packing": NotBuilt("remove it: every row is a sequence of its own"),
}
"""Dotted keys that are not built yet."""

VALUES: dict[str, dict[str, str]] = {
    "mixed_precision": {"fp8": "use bf16", "float8": "use bf16"},
    "optimizer": dict.fromkeys(
        (
            *("adafactor", "muon", "lion", "adam", "adagrad", "lamb", "rmsprop", "apollo", "galore", "ademamix"),
            *("adamw_torch_4bit", "adamw_anyprecision", "schedule_free_adamw", "stable_adamw", "lomo"),
        ),
        "use adamw",
    ),
}
"""Key -> value in lower case -> what to do instead."""
