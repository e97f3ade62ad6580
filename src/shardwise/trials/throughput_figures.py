"""Error figures over predicted throughputs: headline, all, without assumed networks, by source, by card, and those of a
flat rule beside them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from shardwise.predict.throughput import flops_of_step, peak_flops
from shardwise.trials.cases import Case
from shardwise.trials.figures import Errors, errors, errors_of_groups
from shardwise.trials.throughput_checks import TimeCheck, tokens_of

FLAT_SHARE = 0.45
"""Share of a card's peak that the flat rule takes every program to reach."""


def of_times(checks: Iterable[TimeCheck], *, headline: bool = False, assumed_networks: bool = True) -> Errors | None:
    """Return the errors of some rows together.

    Args:
        checks: Rows.
        headline: Only rows that are determined best.
        assumed_networks: Rows that do not name the network between their nodes too.
    """
    chosen = [check for check in compared(checks) if check.headline or not headline]
    return errors([error_of(check) for check in chosen if assumed_networks or not has_assumed_network(check)])


def times_by(checks: Iterable[TimeCheck], key: Callable[[TimeCheck], str]) -> dict[str, Errors]:
    """Return the errors of the compared rows in groups, by name."""
    return errors_of_groups((key(check), error_of(check)) for check in compared(checks))


def by_source(checks: Iterable[TimeCheck]) -> dict[str, Errors]:
    """Return the errors by the prefix of ids, which stands for the source."""
    return times_by(checks, lambda check: check.row.family)


def by_card(checks: Iterable[TimeCheck]) -> dict[str, Errors]:
    """Return the errors by card."""
    return times_by(checks, lambda check: str(check.row.cluster.gpu))


def compared(checks: Iterable[TimeCheck]) -> list[TimeCheck]:
    """Return the rows that are predicted."""
    return [check for check in checks if check.timed is not None]


def has_assumed_network(check: TimeCheck) -> bool:
    """Whether a compared row's network between nodes is assumed by its card."""
    return check.timed is not None and check.timed.network_assumed


def error_of(check: TimeCheck) -> float:
    """Return the signed relative error of a compared row."""
    error = check.relative_error
    assert error is not None
    return error


def furthest(checks: Iterable[TimeCheck], count: int) -> list[TimeCheck]:
    """Return the compared rows that are furthest off."""
    return sorted(compared(checks), key=lambda check: abs(error_of(check)), reverse=True)[:count]


def of_flat_rule(checks: Sequence[TimeCheck], *, headline: bool = False, by_parameters: bool = False) -> Errors | None:
    """Return the errors of the flat rule, or of the shorter one by parameters, on the same rows."""
    rows = [check for check in compared(checks) if check.headline or not headline]
    rule = flat_rule_by_parameters if by_parameters else flat_rule
    return errors([rule(check.timed.case) / check.measured - 1 for check in rows if check.timed is not None])


def flat_rule(case: Case) -> float:
    """Return tokens per second and GPU if FLAT_SHARE of the card's dense peak went into the model's FLOPs.

    FLOPs as programs count them for their MFU, without what is computed again; the peak is that of the plan's dtype of
    computation, also where linear layers are in fp8.
    """
    flops = flops_of_step(case.workload, case.plan).model / case.plan.mesh.world
    return tokens_of(case) * FLAT_SHARE * _peak(case) / flops


def flat_rule_by_parameters(case: Case) -> float:
    """Return the same by the shorter rule: 6 FLOPs per parameter and token, 4 where adapters train; no attention."""
    per_parameter = 6 if case.workload.lora is None else 4
    return FLAT_SHARE * _peak(case) / (per_parameter * case.workload.model.parameters)


def _peak(case: Case) -> float:
    peak = peak_flops(case.cluster, case.plan)
    assert peak is not None
    return peak
