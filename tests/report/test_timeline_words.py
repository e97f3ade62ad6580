"""A step in sentences, and the step section in print and as JSON."""

from __future__ import annotations

import io
import json
import re
from dataclasses import replace
from typing import get_args

import pytest
from rich.console import Console

from report.footprints import answer, footprint
from report.timelines import COMPUTED, MS, RATED, STEP, span, throughput, timed
from shardwise.report.answer import answer_to_json
from shardwise.report.footprint_table import print_answer
from shardwise.report.timeline_words import (
    LANE_WORDS,
    MOST_WAITS,
    WHAT_WORDS,
    critical_words,
    exposed_words,
    headline_words,
    number_text,
    seconds_text,
    speed_words,
    units_words,
    use_words,
)
from shardwise.spec.cluster import Cluster
from shardwise.spec.curve import Curve
from shardwise.spec.speeds import DeviceSpeeds, Measured
from shardwise.spec.timeline import LANES, Span, Wait, What

BLOCKS = "model.layers"
PLAN = answer(footprint()).plan.model_copy(update={"accumulation_steps": 1})


def sentences(timeline):
    return list(critical_words(timeline, PLAN, BLOCKS))


def only(*waits: Wait, spans: tuple[Span, ...] = STEP.spans):
    (sentence,) = sentences(replace(STEP, waits=waits, spans=spans))
    return sentence


def printed(judged, width=120) -> str:
    text = io.StringIO()
    print_answer(Console(file=text, width=width), judged)
    return text.getvalue()


def test_the_critical_path_is_told_with_the_most_first():
    assert sentences(STEP) == [
        "the step ends with 6.10 ms of waiting for the last reduction, of the root: nothing hides it",
        "backward waits 2.60 ms for the reduce-scatter of block 2 (likewise blocks 1 and 2, 5.20 ms in all): "
        "the link is 2.3x too slow to hide it",
        "the step begins with 2.00 ms of waiting for the first gathers, of the root and block 0: nothing hides them",
    ]


def test_waits_for_a_link_that_is_fast_enough_say_that_it_starts_too_late():
    """As in the test of the factor: 6 ms of gathers over 8 ms of computing."""
    gathers = [span("all_gather", "all_gather", 0, 8, 10), span("all_gather", "all_gather", 1, 16, 20)]
    computed = [span("compute", "forward", unit, start, start + 8) for unit, start in ((7, 0), (0, 10), (1, 20))]
    waits = [Wait(8 * MS, 10 * MS, computed[1], gathers[0]), Wait(18 * MS, 20 * MS, computed[2], gathers[1])]
    assert only(*waits, spans=(*gathers, *computed)) == (
        "forward waits 2.00 ms for the all-gather of block 0 (likewise blocks 0 and 1, 4.00 ms in all): "
        "the link is fast enough (busy for 0.75 of the computing beside it), but it starts too late"
    )


def test_what_is_no_link_gets_its_own_words():
    update, norm = COMPUTED[13], COMPUTED[12]
    host = span("host", "update", "", 10, 29)
    assert only(Wait(22.7 * MS, 29 * MS, update, host)) == "the update waits 6.30 ms for the optimizer on the host"
    issued = span("issue", "issue", 1, 4, 5.5)
    assert only(Wait(5 * MS, 5.5 * MS, COMPUTED[2], issued)) == (
        "forward waits 500 us for the host to issue block 1: the device is done sooner than the host issues operations"
    )
    agreed = span("all_reduce", "exchange", "", 20, 28.8)
    assert only(Wait(22.7 * MS, 28.8 * MS, norm, agreed)).startswith(
        "the gradient norm waits 6.10 ms for the agreement of all ranks"
    )
    fetched = span("to_device", "fetch", 1, 3, 5.5)
    held_up = span("compute", "forward", 1, 5.5, 7.5)
    assert only(Wait(5 * MS, 5.5 * MS, held_up, fetched), spans=(COMPUTED[1], fetched, held_up)).endswith(
        "for the copy from the host of block 1: the link to the host is 1.2x too slow to hide it"
    )


def test_what_comes_behind_all_computing_ends_the_step():
    update = span("host", "update", "", 30, 34)
    norm = span("host", "clip", "", 34, 34.5)
    assert sentences(replace(STEP, waits=(), spans=(*STEP.spans, update, norm))) == [
        "the step ends with 4.00 ms of the optimizer on the host: nothing else is left",
        "the step ends with 500 us of the gradient norm on the host: nothing else is left",
    ]


def test_waits_of_no_weight_are_not_told():
    """A thousandth of 30 ms is 30 us."""
    tiny = Wait(5 * MS, 5.02 * MS, COMPUTED[2], span("all_gather", "all_gather", 1, 3, 5.02))
    assert sentences(replace(STEP, waits=(tiny,))) == []


@pytest.mark.parametrize(
    ("units", "words"),
    [
        (["model.layers.17"], "block 17"),
        (["root"], "the root"),
        (["model.layers.3", "model.layers.4", "model.layers.5"], "blocks 3 to 5"),
        (["model.layers.5", "model.layers.4"], "blocks 4 and 5"),
        (["model.layers.5", "model.layers.9"], "block 5 and block 9"),
        ([f"model.layers.{number}" for number in (1, 3, 5, 7)], "4 of the blocks 1 to 7"),
        (["root", "model.layers.0", "lm_head"], "the root and block 0 and lm_head"),
        (["a", "b", "c", "d"], "4 units"),
    ],
)
def test_units_are_named_as_people_say_them(units, words):
    assert units_words(units, BLOCKS) == words


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (2e6, "556 h"),
        (9999.4, "9999 s"),
        (123.4, "123 s"),
        (1.2345, "1.23 s"),
        (0.9999, "1.00 s"),
        (0.0412, "41.2 ms"),
        (99.96e-3, "100 ms"),
        (12e-6, "12.0 us"),
        (0.5e-6, "0.50 us"),
    ],
)
def test_times_have_three_digits(seconds, text):
    assert seconds_text(seconds) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (2250, "2,250"),
        (1307.4, "1,307"),
        (999.4, "999"),
        (31.25, "31.2"),
        (29.96, "30.0"),
        (1.82, "1.82"),
        (0.5, "0.5"),
    ],
)
def test_numbers_have_three_digits_or_are_whole(value, text):
    assert number_text(value) == text


def test_a_peak_above_1000_is_written_out():
    assert "of 2,250 TFLOP/s" in use_words(throughput(peak=2250e12))


def test_throughput_in_words():
    """512 tokens in 30 ms are 17,067 a second, 2,133 on each of 8; a million take 58.6 s, 8 cards for 58.6 s at 2.49 an
    hour cost 0.324. 1.5e12 FLOPs in 30 ms on 8 cards are 6.25e12 a second on each, a fifth of the peak."""
    found = throughput(price=2.49, again=0.5e12)
    assert headline_words(found) == "30.0 ms a step: 2,133 tokens/s on each device, 17,067 in all"
    assert use_words(found) == (
        "MFU 20.0 % of 31.2 TFLOP/s (HFU 26.7 %, recomputation included); "
        "a million tokens take 58.6 s and cost 0.324 (price per card and hour: 2.49)"
    )
    assert use_words(throughput(peak=None)) == "a million tokens take 58.6 s"


def test_exposed_communication_by_kind():
    assert exposed_words(STEP) == (
        "exposed: 13.3 ms of 22.8 ms of communication, 44.3 % of the step; 42 % are hidden; "
        "all-gather 2.00 ms of 7.00 ms, reduce-scatter 11.3 ms of 15.8 ms"
    )
    alone = replace(STEP, busy={"compute": STEP.step_s}, exposed={}, exposed_s=0.0, hidden_s=0.0)
    assert exposed_words(alone) == "nothing is exchanged"
    split = "4.00 ms of the computing are exchanges over the tensor axis, which nothing hides"
    assert exposed_words(replace(STEP, tensor_s=4 * MS)) == f"{exposed_words(STEP)}; {split}"
    assert exposed_words(replace(alone, tensor_s=4 * MS)) == f"no gathers or reductions; {split}"


def test_speeds_say_where_they_come_from():
    rated = Cluster(name="2x8xA10", nodes=2, per_node=8, gpu=RATED)
    plan = PLAN.model_copy(update={"dtypes": PLAN.dtypes.model_copy(update={"param": "bf16"})})
    assert speed_words(rated, plan) == (
        "speeds: catalogue (A10, 125 TFLOP/s at most, 26 GB/s between cards of a node; network eth-25, assumed as "
        "none was named); measure them with shardwise probe"
    )
    old = RATED.model_copy(
        update={"rates": RATED.rates.model_copy(update={"products": {"fp32": RATED.rates.products["fp32"]}})}
    )
    words = speed_words(rated.model_copy(update={"gpu": old}), plan)
    assert "(A10, 31.2 TFLOP/s at most in fp32, as it has no units for bf16, 26 GB/s" in words
    assert "; network eth-80)" in speed_words(rated.model_copy(update={"network": "eth-80"}), plan)
    one = Curve(points=((1.0, 1.0),), source="here")
    device = DeviceSpeeds(products={"fp32": one}, memory={"fp32": one}, issue_s=0)
    measured = Measured(device=device, source="probe of today")
    assert speed_words(rated.model_copy(update={"measured": measured}), plan) == "speeds: measured (probe of today)"


def test_the_section_is_printed_once_with_the_timeline_s_notes():
    text = " ".join(printed(timed(answer(footprint(), footprint()))).split())
    assert text.count("a step: 2,133 tokens/s") == 1
    assert "the link is 2.3x too slow to hide it" in text
    assert "note: the network is assumed" in text


def test_without_a_timeline_there_is_no_section():
    assert "tokens/s" not in printed(answer(footprint()))
    content = answer_to_json(answer(footprint()))
    assert content["throughput"] is None
    assert content["reports"][0]["timeline"] is None


def test_no_more_than_five_sentences_are_printed_and_all_are_in_json():
    """Seven units whose names differ in more than a number."""
    names = [f"{letter}.block" for letter in "abcdefg"]
    computed = [span("compute", "forward", name, 3 + 2 * place, 4 + 2 * place) for place, name in enumerate(names)]
    gathers = [span("all_gather", "all_gather", name, 2 + 2 * place, 3 + 2 * place) for place, name in enumerate(names)]
    waits = tuple(
        Wait(gather.start, gather.end, held_up, gather) for gather, held_up in zip(gathers, computed, strict=True)
    )
    spans = (span("compute", "forward", "first", 0, 2), *computed, *gathers)
    judged = timed(answer(footprint()), replace(STEP, waits=waits, spans=spans))
    assert len(re.findall(r"forward waits 1\.00 ms", printed(judged))) == MOST_WAITS == 5
    assert len(answer_to_json(judged)["reports"][0]["timeline"]["waits"]) == 7


def test_print_and_json_say_the_same():
    content = json.loads(json.dumps(answer_to_json(timed(answer(footprint()), found=throughput(price=2.49)))))
    timeline, found = content["reports"][0]["timeline"], content["throughput"]
    assert timeline["step_s"] == found["step_s"] == pytest.approx(0.03)
    assert timeline["exposed"] == {"all_gather": 2 * MS, "reduce_scatter": 11.3 * MS}
    assert timeline["overlap_efficiency"] == pytest.approx(9.5 / 22.8)
    assert [wait["total_s"] for wait in timeline["waits"]] == pytest.approx([6.1 * MS, 5.2 * MS, 2 * MS])
    assert timeline["waits"][1]["too_slow"] == pytest.approx(2.3)
    assert timeline["waits"][1]["unit"] == "model.layers.2"
    assert found["tokens_per_s_per_gpu"] == pytest.approx(512 / 0.03 / 8)
    assert found["mfu"] == found["hfu"] == pytest.approx(0.2)
    assert found["cost_per_million_tokens"] == pytest.approx(8 * 2.49 * 1e6 * 0.03 / 512 / 3600)


@pytest.mark.parametrize("width", [80, 100])
def test_no_line_is_wider_than_the_terminal(width):
    assert max(len(line) for line in printed(timed(answer(footprint())), width).splitlines()) <= width


def test_every_lane_and_every_thing_has_a_name():
    assert set(LANE_WORDS) == set(LANES)
    assert set(WHAT_WORDS) == set(get_args(What))
