"""Counts of collectives as a noun: equal, printed, stored and compared."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from shardwise.spec.collectives import Collective, Collectives, Difference

SOME = {("all_reduce", "world", 16): 1, ("all_gather", "shard", 200): 1, ("all_gather", "shard", 100): 6}


def test_order_of_counting_does_not_matter_and_zeros_vanish():
    one = Collectives.of(SOME)
    other = Collectives.of({**dict(reversed(SOME.items())), ("broadcast", "world", 8): 0})
    assert one == other
    assert [(row.kind, row.payload_bytes, row.count, row.bytes) for row in one.rows] == [
        ("all_gather", 100, 6, 600),
        ("all_gather", 200, 1, 200),
        ("all_reduce", 16, 1, 16),
    ]


def test_it_prints_one_line_per_kind_and_axis():
    assert str(Collectives.of(SOME)).splitlines() == [
        "all_gather over shard: 7 calls, 800 bytes",
        "all_reduce over world: 1 calls, 16 bytes",
    ]


def test_it_survives_a_file():
    counted = Collectives.of(SOME)
    assert Collectives.model_validate_json(counted.model_dump_json()) == counted


def test_rows_in_disorder_are_refused():
    row = Collective(kind="all_gather", axis="shard", payload_bytes=1, count=1)
    with pytest.raises(ValidationError, match="not sorted"):
        Collectives(rows=(row, row))


def test_equal_totals_of_other_sizes_are_a_difference():
    counted = Collectives.of({("all_gather", "shard", 100): 2})
    planned = Collectives.of({("all_gather", "shard", 50): 1, ("all_gather", "shard", 150): 1})
    (difference,) = counted.differences(planned)
    assert difference.counted == difference.planned
    assert str(difference) == (
        "all_gather over shard: counted 2 calls, 200 bytes; planned 2 calls, 200 bytes "
        "(only counted: 2 of 100 bytes; only planned: 1 of 50 bytes, 1 of 150 bytes)"
    )
    assert Difference.model_validate_json(difference.model_dump_json()) == difference
    assert counted.differences(counted) == ()
