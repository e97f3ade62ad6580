"""The step on the command line: its section and its JSON, price, trace, scaling, and what is refused."""

from __future__ import annotations

import json
import re

import pytest

from cli.test_plan import FITS, answer, refused, run
from house.source import ROOT

MACHINES = ("--model", "llama-3.2-1b", "--cluster", "8xA10 eth-80", "fsdp=FULL_SHARD", "mixed_precision=bf16")
SCALE = (*MACHINES, "--scale", "8,...,32")


def words(*arguments) -> str:
    return " ".join(run(*arguments).output.split())


def test_the_step_is_told_after_memory_and_before_advice():
    text = words(*FITS)
    memory, step, advice = (text.index(part) for part in ("host memory:", " a step: ", "What would lower the peak"))
    assert memory < step < advice
    for part in ("tokens/s on each device", "MFU", "a million tokens take", "exposed: ", "speeds: catalogue"):
        assert text.find(part, step) > 0, part
    assert "cost" not in text[step : text.index("speeds: catalogue")]


def test_print_and_json_say_the_same():
    content, text = answer(*FITS), words(*FITS)
    found, timeline = content["throughput"], content["reports"][0]["timeline"]
    assert f"{found['tokens_per_s_per_gpu']:,.0f} tokens/s on each device, {found['tokens_per_s']:,.0f} in all" in text
    assert f"MFU {100 * found['mfu']:.1f} %" in text
    assert f"{100 * timeline['overlap_efficiency']:.0f} % are hidden" in text
    assert found["step_s"] == timeline["step_s"]
    assert (
        found["tokens"]
        == content["plan"]["micro_batch"] * content["plan"]["accumulation_steps"] * 8 * (content["job"]["seq_len"])
    )
    assert 0 < found["mfu"] <= found["hfu"] < 1


def test_the_page_names_every_key_of_the_step():
    page = (ROOT / "docs" / "plan.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`(\w+)`", page))
    content = answer(*MACHINES)
    timeline = content["reports"][0]["timeline"]
    parts = (content["throughput"], timeline, timeline["busy"], timeline["exposed"], timeline["waits"][0])
    assert not {key for part in parts for key in part} - named


def test_the_page_names_every_key_of_a_scaling():
    page = (ROOT / "docs" / "scaling.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`(\w+)`", page))
    content = answer(*SCALE)
    layout = content["layouts"][0]
    bends = [one["bend"] for one in content["layouts"] if one["bend"] is not None]
    parts = (content, layout, layout["points"][0], bends[0])
    assert not {key for part in parts for key in part} - named


def test_a_price_of_a_card_or_of_a_machine():
    """2.5 for each of 8 cards are 20 for a machine."""
    by_card = answer(*FITS, "--price", "2.5")["throughput"]
    by_node = answer(*FITS, "--price-per-node", "20")["throughput"]
    assert by_card == by_node
    seconds = 1e6 / by_card["tokens_per_s"]
    assert by_card["cost_per_million_tokens"] == pytest.approx(8 * 2.5 * seconds / 3600)
    assert f"cost {by_card['cost_per_million_tokens']:.3g}" in words(*FITS, "--price", "2.5")


def test_the_trace_holds_the_step(tmp_path):
    target = tmp_path / "step.json"
    content = json.loads(run(*FITS, "--json", "--perfetto", str(target)).output)
    trace = json.loads(target.read_text())
    assert {event["ph"] for event in trace["traceEvents"]} == {"M", "X"}
    end = max(event["ts"] + event["dur"] for event in trace["traceEvents"] if event["ph"] == "X")
    assert end <= 1e6 * content["throughput"]["step_s"] * (1 + 1e-6)
    ends: dict[int, float] = {}
    for event in sorted((one for one in trace["traceEvents"] if one["ph"] == "X"), key=lambda one: one["ts"]):
        assert event["ts"] >= ends.get(event["tid"], 0.0) - 1e-6, "events that overlap on a track are not shown"
        ends[event["tid"]] = event["ts"] + event["dur"]
    sizes = {event["args"]["bytes"] for event in trace["traceEvents"] if "bytes" in event["args"]}
    assert sizes
    before = target.read_text()
    (problem,) = refused(*FITS, "--perfetto", str(target))
    assert (problem.field, problem.reason) == ("--perfetto", "exists")
    assert target.read_text() == before


def test_a_trace_is_written_of_what_does_not_fit_too(tmp_path):
    target = tmp_path / "step.json"
    result = run("--model", "llama-3.1-70b", "--cluster", "8xA10", "fsdp=FULL_SHARD", "--perfetto", str(target))
    assert result.exit_code == 1
    assert target.exists()


def test_without_speeds_there_is_memory_and_no_time():
    arguments = ("--model", "smollm2-135m", "--cluster", "2xcpu", "fsdp=full_shard", "seq_len=64")
    content = answer(*arguments)
    assert content["throughput"] is None
    assert content["reports"][0]["timeline"] is None
    assert "tokens/s" not in words(*arguments)


def test_scaling_prints_every_layout_on_every_count():
    content, text = answer(*SCALE), run(*SCALE).output
    assert [layout["layout"] for layout in content["layouts"]] == ["flat", "hybrid", "tensor"]
    for layout in content["layouts"]:
        assert [point["gpus"] for point in layout["points"]] == [8, 16, 32]
        assert layout["title"] in text
    flat = content["layouts"][0]["points"]
    assert flat[0]["efficiency"] == 1.0
    assert f"{flat[1]['throughput']['tokens_per_s']:,.0f}" in text
    assert "weak scaling" in " ".join(text.split())


def test_scaling_starts_where_the_plan_alone_stands():
    """On 8 cards of one machine it is the plan of the job itself."""
    alone = answer(*MACHINES)["throughput"]
    assert answer(*SCALE)["layouts"][0]["points"][0]["throughput"] == alone


@pytest.mark.parametrize(
    ("arguments", "field", "remedy"),
    [
        (("--price", "0"), "--price", "above 0"),
        (("--price", "-2"), "--price", "above 0"),
        (("--price", "1e308"), "--price", "1e+12 at most"),
        (("--price-per-node", "0", "--table"), "--price-per-node", "remove it"),
        (("--perfetto", "no/such/step.json"), "--perfetto", "make it first"),
        (("-o", "no/such/plan.yaml"), "--output", "make it first"),
        (("--perfetto", "n" * 300), "--perfetto", "name another"),
        (("-o", "new.json", "--perfetto", "./new.json"), "--perfetto", "name two files"),
        (("--by", "trace", "--price", "2"), "--price", "write --by trace,estimate"),
        (("--price", "nan"), "--price", "above 0"),
        (("--price-per-node", "inf"), "--price-per-node", "above 0"),
        (("--price", "2", "--price-per-node", "16"), "--price", "give one of them"),
        (("--price", "2", "--table"), "--price", "remove it"),
        (("--scale", "8,12"), "--scale", "write 8 or 16"),
        (("--scale", "16,8"), "--scale", "write 8,16"),
        (("--scale", "0"), "--scale", "doubling"),
        (("--scale", "8", "--table"), "--scale", "give one of them"),
        (("--scale", "8", "--by", "trace"), "--scale", "remove --by"),
        (("--scale", "8", "--perfetto", "new.json"), "--perfetto", "give it alone"),
        (("--table", "--perfetto", "new.json"), "--perfetto", "give it alone"),
    ],
)
def test_bad_options_are_refused_with_the_remedy(arguments, field, remedy):
    problems = refused(*FITS, *arguments)
    assert [problem.field for problem in problems] == [field]
    assert remedy in f"{problems[0].allowed} {problems[0].fix}"


def test_no_option_is_taken_for_missing_when_it_is_empty():
    """An empty name would else be the machine at hand."""
    assert [problem.field for problem in refused(*FITS, "--cluster", "")] == ["cluster"]
    assert [problem.field for problem in refused(*FITS, "--model", "")] == ["model.path"]


@pytest.mark.parametrize(("option", "value"), [("--price", "2"), ("--perfetto", "new.json"), ("--scale", "2,4")])
def test_what_needs_the_time_of_a_step_is_refused_without_speeds(option, value):
    (problem,) = refused(
        "--model", "smollm2-135m", "--cluster", "2xcpu", "seq_len=64", "fsdp=FULL_SHARD", option, value
    )
    assert problem.field == option
    assert "shardwise probe" in f"{problem.reason} {problem.fix}".replace("`", "")
