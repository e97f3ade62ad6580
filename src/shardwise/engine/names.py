"""Parameter names without the prefixes that wrappers add."""

from __future__ import annotations

import re

_WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.")
_ADAPTED = re.compile(r"\.(base_layer|original_module|modules_to_save\.[^.]+)(?=\.)")


def unwrapped_name(name: str) -> str:
    """Return `name` without activation-checkpoint and compile wrappers."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def base_name(name: str) -> str:
    """Return the name that the weight has in the model before PEFT and wrappers touched it.

    A module that PEFT trains whole exists twice, and its frozen original and its trained copy have one such name.
    """
    return _ADAPTED.sub("", unwrapped_name(name).removeprefix("base_model.model."))
