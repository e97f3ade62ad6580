"""Changes of a plan whose effect somebody reported, and what the model of time says of each.

for direction in DIRECTIONS:
    print(direction.name, direction.reported_words, outcome(direction).effect)

A report seldom says everything. What it leaves open stands here as guesses in words: one of them is taken, the others
show how far the effect rests on it. Where a report gives the speed before the change, that speed picks among the
guesses; the effect never does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import log

from shardwise.catalogue.clusters import find_cluster
from shardwise.planner.by_shape import plan_by_shape
from shardwise.predict.step_time import timeline_of
from shardwise.spec.model_spec import ModelSpec
from shardwise.spec.reader import read_job
from shardwise.spec.runtime import Runtime
from shardwise.spec.timeline import Timeline

LEAST, MOST = 0.5, 2.0
"""An effect comes out where its part beyond 1 is so many times the reported part, at least and at most."""


@dataclass(frozen=True, kw_only=True)
class Guess:
    """Plausible values of what a report leaves open."""

    words: str
    """What is taken, for a reader."""
    cluster: str
    """Machines, as typed."""
    rows: int
    """Rows per card and forward."""
    seq_len: int
    """Tokens of each."""


@dataclass(frozen=True, kw_only=True)
class Direction:
    """A reported change of a plan, which makes a step faster."""

    name: str
    """What is changed, in words."""
    source: str
    """Where it was reported."""
    said: str
    """What was reported, in words."""
    low: float
    """Seconds before the change per seconds after it, as reported."""
    high: float
    """The same at most, where a range was reported; else the same as `low`."""
    model: Callable[[], ModelSpec]
    """Makes the model's shape."""
    runtime: Runtime
    """The program."""
    accumulation: int
    """Forwards per step."""
    settings: tuple[str, ...]
    """Settings of both plans."""
    before: tuple[str, ...]
    """Settings before the change."""
    after: tuple[str, ...]
    """Settings after it."""
    known: tuple[str, ...]
    """What is known of the run and from where, in sentences."""
    assumed: tuple[str, ...]
    """What is assumed and why, in sentences."""
    guesses: tuple[Guess, ...]
    """What the report leaves open; the first is taken unless the speed picks."""
    others: tuple[Guess, ...] = ()
    """Shown beside, never taken."""
    rows_per_s: float | None = None
    """Rows per second of all cards before the change, where reported."""
    picked_by_speed: bool = False
    """The guess is taken whose speed before the change is nearest to `rows_per_s`."""

    @property
    def reported_words(self) -> str:
        """The reported effect as text."""
        return f"{self.low:.2f}x" if self.low == self.high else f"{self.low:g}x to {self.high:g}x"


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What is predicted of a change under one guess."""

    direction: Direction
    """The change."""
    guess: Guess
    """What was taken."""
    before: Timeline
    """The step before it."""
    after: Timeline
    """The step after it."""
    rows_per_s: float
    """Rows per second of all cards before it."""

    @property
    def effect(self) -> float:
        """Seconds before the change per seconds after it."""
        return self.before.step_s / self.after.step_s

    @property
    def share(self) -> float:
        """The predicted part beyond 1 per reported part; 1 inside of a reported range."""
        low, high = self.direction.low, self.direction.high
        if low <= self.effect <= high:
            return 1.0
        return (self.effect - 1) / ((low if self.effect < low else high) - 1)

    @property
    def right_in_sign(self) -> bool:
        """The change makes the step faster."""
        return self.effect > 1

    @property
    def right_in_size(self) -> bool:
        """The effect comes out within LEAST and MOST times the reported one."""
        return LEAST <= self.share <= MOST


def outcome(direction: Direction) -> Outcome:
    """Return what is predicted of a change under the guess that is taken."""
    if not direction.picked_by_speed:
        return outcome_of(direction, direction.guesses[0])
    speed = direction.rows_per_s
    assert speed is not None
    return min(outcomes(direction), key=lambda found: abs(log(found.rows_per_s / speed)))


def outcomes(direction: Direction) -> list[Outcome]:
    """Return what is predicted of a change under every guess that might be taken."""
    return [outcome_of(direction, guess) for guess in direction.guesses]


def outcome_of(direction: Direction, guess: Guess) -> Outcome:
    """Return what is predicted of a change under one guess."""
    cluster, model = find_cluster(guess.cluster), direction.model()
    batch = guess.rows * direction.accumulation * cluster.world

    def step(change: tuple[str, ...]) -> Timeline:
        sizes = (f"seq_len={guess.seq_len}", f"micro_batch={guess.rows}", f"global_batch={batch}")
        job = read_job(None, [f"model={model.name}", *sizes, *direction.settings, *change], needs_data=False)
        planned = plan_by_shape(job, model, cluster)
        return timeline_of(planned.workload, planned.plan, cluster, direction.runtime, brief=True)

    before, after = step(direction.before), step(direction.after)
    return Outcome(direction=direction, guess=guess, before=before, after=after, rows_per_s=batch / before.step_s)
