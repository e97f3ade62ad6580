"""The base of every configuration model, and the small types that several of them share."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

Dtype = Literal["fp32", "bf16", "fp16"]
"""Names of the floating dtypes that a configuration may ask for."""

DTYPE_BYTES: dict[str, int] = {"fp32": 4, "bf16": 2, "fp16": 2}
"""Bytes of an element of each dtype."""

PositiveInt = Annotated[int, Field(gt=0)]
NotNegative = Annotated[int, Field(ge=0)]


class Strict(BaseModel):
    """Base of every configuration model: unknown keys refused, no coercion between types, finite numbers, immutable."""

    model_config = ConfigDict(
        extra="forbid", strict=True, frozen=True, allow_inf_nan=False, use_attribute_docstrings=True
    )
