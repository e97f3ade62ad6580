"""The answer of `shardwise plan` in print and as JSON: the same figures in both, and the right words for each case."""

from __future__ import annotations

import io
import json
from dataclasses import replace

import pytest
from rich.console import Console

from report.footprints import GIB, answer, footprint
from shardwise.report.answer import answer_to_json
from shardwise.report.footprint_table import MOST_ADVICE, print_answer
from shardwise.report.footprint_words import gib, source_words, verdict_words
from shardwise.spec.advice import Advice
from shardwise.spec.footprint import CATEGORIES


def printed(*footprints, width=120, encoding="utf-8", **given) -> str:
    raw = io.BytesIO()
    file = io.TextIOWrapper(raw, encoding=encoding)
    print_answer(Console(file=file, width=width), answer(*footprints, **given))
    file.flush()
    return raw.getvalue().decode(encoding)


def advice(setting: str, lowers: float, *, fits: bool = False) -> Advice:
    peak = footprint(backward=10 - lowers).peak
    return Advice(
        settings=(setting,), does="does", costs="time", lowers=int(lowers * GIB), peak=peak, device=None, fits=fits
    )


@pytest.mark.parametrize(
    ("found", "sentence", "fits"),
    [
        (footprint(), "It fits: 12.00 of 22.00 GiB on each card, 10.00 GiB to spare.", True),
        (
            footprint(total=(20, 21.5, 23)),
            "It should fit, but not surely: 21.50 of 22.00 GiB are needed on each card, and 23.00 GiB are possible.",
            True,
        ),
        (
            footprint(total=(20, 22, 25), needed=(18, 19, 20)),
            "It fits, tightly: 19.00 of 22.00 GiB are needed on each card, but PyTorch's allocator has to give memory "
            "back and try again, which is slow.",
            True,
        ),
        (
            footprint(total=(17, 18, 24), needed=(15, 16, 17)),
            "It fits: 18.00 of 22.00 GiB on each card, 4.00 GiB to spare.",
            True,
        ),
        (
            footprint(backward=20.25),
            "It does not fit: each card would need 22.25 of 22.00 GiB, 0.25 GiB too much.",
            False,
        ),
        (footprint(limit=None), "Live tensors of one rank peak at 10.00 GiB.", None),
    ],
)
def test_the_verdict_says_by_how_much(found, sentence, fits):
    judged = answer(found)
    assert verdict_words(judged) == sentence
    assert judged.fits is fits
    assert answer_to_json(judged)["fits"] is fits


def test_host_memory_can_say_no_where_the_card_says_yes():
    found = footprint()
    small = replace(found, host=replace(found.host, limit=int(2.5 * GIB)))
    judged = answer(small)
    assert judged.fits is False
    assert verdict_words(judged).endswith("But loading needs 3.00 GiB of host memory per node, which has 2.50 GiB.")


def test_the_last_instrument_decides():
    assert answer(footprint(), footprint(backward=25)).fits is False
    assert answer(footprint(backward=25), footprint()).fits is True


def test_the_peak_is_named_with_block_categories_and_largest_buffer():
    text = printed(footprint())
    assert "peak in backward, at model.layers.2: 10.00 GiB of live tensors" in text
    assert "largest contiguous buffer: 1.00 GiB, logits and loss at lm_head" in text
    rows = {line[2:22].strip(): line.split() for line in text.splitlines()}
    assert rows["activations"][1:3] == ["1.00", "8.00"]
    assert rows["live tensors"][2:4] == ["3.00", "10.00"]
    assert "inputs" not in rows


def test_what_lies_on_the_host_is_shown_and_in_no_total():
    text = printed(footprint())
    (line,) = [line for line in text.splitlines() if line.strip().startswith("offloaded")]
    assert line.split()[1:3] == ["0.00", "0.50"]
    assert "live tensors           3.00     10.00" in text


def test_two_instruments_side_by_side_with_the_difference_of_each_category():
    text = printed(footprint(backward=10), footprint(backward=8))
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert "backward 10.00 8.00 +25.0 % at model.layers.2" in lines
    assert "activations 8.00 6.00 +33.3 %" in lines
    assert "sharded parameters 2.00 2.00 equal" in lines


@pytest.mark.parametrize("width", [60, 80, 200])
def test_tables_keep_to_the_width_and_lose_no_source(width):
    text = printed(footprint(), width=width)
    assert "kept for backward, 1 x 64 tokens, checkpointing none" in " ".join(text.split())
    (row,) = [line for line in text.splitlines() if line.split()[:3] == ["activations", "1.00", "8.00"]]
    assert ("kept" in row) == (width == 200)
    assert len(row) <= width


def test_every_category_has_a_source_for_every_plan():
    plain = answer(footprint())
    deferred = answer(footprint(), accumulation="defer_all", mesh={"tensor": 2})
    for category in CATEGORIES:
        assert source_words(category, plain)
    assert "until the last micro-batch" in source_words("unsharded_gradients", deferred)
    assert "over 4 ranks x 2 tensor" in source_words("sharded_parameters", deferred)
    alone = answer(footprint(), fsdp={"strategy": "NO_SHARD"})
    assert "whole on every rank" in source_words("optimizer_states", alone)


@pytest.mark.parametrize("width", [80, 100])
def test_no_line_is_wider_than_the_terminal(width):
    lines = printed(footprint(), footprint(), width=width, advice=(advice("setting=1", 3),)).splitlines()
    assert max(len(line) for line in lines) <= width


def test_a_terminal_without_unicode_gets_a_bar_all_the_same():
    assert "################++............|" in printed(footprint(), encoding="ascii")


def test_the_bar_of_what_does_not_fit_goes_over_the_limit():
    (line,) = [line for line in printed(footprint(backward=42)).splitlines() if "in nine of ten" in line]
    bar = line.split()[0]
    assert 0 < bar.index("│") < bar.rindex("█")


def test_advice_is_short_in_print_and_whole_in_json():
    many = tuple(advice(f"setting={number}", 3 - number / 10, fits=number == 1) for number in range(MOST_ADVICE + 2))
    text = printed(footprint(backward=21), advice=many)
    then = "(then in backward, at model.layers.2)"
    assert f"setting=0 lowers the peak by 3.00 GiB to 7.00 GiB {then}\n" in text
    assert f"setting=1 lowers the peak by 2.90 GiB to 7.10 GiB {then}; then it fits\n" in text
    assert f"setting={MOST_ADVICE}" not in text
    assert len(answer_to_json(answer(footprint(), advice=many))["advice"]) == MOST_ADVICE + 2


def test_print_and_json_agree():
    judged = answer(footprint(), footprint(backward=9.5))
    content = json.loads(json.dumps(answer_to_json(judged)))
    assert [report["instrument"] for report in content["reports"]] == ["estimate", "trace"]
    peak = content["reports"][1]["footprint"]["peak"]
    assert peak == {
        "phase": "backward",
        "where": "model.layers.2",
        "allocated": int(9.5 * GIB),
        "live": {"sharded_parameters": 2 * GIB, "activations": int(7.5 * GIB), "offloaded": GIB // 2},
    }
    assert content["plan"]["fingerprint"] == judged.plan.fingerprint()
    assert content["reports"][0]["footprint"]["device"]["fits"] is True
    assert gib(peak["allocated"]) in printed(footprint(), footprint(backward=9.5))
