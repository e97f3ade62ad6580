"""Progress of a run: a bar on a terminal, plain lines anywhere else."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, TextColumn
from rich.progress import Progress as Bar
from rich.text import Text

from shardwise.report.terminal import bytes_text


@dataclass(frozen=True, kw_only=True)
class _Update:
    """The figures of one optimizer step."""

    step: int
    loss: float
    tokens_per_s: float
    memory_bytes: int
    held_out_loss: float | None


class Progress:
    """Shows where a run stands; a context manager.

    On a terminal that is a bar. Elsewhere it is one line at the first step, then every `every_seconds` (and every
    `every_steps`, when given), and at the last step, without control characters.

    Args:
        total: Optimizer steps of the whole run.
        start: Steps already made, by a run that this one continues.
        memory_name: What the memory figure is: `RSS` on CPU, `allocated` on GPU.
        console: Where to write; default: standard output.
        every_seconds: Longest silence between plain lines.
        every_steps: Steps between plain lines, besides.
        clock: Seconds from any origin.
    """

    def __init__(
        self,
        *,
        total: int,
        start: int = 0,
        memory_name: str = "RSS",
        console: Console | None = None,
        every_seconds: float = 5.0,
        every_steps: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._total, self._start, self._memory_name = total, start, memory_name
        self._console = console if console is not None else Console()
        self._every_seconds, self._every_steps, self._clock = every_seconds, every_steps, clock
        self._began = clock()
        self._printed_at: float | None = None
        self._last: _Update | None = None
        self._last_printed = True
        self._held_out: float | None = None
        self._held_out_step: int | None = None
        self._bar = self._make_bar() if self._console.is_terminal else None

    def __enter__(self) -> Self:
        self._began = self._clock()
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
        elif self._last is not None and not self._last_printed:
            self._print_line(self._last)

    def update(
        self,
        step: int,
        *,
        loss: float,
        tokens_per_s: float,
        memory_bytes: int,
        held_out_loss: float | None = None,
        held_out_step: int | None = None,
    ) -> None:
        """Show the figures of `step`, counted from 1. A held-out loss stays shown, with its step, until the next."""
        if held_out_loss is not None:
            self._held_out, self._held_out_step = held_out_loss, held_out_step
        update = _Update(
            step=step,
            loss=loss,
            tokens_per_s=tokens_per_s,
            memory_bytes=memory_bytes,
            held_out_loss=self._held_out,
        )
        self._last, self._last_printed = update, False
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=step, figures=self._figures(update))
        elif self._is_due(step):
            self._print_line(update)

    def message(self, text: str) -> None:
        """Print a line of its own, above the bar when there is one."""
        self._console.print(Text(text), soft_wrap=True, highlight=False)

    def _make_bar(self) -> Bar:
        columns = (
            TextColumn("{task.completed:.0f}/{task.total:.0f}", markup=False),
            BarColumn(bar_width=12),
            TextColumn("{task.fields[figures]}", markup=False),
        )
        bar = Bar(*columns, console=self._console, refresh_per_second=4)
        bar.add_task("", total=self._total, completed=self._start, figures="")
        return bar

    def _is_due(self, step: int) -> bool:
        if step >= self._total or self._printed_at is None:
            return True
        if self._every_steps is not None and step % self._every_steps == 0:
            return True
        return self._clock() - self._printed_at >= self._every_seconds

    def _print_line(self, update: _Update) -> None:
        self._printed_at, self._last_printed = self._clock(), True
        self.message(f"step {update.step}/{self._total}  {self._figures(update)}")

    def _figures(self, update: _Update) -> str:
        parts = [f"loss {update.loss:.4f}"]
        if update.held_out_loss is not None:
            when = f" (step {self._held_out_step})" if self._held_out_step is not None else ""
            parts.append(f"held-out {update.held_out_loss:.4f}{when}")
        parts += [f"{update.tokens_per_s:.0f} tok/s", f"{self._memory_name} {bytes_text(update.memory_bytes)}"]
        left = self._seconds_left(update.step)
        if left is not None:
            parts.append(f"ETA {_clock_text(left)}")
        return "  ".join(parts)

    def _seconds_left(self, step: int) -> float | None:
        """Estimate from the steps made since this object was entered; None at the end or before any."""
        made = step - self._start
        if made <= 0 or step >= self._total:
            return None
        return (self._clock() - self._began) / made * (self._total - step)


def _clock_text(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
