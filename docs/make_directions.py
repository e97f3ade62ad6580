"""Write docs/directions.md, reported effects of changes held against predictions: python docs/make_directions.py"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from pages import filled, write

from shardwise.trials.directions import LEAST, MOST, Direction, Outcome, outcome, outcome_of
from shardwise.trials.reported import DIRECTIONS

TARGET = Path(__file__).with_name("directions.md")

HEAD = f"""# Reported changes, predicted

Made by `python docs/make_directions.py`; a test holds it up to date. Five changes of a plan whose effect users
reported in public threads, and what the model of time says of each, by the catalogue's speeds. An effect is seconds
before the change per seconds after it. It comes out right where its part beyond 1 is {LEAST:g} to {MOST:g} times the
reported part.

No report says everything. What is known of each run, and from where, is below; the rest is taken as such users had it.
Where a report gives the speed *before* the change, that speed picks among the usual networks or batches; the effect
never does. The tables show what the other choices would give: an effect rests on the ratio of computing to
communication, so most guesses change it, and some miss.

These reports were in sight when the model of time was made: that Adam on the host takes as long as its implementation
makes it came in because the last of them came out too small.
"""


def page() -> str:
    """Return the whole page."""
    found = [outcome(direction) for direction in DIRECTIONS]
    lines = [*_summary(found)]
    for one in found:
        lines += ["", *_case(one)]
    return HEAD + "\n" + "\n".join(lines) + "\n"


def _summary(found: list[Outcome]) -> Iterator[str]:
    yield "| change | reported | predicted | part beyond 1 | comes out |"
    yield "|---|--:|--:|--:|---|"
    for one in found:
        direction = one.direction
        share = f"{one.share:.2f} of it" if one.share != 1 else "in range"
        yield (
            f"| {direction.name} ({direction.source}) | {direction.reported_words} | {one.effect:.2f}x | {share} |"
            f" {_verdict(one)} |"
        )


def _verdict(found: Outcome) -> str:
    if found.right_in_size:
        return "right"
    return "missed: right in sign only" if found.right_in_sign else "missed"


def _case(found: Outcome) -> Iterator[str]:
    direction = found.direction
    yield f"## {direction.name[0].upper()}{direction.name[1:]}"
    yield ""
    yield filled(f"{direction.source}: {direction.said}.")
    yield ""
    yield "Known:"
    yield ""
    yield from (filled(f"- {one}", "  ") for one in direction.known)
    yield ""
    yield "Taken:"
    yield ""
    yield from (filled(f"- {one}", "  ") for one in direction.assumed)
    yield ""
    settings, before, after = (" ".join(some) for some in (direction.settings, direction.before, direction.after))
    program = "first FSDP" if direction.runtime.sharding == "fsdp1" else "FSDP2"
    yield filled(f"Program: {program}. Settings: `{settings}`; before `{before}`, after `{after}`.")
    yield ""
    yield from _guesses(direction, found)


def _guesses(direction: Direction, taken: Outcome) -> Iterator[str]:
    reported = "" if direction.rows_per_s is None else f" (reported: {direction.rows_per_s:.1f})"
    yield f"| with | rows/s before{reported} | step before | after | effect |"
    yield "|---|--:|--:|--:|--:|"
    for guess in (*direction.guesses, *direction.others):
        one = outcome_of(direction, guess)
        words, effect = guess.words, f"{one.effect:.2f}x"
        if guess == taken.guess:
            words, effect = f"**{words}**", f"**{effect}**"
        yield f"| {words} | {one.rows_per_s:.1f} | {one.before.step_s:.2f} s | {one.after.step_s:.2f} s | {effect} |"


PAGES = {TARGET: page}
"""Page -> what makes its whole text."""


if __name__ == "__main__":
    write(PAGES)
