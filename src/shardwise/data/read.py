"""Read a `.json` or `.jsonl` file into records that know where they stand."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from shardwise.spec.problems import BadInput, Problem, did_you_mean

MOST_PROBLEMS = 10
"""Problems that are collected before reading stops."""

_TO_JSONL = "convert it to .jsonl: one JSON object per line"
_SUFFIXES = (".json", ".jsonl")
_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")


@dataclass(frozen=True, kw_only=True)
class Record:
    """One row of a data file, as it was written."""

    place: str
    """Where it stands: `faq.jsonl:12` (line, from 1) or `faq.json row 12` (row, from 1)."""
    value: dict[str, object]
    """The JSON object."""


class ProblemList:
    """Collects problems so that many are shown at once."""

    def __init__(self) -> None:
        self._found: list[Problem] = []

    def add(self, problem: Problem) -> None:
        """Keep `problem`; raise BadInput when it is the `MOST_PROBLEMS`-th."""
        self._found.append(problem)
        if len(self._found) >= MOST_PROBLEMS:
            self.raise_if_any()

    def raise_if_any(self) -> None:
        """Raise BadInput with all that was added, if anything was."""
        if self._found:
            raise BadInput(self._found)


def read_records(path: str, *, field: str = "data.path") -> list[Record]:
    """Return the rows of `path` in file order; blank lines of a `.jsonl` are passed over.

    `field` is the configuration key that named the file. Raises BadInput for a file that is missing, empty, of another
    kind, not UTF-8 or not JSON, and for rows that are not objects (up to `MOST_PROBLEMS` at once, with their lines).
    """
    file = Path(path).expanduser()
    _check_file(file, path, field)
    try:
        raw = file.read_bytes()
    except OSError as error:
        raise BadInput(Problem(field=field, value=path, reason=f"cannot be read: {error.strerror}")) from error
    raw_rows = raw.removeprefix(codecs.BOM_UTF8)
    skipped = len(raw) - len(raw_rows)
    records = (
        _json_records(raw_rows, path, skipped) if file.suffix.lower() == ".json" else _lines(raw_rows, path, skipped)
    )
    if not records:
        raise BadInput(Problem(field=field, value=path, reason="has no rows"))
    return records


def _check_file(file: Path, path: str, field: str) -> None:
    """Refuse what is not an existing `.json` or `.jsonl` file."""

    def refuse(reason: str, fix: str) -> BadInput:
        return BadInput(Problem(field=field, value=path, reason=reason, allowed="a .json or .jsonl file", fix=fix))

    if file.is_dir():
        raise refuse("is a folder", _contents(file))
    if not file.exists():
        if _HUB_ID.fullmatch(path) and file.suffix.lower() not in _SUFFIXES and not file.parent.exists():
            reason = "does not exist here, and data sets from the hub are not built yet"
            raise refuse(reason, f"download it and {_TO_JSONL}")
        near = did_you_mean(file.name, _data_files(file.parent))
        raise refuse("does not exist", near or _contents(file.parent))
    if file.suffix.lower() not in _SUFFIXES:
        kind = f"{file.suffix} files" if file.suffix else "files without a suffix"
        raise refuse(f"{kind} are not built yet", _TO_JSONL)


def _data_files(folder: Path) -> list[str]:
    """Return the names of the files in `folder` that could be read."""
    if not folder.is_dir():
        return []
    return sorted(entry.name for entry in folder.iterdir() if entry.suffix.lower() in _SUFFIXES)


def _contents(folder: Path) -> str:
    """Say what there is to choose from in `folder`."""
    if not folder.is_dir():
        return f"there is no folder {str(folder)!r}"
    names = _data_files(folder)
    return f"{str(folder)!r} has {', '.join(names[:5])}" if names else f"{str(folder)!r} has no .json or .jsonl file"


def _lines(raw: bytes, path: str, skipped: int) -> list[Record]:
    """Read JSON Lines; `skipped` bytes (a byte-order mark) stood before `raw`."""
    records: list[Record] = []
    problems = ProblemList()
    for number, start, line in _numbered(raw):
        place = f"{path}:{number}"
        try:
            value = json.loads(line.decode("utf-8"))
        except UnicodeDecodeError as error:
            problems.add(_not_utf8(place, error, skipped + start))
        except (ValueError, RecursionError) as error:
            fix = "it looks like one JSON list: rename the file to .json" if line.strip() in {b"[", b"{"} else ""
            problems.add(Problem(field=place, reason=f"not JSON: {_json_reason(error)}", fix=fix))
            if fix:
                break
        else:
            _keep(value, place, records, problems)
    problems.raise_if_any()
    return records


def _numbered(raw: bytes) -> Iterator[tuple[int, int, bytes]]:
    """Yield line number from 1, byte offset and bytes of each line that is not blank."""
    start = 0
    for number, line in enumerate(raw.split(b"\n"), 1):
        if line.strip():
            yield number, start, line
        start += len(line) + 1


def _json_records(raw: bytes, path: str, skipped: int) -> list[Record]:
    """Read one JSON list of objects."""
    try:
        text = raw.decode("utf-8")
        rows = json.loads(text) if text.strip() else []
    except UnicodeDecodeError as error:
        place = f"{path}:{raw.count(bytes([10]), 0, error.start) + 1}"
        raise BadInput(_not_utf8(place, error, skipped)) from error
    except json.JSONDecodeError as error:
        fix = "it looks like one object per line: rename the file to .jsonl" if error.msg == "Extra data" else ""
        place = f"{path}:{error.lineno}"
        raise BadInput(Problem(field=place, reason=f"not JSON: {_json_reason(error)}", fix=fix)) from error
    except (ValueError, RecursionError) as error:
        raise BadInput(Problem(field=path, reason=f"not JSON: {_json_reason(error)}")) from error
    if not isinstance(rows, list):
        lists = [key for key, value in rows.items() if isinstance(value, list)] if isinstance(rows, dict) else []
        fix = f"keep only the list under {lists[0]!r}" if lists else ""
        reason = f"holds {kind_of(rows)}, not a list of objects"
        raise BadInput(Problem(field=path, reason=reason, allowed="[{...}, {...}]", fix=fix))
    records: list[Record] = []
    problems = ProblemList()
    for number, value in enumerate(rows, 1):
        _keep(value, f"{path} row {number}", records, problems)
    problems.raise_if_any()
    return records


def _keep(value: object, place: str, records: list[Record], problems: ProblemList) -> None:
    if isinstance(value, dict):
        records.append(Record(place=place, value=value))
    else:
        problems.add(Problem(field=place, reason=f"is {kind_of(value)}, not an object"))


def _not_utf8(place: str, error: UnicodeDecodeError, before: int) -> Problem:
    byte = error.object[error.start]
    reason = f"not UTF-8: byte 0x{byte:02x} at offset {before + error.start} of the file"
    return Problem(field=place, reason=reason, fix="save the file as UTF-8")


def _json_reason(error: Exception) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg} at column {error.colno}"
    return "nested too deeply" if isinstance(error, RecursionError) else str(error)


def kind_of(value: object) -> str:
    """Return what a JSON value is, in words: "a number", "a list", "nothing (null)"."""
    if value is None:
        return "nothing (null)"
    if isinstance(value, bool):
        return "true or false"
    kinds = {str: "text", int: "a number", float: "a number", list: "a list", dict: "an object"}
    return kinds.get(type(value), type(value).__name__)
