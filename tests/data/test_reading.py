"""Files that cannot be read say where and why."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from shardwise.data.read import MOST_PROBLEMS, read_records
from shardwise.spec.problems import BadInput


def refused(path, **options):
    with pytest.raises(BadInput) as caught:
        read_records(str(path), **options)
    return caught.value.problems


@pytest.mark.parametrize("suffix", [".json", ".jsonl", ".JSONL"])
@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"], ids=["plain", "byte-order mark"])
def test_rows_and_their_places(tmp_path, suffix, mark):
    rows = [{"text": "\u00e5"}, {"text": "line\u2028separator"}]
    as_lines = "\r\n".join(json.dumps(row, ensure_ascii=False) for row in rows) + "\r\n\r\n"
    text = as_lines if suffix != ".json" else json.dumps(rows)
    path = tmp_path / f"rows{suffix}"
    path.write_bytes(mark + text.encode())
    records = read_records(str(path))
    assert [record.value for record in records] == rows
    places = [f"{path}:1", f"{path}:2"] if suffix != ".json" else [f"{path} row 1", f"{path} row 2"]
    assert [record.place for record in records] == places


def test_blank_lines_count_as_lines(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('\n{"text": "a"}\n\n{"text": "b"}\n')
    assert [record.place for record in read_records(str(path))] == [f"{path}:2", f"{path}:4"]


@pytest.mark.parametrize(
    ("name", "content", "place", "says"),
    [
        ("a.jsonl", b"", "data.path", "has no rows"),
        ("a.jsonl", b"\n \n", "data.path", "has no rows"),
        ("a.json", b"", "data.path", "has no rows"),
        ("a.json", b"[]", "data.path", "has no rows"),
        ("a.jsonl", b'{"text": "a"}\n{"text": \n', "{path}:2", "not JSON: Expecting value at column 10"),
        ("a.jsonl", b'{"text": "a"}\n{"text": "\xff"}\n', "{path}:2", "byte 0xff at offset 24 of the file"),
        ("a.jsonl", b'\xef\xbb\xbf{"text": "\xff"}\n', "{path}:1", "byte 0xff at offset 13 of the file"),
        ("a.json", b'[{"text": "a"},\n{"text": "\xff"}]', "{path}:2", "byte 0xff at offset 26 of the file"),
        ("a.jsonl", b"\xff\xfe{\x00}\x00", "{path}:1", "save the file as UTF-8"),
        ("a.jsonl", b'["a"]\n', "{path}:1", "is a list, not an object"),
        ("a.jsonl", b"null\n", "{path}:1", "is nothing (null), not an object"),
        ("a.jsonl", b'[\n{"text": "a"}\n]\n', "{path}:1", "rename the file to .json"),
        ("a.json", b'{"text": "a"}\n{"text": "b"}\n', "{path}:2", "rename the file to .jsonl"),
        ("a.json", b'{"data": [{"text": "a"}]}', "{path}", "keep only the list under 'data'"),
        ("a.json", b'{"text": "a"}', "{path}", "holds an object, not a list of objects"),
        ("a.json", b'[{"text": "a"}, 3]', "{path} row 2", "is a number, not an object"),
        ("a.json", b"[" * 100_000, "{path}", "nested too deeply"),
        ("a.csv", b"text\na\n", "data.path", ".csv files are not built yet; allowed: a .json or .jsonl file; convert"),
        ("a.parquet", b"PAR1", "data.path", ".parquet files are not built yet"),
        ("a.jsonl.gz", b"", "data.path", ".gz files are not built yet"),
        ("a", b"", "data.path", "files without a suffix are not built yet"),
    ],
)
def test_broken_files(tmp_path, name, content, place, says):
    path = tmp_path / name
    path.write_bytes(content)
    (problem,) = refused(path)
    assert problem.field == place.format(path=path)
    assert says in str(problem)


def test_many_problems_at_once_up_to_a_limit(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{}\nx\n{}\n"a"\n')
    assert [problem.field for problem in refused(path)] == [f"{path}:2", f"{path}:4"]
    path.write_text("x\n" * 50)
    assert [problem.field for problem in refused(path)] == [f"{path}:{line}" for line in range(1, MOST_PROBLEMS + 1)]


def test_missing_file_names_its_neighbours(tmp_path):
    (tmp_path / "train.jsonl").write_text("{}\n")
    (tmp_path / "notes.txt").write_text("")
    assert "did you mean 'train.jsonl'?" in str(refused(tmp_path / "trian.jsonl")[0])
    assert "has train.jsonl" in str(refused(tmp_path / "elsewhere.json")[0])
    assert "is a folder" in str(refused(tmp_path)[0])
    assert "there is no folder" in str(refused(tmp_path / "none" / "train.jsonl")[0])
    assert refused(tmp_path / "x.jsonl", field="data.held_out")[0].field == "data.held_out"


def test_hub_ids_are_said_not_to_be_built():
    assert "data sets from the hub are not built yet" in str(refused("tatsu-lab/alpaca")[0])
    assert "hub" not in str(refused("no-such-folder/rows.jsonl")[0])


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_file_without_permission(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text("{}\n")
    path.chmod(0)
    assert "cannot be read: Permission denied" in str(refused(path)[0])


def test_no_torch_before_the_loader():
    modules = ["read", "formats", "render", "tokens", "rows", "split", "summary", "load", "prepared"]
    code = ";".join(f"import shardwise.data.{module}" for module in modules)
    subprocess.run([sys.executable, "-c", f"import sys;{code};assert 'torch' not in sys.modules"], check=True)
