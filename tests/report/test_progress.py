"""Progress: plain lines in a log, a bar on a terminal."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from shardwise.report.progress import Progress


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def run(steps: int, *, total: int = 20, seconds: float = 1.0, start: int = 0, **options) -> list[str]:
    out, clock = io.StringIO(), Clock()
    with Progress(total=total, start=start, console=Console(file=out, width=80), clock=clock, **options) as progress:
        for step in range(start + 1, steps + 1):
            clock.now += seconds
            progress.update(step, loss=2.0, tokens_per_s=123.4, memory_bytes=2**30)
    assert "\r" not in out.getvalue()
    assert "\x1b" not in out.getvalue()
    return out.getvalue().splitlines()


def steps_of(lines: list[str]) -> list[int]:
    return [int(line.split()[1].split("/")[0]) for line in lines]


def test_plain_lines_are_spaced_by_time_and_end_with_the_last_step():
    assert steps_of(run(20, every_seconds=5)) == [1, 6, 11, 16, 20]


def test_plain_lines_by_steps():
    assert steps_of(run(20, seconds=0.001, every_steps=8)) == [1, 8, 16, 20]


def test_a_run_that_stops_early_shows_its_last_step_once():
    assert steps_of(run(9, every_seconds=5)) == [1, 6, 9]
    assert steps_of(run(6, every_seconds=5)) == [1, 6]


def test_what_a_line_says():
    lines = run(20, memory_name="allocated")
    assert lines[0] == "step 1/20  loss 2.0000  123 tok/s  allocated 1.00 GiB  ETA 0:19"
    assert "ETA" not in lines[-1]


def test_the_eta_of_a_resumed_run_counts_its_own_steps():
    assert "ETA 0:18" in run(12, start=10, seconds=2.0)[0]
    assert "ETA 2:46:38" in run(1, total=10_000)[0] + run(1, total=9_999)[0]


def test_the_held_out_loss_stays_until_the_next():
    out, clock = io.StringIO(), Clock()
    with Progress(total=3, console=Console(file=out, width=80), every_seconds=0, clock=clock) as progress:
        for step, held_out in ((1, None), (2, 1.5), (3, None)):
            progress.update(step, loss=float("nan"), tokens_per_s=1.0, memory_bytes=0, held_out_loss=held_out)
    lines = out.getvalue().splitlines()
    assert "held-out" not in lines[0]
    assert "held-out 1.5000" in lines[1]
    assert "held-out 1.5000" in lines[2]
    assert "loss nan" in lines[2]


def test_messages_are_plain_whole_lines():
    out = io.StringIO()
    with Progress(total=3, console=Console(file=out, width=80)) as progress:
        progress.message("saved [bold]here[/bold] " * 9)
    assert out.getvalue().count("\n") == 1
    assert "[bold]" in out.getvalue()


def test_no_steps_print_nothing():
    assert run(0) == []


def test_a_terminal_gets_a_bar():
    out = io.StringIO()
    console = Console(file=out, width=80, force_terminal=True)
    with Progress(total=2, console=console, memory_name="RSS") as progress:
        progress.update(1, loss=2.0, tokens_per_s=10.0, memory_bytes=2**20)
        progress.message("halfway")
        progress.update(2, loss=1.0, tokens_per_s=10.0, memory_bytes=2**20, held_out_loss=1.25)
    text = out.getvalue()
    for words in ("2/2", "loss 1.0000", "held-out 1.2500", "RSS 1.0 MiB", "halfway"):
        assert words in text


def test_the_bar_ends_when_the_run_fails():
    console = Console(file=io.StringIO(), width=80, force_terminal=True)
    with pytest.raises(RuntimeError), Progress(total=2, console=console):
        raise RuntimeError("broken")
    with Progress(total=2, console=console):
        pass
