"""`shardwise validate`, as people and machines call it."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from shardwise.cli.main import app
from shardwise.spec.problems import BadInput
from trials.rows import line, row, single


def _file(tmp_path, *rows):
    file = tmp_path / "own.jsonl"
    file.write_text("".join(line(one) + "\n" for one in rows))
    return str(file)


def test_json_for_machines(tmp_path):
    file = _file(tmp_path, row(), single(id="OWN-002", plan__context=2, cluster__num_gpus=2))
    done = CliRunner().invoke(app, ["validate", file, "--json"])
    assert done.exit_code == 0, done.output
    content = json.loads(done.output)
    first, second = content["rows"]
    assert first["memory"]["measured"] == 0.5
    assert first["fits_predicted"] is True
    assert (second["memory"], second["skipped_because"]) == (None, "context parallelism")
    assert content["summary"]["skipped"] == {"context parallelism": 1}


def test_text_for_people(tmp_path):
    done = CliRunner().invoke(app, ["validate", _file(tmp_path, row())])
    assert done.exit_code == 0, done.output
    assert "1 rows, 1 with a peak to compare, predicted by estimate" in done.output
    assert "OWN-001" in done.output


def test_a_wrong_line_is_bad_input(tmp_path):
    done = CliRunner().invoke(app, ["validate", _file(tmp_path, row(plan__seq_len=-1))])
    assert isinstance(done.exception, BadInput)
    assert "own.jsonl:1 plan.seq_len: -1" in str(done.exception)


@pytest.mark.parametrize("arguments", [["--by", "guess"], []])
def test_what_is_not_there_is_refused(tmp_path, arguments):
    done = CliRunner().invoke(app, ["validate", str(tmp_path / "none.jsonl"), *arguments])
    assert done.exit_code == 2 or isinstance(done.exception, OSError)
