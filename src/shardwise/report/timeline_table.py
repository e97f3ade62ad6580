"""The step section of `shardwise plan` in a terminal: time, use of the cards, exposed communication, waits."""

from __future__ import annotations

from itertools import islice

from rich.console import Console

from shardwise.report import timeline_words as words
from shardwise.report.answer import PlanAnswer
from shardwise.report.sentences import print_sentence


def print_step(console: Console, answer: PlanAnswer) -> None:
    """Print how long a step takes and why, of the last instrument that says so; nothing where none does."""
    report, throughput = answer.timed, answer.throughput
    if report is None or report.timeline is None or throughput is None:
        return
    timeline = report.timeline
    console.print()
    print_sentence(console, words.headline_words(throughput), "bold")
    print_sentence(console, words.use_words(throughput))
    print_sentence(console, words.exposed_words(timeline))
    block_list = answer.workload.model.block_list
    for sentence in islice(words.critical_words(timeline, report.plan, block_list), words.MOST_WAITS):
        print_sentence(console, sentence)
    print_sentence(console, words.speed_words(answer.cluster, report.plan), "dim")
    for note in timeline.notes:
        print_sentence(console, f"note: {note}", "dim")
