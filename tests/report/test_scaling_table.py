"""Throughput as cards grow: efficiency, the bend and its reason, in print and as JSON."""

from __future__ import annotations

import io
import json

import pytest
from rich.console import Console

from report.scalings import ROWS, line, point, refused
from shardwise.report.scaling_table import bend_of, bend_words, efficiency, print_scaling, scaling_to_json


def printed(*lines, width=100) -> list[str]:
    text = io.StringIO()
    print_scaling(Console(file=text, width=width), lines, ROWS)
    return text.getvalue().splitlines()


def test_efficiency_is_against_the_smallest_count_that_has_a_plan():
    """Each card keeps its rows, so a step of twice the time is half as efficient."""
    none, small, large = refused(8, "no"), point(16, 1.0), point(32, 2.0)
    found = line(none, small, large)
    assert [efficiency(one, found) for one in found.points] == [None, 1.0, 0.5]


def test_it_bends_at_the_first_doubling_that_gains_less_than_1_6():
    """1 to 1.25 s: 2 / 1.25 = 1.6 times, which is enough; 1.25 to 1.6 s: 1.5625 times. Gathers grow by 0.2 of the step,
    the sums by less."""
    found = bend_of(
        line(
            point(8, 1.0, all_gather=0.1, all_reduce=0.2),
            point(16, 1.25, all_gather=0.125, all_reduce=0.4),
            point(32, 1.6, all_gather=0.48, all_reduce=0.512),
            point(64, 16.0, all_gather=12.0),
        )
    )
    assert (found.before, found.after, found.lane) == (16, 32, "all_gather")
    assert found.gain == found.per_doubling == pytest.approx(1.5625)
    assert (found.exposed_before, found.exposed_after) == pytest.approx((0.1, 0.3))


def test_a_jump_of_several_doublings_is_judged_by_one():
    """8 to 32 cards in 1.5 times the time: 2.667 in all, 1.633 for each of two doublings; in 2 times: 2 and 1.414."""
    assert bend_of(line(point(8, 1.0), point(32, 1.5))) is None
    found = bend_of(line(point(8, 1.0), point(32, 2.0)))
    assert (found.gain, found.per_doubling) == pytest.approx((2.0, 2**0.5))
    words = bend_words(line(point(8, 1.0), point(32, 2.0)))
    assert words.startswith("bends from 8 to 32 cards: 2.00 times the tokens/s, 1.41 times for each doubling, though")


def test_the_bend_in_words():
    bends = line(point(8, 1.0, reduce_scatter=0.05), point(16, 1.6, reduce_scatter=0.64))
    assert bend_words(bends) == (
        "bends from 8 to 16 cards: 1.25 times the tokens/s; exposed reduce-scatter grows from 5 to 40 % of the step"
    )
    loses = line(point(8, 1.0), point(16, 2.5, all_gather=1.5))
    assert bend_words(loses).startswith("loses from 8 to 16 cards: 0.80 times the tokens/s; exposed all-gather")
    straight = "no bend: every doubling gives 1.6 times the tokens/s or more"
    left = "at 16 cards 80 % of each card's tokens/s are left"
    assert bend_words(line(point(8, 1.0), point(16, 1.25))) == f"{straight}; {left}"
    assert bend_words(line(point(8, 1.0), point(16, 1.25), refused(32, "no"))).endswith("or more")
    assert bend_words(line(point(8, 1.0), refused(16, "no"))) == "one count alone: there is nothing to compare it with"
    assert bend_words(line(refused(8, "no"), refused(16, "no"))) == "there is no such plan"
    hidden = line(point(8, 1.0), point(16, 2.0))
    assert bend_words(hidden).endswith("though no communication is exposed more")


def test_print_and_json_say_the_same():
    """8 rows of 64 tokens on each card a second: 512 tokens/s; on 16 cards in 1.6 s 320 and 5,120."""
    lines = (line(point(8, 1.0), point(16, 1.6, all_gather=0.8, fits=False)),)
    text = printed(*lines)
    rows = [row.split() for row in text]
    assert ["8", "(1", "node)", "512", "4,096", "100", "%", "0", "%", "1.00", "s", "10.00"] in rows
    assert ["16", "(2", "nodes)", "320", "5,120", "62", "%", "50", "%", "1.60", "s", "10.00!"] in rows
    assert any("weak scaling" in row and "8 rows a step" in row for row in text)
    assert any("! does not fit" in row for row in text)
    content = json.loads(json.dumps(scaling_to_json(lines, ROWS)))
    assert content["rows_per_gpu"] == 8
    (layout,) = content["layouts"]
    small, large = layout["points"]
    assert (small["efficiency"], large["efficiency"]) == pytest.approx((1.0, 0.625))
    assert large["throughput"]["tokens_per_s"] == pytest.approx(5120)
    assert (large["gpus"], large["nodes"], large["exposed_share"], large["fits"]) == (16, 2, 0.5, False)
    assert layout["bend"]["lane"] == "all_gather"


def test_a_refused_count_says_why():
    text = printed(line(refused(8, "mesh.tensor: does not divide"), point(16, 1.0)))
    assert any("8 (1 node)" in row and "none: mesh.tensor: does not divide" in row for row in text)


def test_a_long_reason_stays_within_the_terminal():
    rows = printed(
        line(refused(8, "mesh.tensor: " + "does not divide heads of q_proj (32), " * 6), point(16, 1.0)), width=80
    )
    assert max(map(len, rows)) <= 80


def test_a_price_adds_a_column():
    """4,096 tokens/s: a million take 244.1 s, which on 8 cards at 3.6 an hour cost 1.953."""
    (row,) = [row for row in printed(line(point(8, 1.0, price=3.6))) if "(1 node)" in row]
    assert row.split()[-1] == "1.95"
    assert not any("cost" in row for row in printed(line(point(8, 1.0))))


@pytest.mark.parametrize("width", [80, 120])
def test_no_line_is_wider_than_the_terminal(width):
    rows = printed(line(point(8, 1.0), point(4096, 12.5, all_gather=11.0)), width=width)
    assert max(map(len, rows)) <= width
