"""The unit table: totals and grouping."""

from __future__ import annotations

from shardwise.spec.units import UnitRow, UnitTable


def row(name: str, **changes) -> UnitRow:
    figures = {
        "kind": "LlamaDecoderLayer",
        "parameters": 100,
        "trainable": 10,
        "gathered_bytes": 200,
        "stored_bytes": 400,
        "stored_by_dtype": {"float32": 400},
        "all_gather_bytes": 200,
        "reduce_scatter_bytes": 40,
        "reshard_after_forward": True,
        "checkpointed": True,
    }
    return UnitRow(name=name, **figures | changes)


def groups(*rows: UnitRow) -> list[tuple[str, int]]:
    return [(group.name, group.count) for group in UnitTable(rows=rows).grouped()]


def test_totals():
    table = UnitTable(rows=(row("layers.0"), row("layers.1"), row("root", parameters=7, gathered_bytes=999)))
    assert (table.parameters, table.trainable, table.gathered_bytes, table.stored_bytes) == (207, 30, 1399, 1200)
    assert table.largest is not None
    assert table.largest.name == "root"


def test_an_empty_table():
    table = UnitTable(rows=())
    assert table.grouped() == []
    assert table.largest is None
    assert table.parameters == 0


def test_equal_consecutive_units_are_joined():
    blocks = [row(f"model.layers.{index}") for index in range(30)]
    assert groups(*blocks, row("root")) == [("model.layers.0 .. 29", 30), ("root", 1)]


def test_units_that_differ_are_not_joined():
    assert groups(row("a.0"), row("a.1", trainable=0), row("a.2")) == [("a.0", 1), ("a.1", 1), ("a.2", 1)]
    assert groups(row("a.0"), row("b.1"), row("a.2"), row("a.4")) == [("a.0", 1), ("b.1", 1), ("a.2", 1), ("a.4", 1)]
    assert groups(row("a.9"), row("a.10"), row("x"), row("x")) == [("a.9 .. 10", 2), ("x", 1), ("x", 1)]


def test_json_round_trip():
    table = UnitTable(rows=(row("a.0"), row("")))
    assert UnitTable.model_validate_json(table.model_dump_json()) == table
