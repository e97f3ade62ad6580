"""Strict YAML: 1.2 scalars, no duplicate keys, and the line of every key."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from shardwise.spec.problems import BadInput, Problem, did_you_mean

MAX_BYTES = 256 * 1024
"""Larger files are data, not configurations."""
_MAX_NODES = 10_000
_MAX_INTEGER_TEXT = 40

_TAG = "tag:yaml.org,2002:"
_SCALARS: dict[str, tuple[re.Pattern[str], str]] = {
    "bool": (re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$"), "tTfF"),
    "null": (re.compile(r"^(?:~|null|Null|NULL|)$"), "~nN\0"),
    "int": (re.compile(r"^(?:[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+)$"), "-+0123456789"),
    "float": (
        re.compile(
            r"^(?:[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?"
            r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"
        ),
        "-+.0123456789",
    ),
}
"""YAML 1.2 core schema: how a plain scalar is told from text, with the characters it can begin with."""


@dataclass(frozen=True)
class YamlText:
    """A parsed configuration."""

    values: dict[str, object] = field(default_factory=dict)
    """The top-level mapping."""
    lines: dict[str, int] = field(default_factory=dict)
    """Dotted key -> line, counted from 1."""
    problems: tuple[Problem, ...] = ()
    """Faults that did not stop the parsing, such as a key given twice."""


class _Loader(yaml.SafeLoader):
    """SafeLoader with the scalars of YAML 1.2."""

    yaml_implicit_resolvers = {}  # noqa: RUF012


class _Dumper(yaml.SafeDumper):
    """SafeDumper that quotes what either YAML 1.1 or 1.2 would not read as text."""


class _ShortLists(_Dumper):
    """The same with lists of numbers on one line."""


for _name, (_pattern, _first) in _SCALARS.items():
    for _class in (_Loader, _Dumper, _ShortLists):
        _class.add_implicit_resolver(_TAG + _name, _pattern, ["" if char == "\0" else char for char in _first])
_Loader.add_implicit_resolver(_TAG + "merge", re.compile(r"^<<$"), ["<"])


def read_yaml(path: Path, *, needs: str = "'model' and 'data'") -> YamlText:
    """Read a configuration file, or another of keys and values; raise BadInput when it is not one.

    Args:
        path: The file.
        needs: Keys that an empty file is told to have at least.
    """
    name = shown(str(path))
    try:
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        siblings = [other.name for other in path.parent.glob("*.y*ml")]
        raise BadInput(
            Problem(field=name, reason="there is no such file", fix=did_you_mean(path.name, siblings))
        ) from None
    except IsADirectoryError:
        raise BadInput(Problem(field=name, reason="is a folder, not a configuration file")) from None
    except (OSError, ValueError) as error:
        words = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise BadInput(Problem(field=name, reason=f"cannot be read ({words})")) from None
    if len(content) > MAX_BYTES:
        raise BadInput(Problem(field=name, reason="is larger than 256 KiB, so it is not a configuration file"))
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise BadInput(Problem(field=name, reason="is not UTF-8 text", line=line, fix="save it as UTF-8")) from None
    return parse_yaml(text, source=name, needs=needs)


def parse_yaml(text: str, *, source: str = "configuration", needs: str = "'model' and 'data'") -> YamlText:
    """Parse a configuration; `source` names it in problems. Raise BadInput when it cannot be parsed at all."""
    builder = _Builder(source)
    try:
        node = _compose(text, source)
        if node is None or (isinstance(node, yaml.ScalarNode) and node.tag == _TAG + "null"):
            raise BadInput(Problem(field=source, reason="is empty", fix=f"it needs at least {needs}"))
        if not isinstance(node, yaml.MappingNode):
            kind = "a list" if isinstance(node, yaml.SequenceNode) else "plain text"
            raise BadInput(
                Problem(
                    field=source, reason=f"must be a mapping of keys to values, not {kind}", fix="write 'key: value'"
                )
            )
        values = builder.mapping(node, "")
    except (RecursionError, _TooManyError):
        raise BadInput(
            Problem(field=source, reason="is nested too deeply, refers to itself, or is too large")
        ) from None
    return YamlText(values, builder.lines, tuple(builder.problems))


def parse_value(text: str, *, source: str) -> object:
    """Parse the value of a `key=value` override: a scalar as in YAML, or a `[list]`, `{mapping}` or quoted text."""
    stripped = text.strip()
    if stripped[:1] not in ("[", "{", '"', "'"):
        tag = next((name for name, (pattern, _) in _SCALARS.items() if pattern.match(stripped)), "str")
        return _scalar(tag, stripped, source, None)
    wrapped = parse_yaml(f"value: {stripped}", source=source)
    if wrapped.problems:
        raise BadInput(wrapped.problems)
    return wrapped.values["value"]


def dump_yaml(values: dict[str, object], *, short_lists: bool = False) -> str:
    """Return `values` as YAML that `parse_yaml` reads back equal; with `short_lists` a list of numbers is one line."""
    dumper = _ShortLists if short_lists else _Dumper
    return yaml.dump(values, Dumper=dumper, sort_keys=False, allow_unicode=True, width=1000)


def shown(key: str) -> str:
    """Return a key or a file name fit to print: as it is, or quoted and escaped when it holds odd characters."""
    return key if key and key.isprintable() else ascii(key)


def _text_node(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    """Quote text with Unicode line breaks such that they are escaped: in other styles they are folded away."""
    style = '"' if re.search("[\x85\u2028\u2029]", text) else None
    return dumper.represent_scalar(_TAG + "str", text, style=style)


def _list_node(dumper: yaml.SafeDumper, items: list[object]) -> yaml.SequenceNode:
    numbers = all(isinstance(item, int | float) for item in items)
    return dumper.represent_sequence(_TAG + "seq", items, flow_style=numbers)


for _class in (_Dumper, _ShortLists):
    _class.add_representer(str, _text_node)
_ShortLists.add_representer(list, _list_node)


def _compose(text: str, source: str) -> yaml.Node | None:
    try:
        loader = _Loader(text)
        return loader.get_single_node()
    except yaml.YAMLError as error:
        raise BadInput(_syntax_problem(error, text, source)) from None
    except (ValueError, OverflowError):  # an escape such as "\UFFFFFFFF" that names no character
        raise BadInput(Problem(field=source, reason="is not valid YAML: an escape names no character")) from None


def _syntax_problem(error: yaml.YAMLError, text: str, source: str) -> Problem:
    if isinstance(error, yaml.reader.ReaderError):
        row = text.count("\n", 0, int(error.position)) + 1
        return Problem(field=source, reason="holds a control character, which YAML does not allow", line=row)
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    line = mark.line + 1 if mark is not None else None
    words = str(getattr(error, "problem", None) or "cannot be parsed")
    if mark is not None and _tab_before(text, mark.line, mark.column):
        return Problem(field=source, reason="is indented with a tab", fix="indent with spaces", line=line)
    if "single document" in str(getattr(error, "context", "")):
        return Problem(
            field=source, reason="holds more than one YAML document", fix="remove the second '---'", line=line
        )
    fix = "text that holds ': ' needs quotes" if "mapping values" in words else ""
    return Problem(field=source, reason=f"is not valid YAML: {words}", fix=fix, line=line)


def _tab_before(text: str, line: int, column: int) -> bool:
    """Tell whether the scanner stopped at a tab, or just behind an indentation that holds one."""
    lines = re.split("\r\n|[\n\r\x85\u2028\u2029]", text)
    content = lines[line] if line < len(lines) else ""
    indent = content[: len(content) - len(content.lstrip())]
    return content[column : column + 1] == "\t" or "\t" in indent


def _scalar(tag: str, text: str, source: str, line: int | None) -> object:
    """Return the value of a scalar whose kind was resolved or written as a tag."""
    if tag in ("str", "merge"):
        return text
    if tag not in _SCALARS:
        raise BadInput(Problem(field=shown(source), reason=f"uses the YAML tag {tag!r}", fix="remove it", line=line))
    if not _SCALARS[tag][0].match(text) or (tag == "int" and len(text) > _MAX_INTEGER_TEXT):
        raise BadInput(Problem(field=shown(source), value=text[:50], reason=f"is not a usable {tag}", line=line))
    if tag == "bool":
        return text.lower() == "true"
    if tag == "int":
        return int(text, 8 if text.startswith("0o") else 16 if text.startswith("0x") else 10)
    if tag == "float":
        return math.nan if "nan" in text.lower() else float(text.lower().replace(".inf", "inf"))
    return None


class _TooManyError(Exception):
    """The document has more nodes than any configuration, perhaps by aliases of aliases."""


class _Builder:
    """Makes Python values from nodes, noting lines and faults on the way."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.lines: dict[str, int] = {}
        self.problems: list[Problem] = []
        self.nodes = 0

    def mapping(self, node: yaml.MappingNode, path: str) -> dict[str, object]:
        result: dict[str, object] = {}
        merged: dict[str, object] = {}
        first: dict[str, int] = {}
        for key_node, value_node in node.value:
            line = key_node.start_mark.line + 1
            if not isinstance(key_node, yaml.ScalarNode):
                self._fault(path or self.source, line, "has a key that is not plain text")
                continue
            key = str(key_node.value)
            dotted = f"{path}.{key}" if path else key
            try:
                if key_node.tag == _TAG + "merge":
                    for values in self._merged(value_node, path, line):
                        merged = values | merged
                elif key in first:
                    self._fault(dotted, line, f"is given twice (first on line {first[key]})", "keep one of the two")
                else:
                    first[key] = self.lines[dotted] = line
                    result[key] = self.value(value_node, dotted)
            except BadInput as bad:
                self.problems += bad.problems
        return merged | result

    def value(self, node: yaml.Node, path: str) -> object:
        self.nodes += 1
        if self.nodes > _MAX_NODES:
            raise _TooManyError
        if isinstance(node, yaml.MappingNode) and node.tag == _TAG + "map":
            return self.mapping(node, path)
        if isinstance(node, yaml.SequenceNode) and node.tag == _TAG + "seq":
            return [self.value(item, path) for item in node.value]
        text = node.value if isinstance(node, yaml.ScalarNode) else ""
        return _scalar(node.tag.removeprefix(_TAG), text, path, node.start_mark.line + 1)

    def _merged(self, node: yaml.Node, path: str, line: int) -> Iterator[dict[str, object]]:
        """Yield the mappings that a merge key (`<<`) brings in."""
        self.nodes += 1
        for part in node.value if isinstance(node, yaml.SequenceNode) else [node]:
            if isinstance(part, yaml.MappingNode):
                inner = self.value(part, path)
                if isinstance(inner, dict):
                    yield inner
            else:
                self._fault(path or self.source, line, "merges ('<<') something that is not a mapping")

    def _fault(self, name: str, line: int, reason: str, fix: str = "") -> None:
        self.problems.append(Problem(field=shown(name), reason=reason, fix=fix, line=line))
