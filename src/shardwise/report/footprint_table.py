"""The answer of `shardwise plan` in a terminal: verdict, plan, memory, card, host, the step, advice."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.text import Text

from shardwise.report import footprint_words as words
from shardwise.report.answer import PlanAnswer, host_peak
from shardwise.report.plan_words import decisions
from shardwise.report.sentences import INDENT, print_sentence
from shardwise.report.terminal import print_row
from shardwise.report.timeline_table import print_step
from shardwise.spec.footprint import CATEGORIES, PHASES, Category, DeviceMemory, Instant, Interval, Term
from shardwise.spec.report import Report

_SHOWN = (
    *("strategy", "units", "stored", "computed", "batch", "checkpointing", "offload", "loss", "optimizer"),
    "compile",
)
"""Decisions that weigh in memory; `shardwise config` prints all."""
_BAR_CELLS = 30
_SMALLEST_SHARE = 0.0005
"""Categories that are less of the peak than this in every column are left out of tables."""
MOST_ADVICE = 5
"""Changes that are printed; JSON has all."""


def print_answer(console: Console, answer: PlanAnswer) -> None:
    """Print an answer for people; its width is the console's."""
    for line in words.head_words(answer):
        print_sentence(console, line)
    console.print()
    print_sentence(console, words.verdict_words(answer), "bold")
    device = answer.verdict.footprint.device
    if device is not None and device.limit is not None:
        _line(console, _bar(device.total, device.limit, console))
    console.print()
    for label, text, fields in decisions(answer.plan, answer.job):
        if label in _SHOWN:
            print_row(console, label, text)
            for reason in (answer.plan.reasons[name] for name in fields if name in answer.plan.reasons):
                print_row(console, "", reason, style="dim")
    print_row(console, "fingerprint", answer.plan.fingerprint())
    console.print()
    if len(answer.reports) == 1:
        _one_report(console, answer, answer.reports[0])
    else:
        _side_by_side(console, answer.reports)
    for line in words.peak_words(answer.verdict.footprint):
        print_sentence(console, line)
    _beyond_tensors(console, answer.verdict)
    print_step(console, answer)
    _advice(console, answer)
    for note in dict.fromkeys(note for report in answer.reports for note in report.notes):
        print_sentence(console, f"note: {note}", "dim")


def _line(console: Console, text: str, style: str = "") -> None:
    console.print(Text(INDENT + text, style), soft_wrap=True, highlight=False)


def _bar(total: Interval, limit: int, console: Console) -> str:
    """Draw the best guess, what may come on top, and the limit."""
    full, maybe, free, edge = "█▒░│" if "utf" in (console.encoding or "").lower() else "#+.|"
    scale = max(limit, total.high, 1) / _BAR_CELLS
    ends = [round(size / scale) for size in (total.value, total.high, limit)]
    cells = [full if cell < ends[0] else maybe if cell < ends[1] else free for cell in range(_BAR_CELLS)]
    cells.insert(ends[2], edge)
    interval = f"{words.gib(total.low)} .. {words.gib(total.high)} GiB"
    return f"{''.join(cells)}  {interval} in nine of ten cases"


def _one_report(console: Console, answer: PlanAnswer, report: Report) -> None:
    """Print categories against phases, with what each category is made of."""
    peaks, unit = report.footprint.peaks, words.unit_for(report.footprint.peak.allocated)
    what = f"{report.instrument}: {words.INSTRUMENTS[report.instrument]}"
    print_sentence(console, f"{unit.name} at the peak of each phase; {what}", "bold")
    names = [words.phase_words(instant.phase) for instant in peaks]
    shown = _categories(peaks)
    label = max([len(words.category_words(category)) for category in shown] + [len("live tensors")])
    widths = [max(len(name), 7) for name in names]
    room = console.width - len(INDENT) - label - sum(widths) - 2 * len(widths) - 2
    sources = {category: words.source_words(category, answer) for category in shown}
    inline = all(len(source) <= room for source in sources.values())
    _line(console, _cells("", label, names, widths), "bold")
    for category in shown:
        cells = [unit.of(instant.live.get(category, 0)) for instant in peaks]
        source = f"  {sources[category]}" if inline else ""
        _line(console, _cells(words.category_words(category), label, cells, widths) + source)
    totals = [unit.of(instant.allocated) for instant in peaks]
    _line(console, _cells("live tensors", label, totals, widths), "bold")
    places = [f"{name} at {instant.where}" for instant, name in zip(peaks, names, strict=True)]
    print_sentence(console, "; ".join(places), "dim")
    if not inline:
        console.print()
        for category, source in sources.items():
            print_sentence(console, f"{words.category_words(category)}: {source}", "dim")
    console.print()


def _side_by_side(console: Console, reports: Sequence[Report]) -> None:
    """Print every phase by category, a column per instrument, and how the first differs from the last."""
    for report in reports:
        print_sentence(console, f"{report.instrument}: {words.INSTRUMENTS[report.instrument]}", "dim")
    unit = words.unit_for(max(report.footprint.peak.allocated for report in reports))
    heads = [*(report.instrument for report in reports), "difference"]
    widths = [max(len(head), 8) for head in heads]
    label = max(len(words.category_words(category)) for category in CATEGORIES) + 2
    _line(console, _cells(unit.name, label, heads, widths), "bold")
    for phase in PHASES:
        found = [report.footprint.of_phase(phase) for report in reports]
        present = [instant for instant in found if instant is not None]
        if present:
            _phase_rows(console, found, present, unit, (label, widths))
    console.print()


def _phase_rows(
    console: Console,
    found: list[Instant | None],
    present: list[Instant],
    unit: words.Unit,
    layout: tuple[int, list[int]],
) -> None:
    totals = [None if instant is None else instant.allocated for instant in found]
    where = " / ".join(dict.fromkeys(instant.where for instant in present))
    row = _cells(words.phase_words(present[0].phase), layout[0], _figures(totals, unit), layout[1])
    _line(console, f"{row}  at {where}", "bold")
    for category in _categories(present):
        sizes = [None if instant is None else instant.live.get(category, 0) for instant in found]
        _line(console, _cells("  " + words.category_words(category), layout[0], _figures(sizes, unit), layout[1]))


def _figures(sizes: list[int | None], unit: words.Unit) -> list[str]:
    """Return a row of figures, `-` where an instrument says nothing, and the first against the last."""
    cells = ["-" if size is None else unit.of(size) for size in sizes]
    first, last = sizes[0], sizes[-1]
    if first is None or last is None:
        return [*cells, ""]
    if first == last:
        return [*cells, "equal"]
    return [*cells, f"{100 * (first - last) / last:+.1f} %" if last else "new"]


def _categories(instants: Sequence[Instant]) -> list[Category]:
    """Return the categories that show in a table, the largest at the highest instant first."""
    highest = max(instants, key=lambda instant: instant.allocated)
    worth = highest.allocated * _SMALLEST_SHARE
    shown = [name for name in CATEGORIES if any(instant.live.get(name, 0) > worth for instant in instants)]
    return sorted(shown, key=lambda name: (name == "offloaded", -highest.live.get(name, 0)))


def _cells(label: str, width: int, cells: Sequence[str], widths: Sequence[int]) -> str:
    return f"{label:<{width}}" + "".join(f"  {cell:>{size}}" for cell, size in zip(cells, widths, strict=True))


def _beyond_tensors(console: Console, report: Report) -> None:
    """Print what the card and the host hold beyond live tensors; where the figures come from is in JSON at length."""
    device, host = report.footprint.device, report.footprint.host
    if device is not None:
        console.print()
        _line(console, f"on the card: {words.gib(device.total.value)} GiB (nvidia-smi)", "bold")
        for line in _device_rows(device):
            _line(console, line)
    if host is not None:
        console.print()
        print_sentence(console, f"host memory: {words.host_words(host)}", "bold")
        stage, size = host_peak(host)
        for term in host.terms:
            if term.name.startswith(stage) and term.bytes > _SMALLEST_SHARE * size:
                _line(console, _term(term))


def _device_rows(device: DeviceMemory) -> Iterator[str]:
    yield from (_term(term) for term in device.terms)
    reserved = device.reserved
    interval = f"{words.gib(reserved.low)} .. {words.gib(reserved.high)}"
    yield f"{words.gib(reserved.value):>8}  of these reserved by PyTorch's allocator ({interval})"
    if device.limit is not None:
        yield f"{words.gib(device.limit):>8}  is what CUDA reports of the card"


def _term(term: Term) -> str:
    return f"{words.gib(term.bytes):>8}  {term.name} ({term.source.partition(':')[0]})"


def _advice(console: Console, answer: PlanAnswer) -> None:
    if not answer.advice:
        return
    console.print()
    _line(console, "What would lower the peak most (single changes, by estimate)", "bold")
    for advice in answer.advice[:MOST_ADVICE]:
        enough = "; then it fits" if advice.fits and answer.fits is False else ""
        print_sentence(console, f"{' '.join(advice.settings)} {words.advice_words(advice)}{enough}")
        print_sentence(console, f"{advice.does}; costs {advice.costs}", "dim", indent=2 * INDENT)
