"""Rows of measurements: strict, and refused with the line."""

from __future__ import annotations

import json

import pytest

from house.source import ROOT
from shardwise.spec.problems import BadInput
from shardwise.trials.measured import read_row, read_rows
from trials.rows import line, row

PUBLISHED = ROOT / "bench" / "measurements" / "published.jsonl"


def test_every_published_row_is_one_of_the_schema():
    rows = read_rows(PUBLISHED)
    assert len(rows) == 502
    assert len({one.family for one in rows}) == 17
    assert sum("memory" in one.headline for one in rows) == 12
    assert sum(one.measured.outcome == "oom" for one in rows) == 39


def _refusal(text: str) -> str:
    with pytest.raises(BadInput) as caught:
        read_row(text)
    return str(caught.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "is not JSON"),
        ("[1]", "is no row"),
        (line(row(plan__seq_len=0)), "plan.seq_len: 0"),
        (line(row(model__hidden=-4096)), "model.hidden: -4096"),
        (line(row(plan__storage_dtype="fp64")), "plan.storage_dtype: 'fp64'"),
        (line(row(plan__shard="2")), "plan.shard: '2'"),
        (line(row(trust="sure")), "trust: 'sure'"),
        (line(row(plan__shard=4)), "cluster.num_gpus: 2: the mesh has 4 ranks"),
        (line(row(measured__peak_gib=float("nan"))), "is no number"),
        (line(row(model__layer=3)), "model.layer: is not a key of a row; did you mean 'layers'?"),
        (line(row(usage=[])), "usage: is not a key of a row; did you mean 'use'?"),
    ],
)
def test_a_wrong_line_is_refused_with_its_field(text, said):
    assert said in _refusal(text)


@pytest.mark.parametrize("part", ["id", "lora", "notes", "measured"])
def test_a_missing_key_is_named(part):
    given = row()
    del given[part]
    assert f"{part}: is missing" in _refusal(line(given))


def test_null_is_not_stated_and_not_missing():
    assert read_row(line(row(plan__accumulation=None, model__params_b=None))).plan.accumulation is None


def test_all_wrong_lines_of_a_file_are_named_together(tmp_path):
    file = tmp_path / "own.jsonl"
    file.write_text("\n".join([line(row()), "", "{", line(row(id="OWN-002", plan__tensor=-1)), line(row())]) + "\n")
    with pytest.raises(BadInput) as caught:
        read_rows(file)
    said = str(caught.value)
    assert "own.jsonl:3: is not JSON" in said
    assert "own.jsonl:4 plan.tensor: -1" in said
    assert "own.jsonl:5: 'OWN-001': is the id of line 1 already" in said


def test_a_file_without_rows_or_text_is_refused(tmp_path):
    empty, binary = tmp_path / "empty.jsonl", tmp_path / "binary.jsonl"
    empty.write_text("\n\n")
    binary.write_bytes(b"\xff\xfe{}")
    with pytest.raises(BadInput, match="holds no rows"):
        read_rows(empty)
    with pytest.raises(BadInput, match="is not UTF-8"):
        read_rows(binary)


def test_the_readme_explains_every_key():
    readme = (ROOT / "bench" / "measurements" / "README.md").read_text()
    first = json.loads(PUBLISHED.read_text().splitlines()[0])
    for part, content in first.items():
        for key in content if isinstance(content, dict) else [part]:
            assert f"{key}`" in readme, key
