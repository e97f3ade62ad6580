"""Write docs/configuration.md from the schema: python docs/make_configuration.py"""

from __future__ import annotations

import typing
from pathlib import Path

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from shardwise.spec.job import Job
from shardwise.spec.keys import OTHER_NAMES
from shardwise.spec.not_built import KEYS
from shardwise.spec.wording import FIELDS, accepted_text

TARGET = Path(__file__).with_name("configuration.md")

HEAD = """# Every key of the configuration

Made from the schema by `python docs/make_configuration.py`; a test holds it up to date.

Keys may also stand in a section `train:`. On the command line they are given as `key=value`, sections as
`checkpoint.every=50`. Unknown keys are refused with the nearest right name, two spellings that contradict each other
are refused, and all problems of a file are reported together.

| key | takes | default | is |
|---|---|---|---|
"""


def rows(model: type[BaseModel], prefix: str = "") -> typing.Iterator[str]:
    """Yield a table row per field, those of nested sections behind their section."""
    for name, field in model.model_fields.items():
        key = f"{prefix}{name}"
        yield f"| `{key}` | {_takes(key)} | {_default(field)} | {_text(field)} |"
        nested = field.annotation
        if isinstance(nested, type) and issubclass(nested, BaseModel):
            yield from rows(nested, f"{key}.")


def _text(field: FieldInfo) -> str:
    return " ".join((field.description or "").split()).replace("|", "\\|")


def _takes(key: str) -> str:
    return accepted_text(key).replace("|", "\\|") if key in FIELDS else "a value, or a mapping"


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    if isinstance(field.default, BaseModel) or field.default is None:
        return ""
    return f"`{str(field.default).lower() if isinstance(field.default, bool) else field.default}`"


def page() -> str:
    """Return the whole page."""
    other: dict[str, list[str]] = {}
    for spelling, key in OTHER_NAMES.items():
        other.setdefault(str(key), []).append(spelling)
    names = "".join(
        f"| `{key}` | {', '.join(f'`{s}`' for s in sorted(found))} |\n" for key, found in sorted(other.items())
    )
    later = "".join(f"- `{key}`\n" for key in KEYS)
    return (
        HEAD
        + "\n".join(rows(Job))
        + "\n\n## Other names\n\nWhat users of other trainers type is taken where it can mean only one thing.\n\n"
        + "| key | also |\n|---|---|\n"
        + names
        + "\n## Not built yet\n\nThese keys are refused by name, with what to do instead, unless they say that "
        + "nothing is wanted (`offload: none`):\n\n"
        + later
    )


if __name__ == "__main__":
    TARGET.write_text(page())
