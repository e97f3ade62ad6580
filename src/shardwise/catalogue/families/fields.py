"""Reading transformers' configuration: sizes, flags and words, with everything wrong found at once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardwise.spec.model_spec import Activation
from shardwise.spec.problems import BadInput, Problem, did_you_mean

ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_10": "gelu",
    "gelu_accurate": "gelu",
    "gelu_fast": "gelu",
    "gelu_new": "gelu",
    "gelu_python": "gelu",
    "gelu_python_tanh": "gelu",
    "gelu_pytorch_tanh": "gelu",
    "quick_gelu": "gelu",
    "relu": "relu",
    "relu2": "relu2",
}
"""transformers' word -> the function it computes."""

TRACE = "--by trace works for every causal LM of transformers: it builds the real model"


class Fields:
    """The fields of one configuration. Problems are gathered; `check` raises them, and sizes are right only after it.

    A field that is null counts as absent, except where its reader says otherwise.
    """

    def __init__(self, config: Mapping[str, Any], name: str) -> None:
        self.name = name
        self._config = config
        self._problems: list[Problem] = []
        self._wrong: set[str] = set()

    def check(self) -> None:
        """Raise BadInput when anything that was read is missing or wrong."""
        if self._problems:
            raise BadInput(self._problems)

    def refuse(self, field: str, reason: str, *, value: object = None, allowed: str = "", fix: str = "") -> None:
        """Note that a field is wrong."""
        self._wrong.add(field)
        place = f"{self.name}: {field}"
        self._problems.append(Problem(field=place, value=value, reason=reason, allowed=allowed, fix=fix))

    def __contains__(self, field: str) -> bool:
        return self._config.get(field) is not None

    def size(self, *names: str, default: int | None = None) -> int:
        """Return a size above 0 by the first of its names that is given; without a default it has to be."""
        found = self._first(names)
        if found is None:
            if default is None:
                self.refuse(names[0], "is missing, and the model's shape depends on it", fix=self._near(names[0]))
                return 1
            return default
        name, value = found
        if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
            self.refuse(name, "has to be a whole number above 0", value=value)
            return 1
        return value

    def optional_size(self, name: str, default: int | None = None) -> int | None:
        """Return a size above 0, or None: where it is null, and where it is absent and has no default."""
        if name not in self._config:
            return default
        return None if self._config[name] is None else self.size(name)

    def count(self, name: str, default: int = 0) -> int:
        """Return a whole number of at least 0."""
        value = self._config.get(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            self.refuse(name, "has to be a whole number of at least 0", value=value)
            return default
        return value

    def flag(self, name: str, default: bool) -> bool:
        """Return true or false."""
        value = self._config.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            self.refuse(name, "has to be true or false", value=value)
            return default
        return value

    def activation(self, *names: str, default: str) -> Activation:
        """Return an activation function."""
        found = self._first(names)
        name, value = found or (names[0], default)
        if not isinstance(value, str) or value not in ACTIVATIONS:
            known = ", ".join(ACTIVATIONS)
            fix = did_you_mean(value, ACTIVATIONS) if isinstance(value, str) else ""
            self.refuse(name, "is no activation function known by formula", value=value, allowed=known, fix=fix)
            return "silu"
        return ACTIVATIONS[value]

    def numbers(self, name: str) -> tuple[int, ...]:
        """Return a list of whole numbers; absent: empty."""
        value = self._config.get(name) or ()
        if not isinstance(value, list | tuple) or not all(type(item) is int for item in value):
            self.refuse(name, "has to be a list of whole numbers", value=value)
            return ()
        return tuple(value)

    def words(self, name: str, length: int) -> tuple[str, ...] | None:
        """Return a list of `length` words; absent: None."""
        value = self._config.get(name)
        if value is None:
            return None
        if not isinstance(value, list | tuple) or not all(isinstance(item, str) for item in value):
            self.refuse(name, "has to be a list of words", value=value)
            return None
        if len(value) != length:
            self.refuse(name, f"has {len(value)} entries, but the model has {length} blocks")
            return None
        return tuple(value)

    def divides(self, part: str, part_value: int, whole: str, whole_value: int) -> None:
        """Note a problem unless `whole` is a multiple of `part`, or one of them is wrong already."""
        if whole_value % part_value and not self._wrong & {part, whole}:
            self.refuse(whole, f"is not a multiple of {part} {part_value}", value=whole_value)

    def _first(self, names: tuple[str, ...]) -> tuple[str, Any] | None:
        return next(((name, self._config[name]) for name in names if self._config.get(name) is not None), None)

    def _near(self, name: str) -> str:
        return did_you_mean(name, [given for given in self._config if given != name])
