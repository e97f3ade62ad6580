"""Whether predictions put plans in the right order: pairs of measured rows that differ in one decision.

Both rows are of one source, with the same model, machines, adapters and length. What follows from other decisions (the
global batch) is none of its own; the strategy is one, with the mesh and the resharding that come with it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from shardwise.trials.throughput_checks import TimeCheck

MARGIN = 0.05
"""Measured throughputs that are nearer than this are not told apart."""

_SHARDING = ("strategy", "reshard_after_forward", "replicate", "shard")


@dataclass(frozen=True, kw_only=True, slots=True)
class Pair:
    """Two rows that differ in one decision."""

    field: str
    """The decision; `strategy` stands for the mesh and the resharding too."""
    slow: TimeCheck
    """The row that was measured to be slower."""
    fast: TimeCheck
    """The other."""

    @property
    def right(self) -> bool:
        """Whether the prediction has the same order."""
        assert self.slow.timed is not None
        assert self.fast.timed is not None
        return self.slow.timed.tokens_per_s < self.fast.timed.tokens_per_s


@dataclass(frozen=True, kw_only=True, slots=True)
class Ranked:
    """Pairs of one kind."""

    pairs: int
    """How many."""
    right: int
    """Of these, how many are predicted in the right order."""


def pairs_of(checks: Iterable[TimeCheck]) -> list[Pair]:
    """Return the pairs of predicted rows that differ in one decision and by more than MARGIN."""
    groups: dict[str, list[TimeCheck]] = {}
    for check in checks:
        if check.timed is not None:
            groups.setdefault(_what_stays(check), []).append(check)
    return [pair for group in groups.values() for one, other in combinations(group, 2) for pair in _pair(one, other)]


def ranked(pairs: Iterable[Pair]) -> dict[str, Ranked]:
    """Return how many pairs are in the right order, by field."""
    found: dict[str, Ranked] = {}
    for pair in sorted(pairs, key=lambda pair: pair.field):
        before = found.get(pair.field, Ranked(pairs=0, right=0))
        found[pair.field] = Ranked(pairs=before.pairs + 1, right=before.right + pair.right)
    return found


def together(fields: Iterable[Ranked]) -> Ranked:
    """Return the sum over fields."""
    counts = list(fields)
    return Ranked(pairs=sum(one.pairs for one in counts), right=sum(one.right for one in counts))


def _pair(one: TimeCheck, other: TimeCheck) -> list[Pair]:
    """Return the two rows as a pair, if they are one."""
    mine, others = _decisions(one), _decisions(other)
    differing = [field for field in mine if mine[field] != others[field]]
    slow, fast = sorted((one, other), key=lambda check: check.measured)
    if len(differing) != 1 or fast.measured <= (1 + MARGIN) * slow.measured:
        return []
    return [Pair(field=differing[0], slow=slow, fast=fast)]


def _decisions(check: TimeCheck) -> dict[str, Any]:
    """Return what the row's plan decided, by field."""
    plan = check.row.plan.model_dump(exclude={"global_batch", "seq_len"})
    sharding = tuple(plan.pop(field) for field in _SHARDING)
    return {"strategy": sharding, **plan}


def _what_stays(check: TimeCheck) -> str:
    """Return what both rows of a pair have in common."""
    row = check.row
    model = row.model.model_dump(exclude={"params_b"})
    return repr((row.family, model, row.cluster.model_dump(), row.lora, row.plan.seq_len))
