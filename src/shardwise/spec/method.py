"""What trains: every weight, or low-rank adapters on a frozen base."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from shardwise.spec.strict import PositiveInt, Strict


class Lora(Strict):
    """Low-rank adapters on a frozen base (PEFT's LoRA)."""

    rank: PositiveInt = 16
    """Rank of the adapters."""
    alpha: Annotated[float, Field(gt=0)] = 32.0
    """Scale: the adapter's output is multiplied by `alpha / rank`."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Dropout before each adapter."""
    targets: Literal["all_linear"] | Annotated[tuple[str, ...], Field(min_length=1, strict=False)] = "all_linear"
    """Suffixes of module names that get an adapter, or `all_linear`: every linear layer but the head."""
    modules_to_save: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """Modules trained whole beside the adapters, by the last parts of their names; each keeps its frozen original."""


def goes_by(name: str, given: str) -> bool:
    """Whether a module goes by a name that was given: its own, or the last parts of it."""
    return name == given or name.endswith("." + given)
