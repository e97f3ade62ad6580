"""Strict YAML: what is read, what is refused, and on which line."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.spec.problems import BadInput, Problem
from shardwise.spec.yaml_text import MAX_BYTES, dump_yaml, parse_value, parse_yaml, read_yaml


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("true", True),
        ("False", False),
        ("yes", "yes"),
        ("no", "no"),
        ("on", "on"),
        ("off", "off"),
        ("1e-4", 1e-4),
        ("5e-5", 5e-5),
        ("1E4", 1e4),
        (".5", 0.5),
        ("-3", -3),
        ("010", 10),
        ("0x10", 16),
        ("0o10", 8),
        ("1_000", "1_000"),
        ("12:30:45", "12:30:45"),
        ("2024-01-01", "2024-01-01"),
        ("null", None),
        ("~", None),
        ("", None),
        ("=", "="),
        ("'true'", "true"),
        ('"1e-4"', "1e-4"),
        ("[q_proj, 2]", ["q_proj", 2]),
    ],
)
def test_scalars_are_those_of_yaml_1_2(text, value):
    read = parse_yaml(f"key: {text}").values["key"]
    assert read == value
    assert type(read) is type(value)
    assert parse_value(text, source="key") == value


def test_special_floats():
    values = parse_yaml("a: .inf\nb: -.inf\nc: .nan").values
    assert values["a"] == math.inf
    assert values["b"] == -math.inf
    assert math.isnan(values["c"])


def test_an_override_is_text_unless_it_is_a_scalar_or_bracketed():
    assert parse_value("What is this: a test? # yes", source="sample") == "What is this: a test? # yes"
    assert parse_value("*star", source="sample") == "*star"
    assert parse_value("{path: x}", source="model") == {"path": "x"}
    with pytest.raises(BadInput, match="not valid YAML"):
        parse_value("[a, b", source="lora_targets")


def test_every_key_has_its_line():
    lines = parse_yaml("a: 1\n\n# words\nb:\n  c: 2\n  d: {e: 3}\n").lines
    assert lines == {"a": 1, "b": 4, "b.c": 5, "b.d": 6, "b.d.e": 6}


def test_anchors_and_merges():
    values = parse_yaml("a: &x {k: 1, l: 2}\nb: *x\nc:\n  <<: *x\n  k: 3\nd:\n  <<: [*x, {m: 4}]").values
    assert values["b"] == {"k": 1, "l": 2}
    assert values["c"] == {"k": 3, "l": 2}
    assert values["d"] == {"k": 1, "l": 2, "m": 4}


LAUGHS = "a: &a [1, 1]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 10)}]\n" for before, name in itertools.pairwise("abcdefg")
)


@pytest.mark.parametrize(
    ("text", "field", "line", "words"),
    [
        ("", "configuration", None, "is empty"),
        ("# nothing\n", "configuration", None, "is empty"),
        ("- a\n- b", "configuration", None, "not a list"),
        ("just words", "configuration", None, "not plain text"),
        ("a:\n\t- b", "configuration", 2, "tab"),
        ("a: 1\n\tb: 2", "configuration", 2, "tab"),
        ("a: b: c", "configuration", 1, "quotes"),
        ("a: 1\n---\nb: 2", "configuration", 2, "more than one YAML document"),
        ("{{{", "configuration", 1, "not valid YAML"),
        ("a: 'x", "configuration", 1, "not valid YAML"),
        ("a: 1\nb: \x01", "configuration", 2, "control character"),
        ('a: "\\UFFFFFFFF"', "configuration", None, "names no character"),
        ("a: *nowhere", "configuration", 1, "undefined alias"),
        ("a: &x [*x]", "configuration", None, "refers to itself"),
        ("[" * 500, "configuration", None, "nested too deeply"),
        (LAUGHS, "configuration", None, "too large"),
    ],
)
def test_unparsable(text, field, line, words):
    with pytest.raises(BadInput) as caught:
        parse_yaml(text)
    (problem,) = caught.value.problems
    assert (problem.field, problem.line) == (field, line)
    assert words in str(problem)


@pytest.mark.parametrize(
    ("text", "field", "line", "words"),
    [
        ("a: 1\nb: 2\na: 3", "a", 3, "twice (first on line 1)"),
        ("s:\n  k: 1\n  'k': 1", "s.k", 3, "twice"),
        ("a: !!python/object:os.system x", "a", 1, "tag"),
        ("a: !mine [1]", "a", 1, "tag"),
        ("a: !!int x", "a", 1, "not a usable int"),
        ("a: !!timestamp 2024-01-01", "a", 1, "tag"),
        ("a: 0x" + "f" * 5000, "a", 1, "not a usable int"),
        ("? [a]\n: 1", "configuration", 1, "not plain text"),
        ("<<: 3", "configuration", 1, "merges"),
    ],
)
def test_faults_that_do_not_stop_the_parsing(text, field, line, words):
    (problem,) = parse_yaml(text + "\nother: 1").problems
    assert (problem.field, problem.line) == (field, line)
    assert words in str(problem)


def test_files(tmp_path: Path):
    def refusal(path: Path) -> str:
        with pytest.raises(BadInput) as caught:
            read_yaml(path)
        assert caught.value.problems[0].field == str(path)
        return str(caught.value)

    good = tmp_path / "lora.yaml"
    good.write_bytes(b"\xef\xbb\xbfmodel: caf\xc3\xa9\r\n")
    assert read_yaml(good).values == {"model": "caf\xe9"}
    assert "did you mean 'lora.yaml'?" in refusal(tmp_path / "lorra.yaml")
    assert "is a folder" in refusal(tmp_path)
    (tmp_path / "latin").write_bytes(b"a: 1\nb: \xe9\n")
    assert "line 2" in refusal(tmp_path / "latin")
    (tmp_path / "big").write_bytes(b"#" * (MAX_BYTES + 1))
    assert "larger than 256 KiB" in refusal(tmp_path / "big")
    (tmp_path / "empty").touch()
    assert "is empty" in refusal(tmp_path / "empty")


_scalars = st.none() | st.booleans() | st.integers(-(10**18), 10**18) | st.floats(allow_nan=False) | st.text()
_trees = st.recursive(
    _scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3)
)


@settings(max_examples=100, deadline=None)
@given(st.dictionaries(st.text(), _trees, min_size=1, max_size=4))
def test_what_is_dumped_is_read_back(values):
    parsed = parse_yaml(dump_yaml(values))
    assert parsed.problems == ()
    assert parsed.values == values


@settings(max_examples=300, deadline=None)
@given(st.text(alphabet="ab:-[]{}&*!#|>'\"%@`?,<~01e.\t\n \\\x00\xe9\u2028\ud800", max_size=40))
def test_any_text_is_parsed_or_refused(text):
    problems: tuple[Problem, ...] = ()
    try:
        problems = parse_yaml(text).problems
    except BadInput as error:
        problems = error.problems
    assert all(problem.field for problem in problems)
