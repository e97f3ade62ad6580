"""Choices of the model of time that were made with published rows in sight and that no fit holds out, and the errors
where each is made otherwise.

for words, errors in errors_otherwise(checks).items():
    print(words, errors.median)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from shardwise.catalogue.cards import gpu
from shardwise.predict.pace.constants import JITTER, OVERLAP, UNHIDDEN
from shardwise.trials.cases import Case
from shardwise.trials.figures import Errors, errors_of_groups
from shardwise.trials.throughput_checks import TimeCheck, time_of, tokens_of
from shardwise.trials.throughput_figures import compared, error_of

SLOWED, HELD = "H100-SXM-96GB-HBM2e", "H100-SXM-80GB"
"""A card whose best product nobody published, and the one that it differs from by memory and by its limit of power."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """One choice, made otherwise."""

    otherwise: str
    """What is done in its place, in words."""
    change: Callable[[Case], Case] = lambda case: case
    """Makes a case one of the other choice."""
    values: Mapping[str, float] | None = None
    """Constants by name that take the place of the usual."""


def _attention_by(kernel: Literal["flash"] | None) -> Callable[[Case], Case]:
    def change(case: Case) -> Case:
        if case.runtime.attention_kernel == kernel:
            return case
        return replace(case, runtime=case.runtime.model_copy(update={"attention_kernel": kernel}))

    return change


def _as_fast_as_held(case: Case) -> Case:
    """Return a case whose cards of SLOWED reach as large a share of their peak as those of HELD."""
    slowed, held = case.cluster.gpu, gpu(HELD)
    if slowed is None or slowed.name != SLOWED or slowed.rates is None or held.rates is None:
        return case
    rates = slowed.rates.model_copy(update={"achieved": held.rates.achieved})
    card = slowed.model_copy(update={"rates": rates})
    return replace(case, cluster=case.cluster.model_copy(update={"gpu": card}))


CHOICES = (
    Choice(
        otherwise="attention of MPT by FlashAttention-2, as of all other programs, not by the first one in Triton",
        change=_attention_by("flash"),
    ),
    Choice(
        otherwise="attention of all programs by the kernel that torch chooses today",
        change=_attention_by(None),
    ),
    Choice(
        otherwise=f"{SLOWED} (500 W) reaches as large a share of its peak as {HELD} (700 W)",
        change=_as_fast_as_held,
    ),
    Choice(
        otherwise="UNHIDDEN 0.3, the middle of what products alone allow",
        values={UNHIDDEN.name: 0.3},
    ),
    Choice(
        otherwise="OVERLAP 0.12, as it was before the residuals were looked at",
        values={OVERLAP.name: 0.12},
    ),
    Choice(
        otherwise="JITTER 0: all machines are equally fast",
        values={JITTER.name: 0.0},
    ),
)
"""All of them, each alone."""


def errors_otherwise(checks: Iterable[TimeCheck], choices: Sequence[Choice] = CHOICES) -> dict[str, Errors]:
    """Return the errors of all compared rows with each choice made otherwise, alone, by what is done in its place."""
    # Row by row: what the choices of one row have in common is remembered.
    made = [(choice.otherwise, _error(check, choice)) for check in compared(checks) for choice in choices]
    by_choice = errors_of_groups(made)
    return {choice.otherwise: by_choice[choice.otherwise] for choice in choices if choice.otherwise in by_choice}


def _error(check: TimeCheck, choice: Choice) -> float:
    assert check.timed is not None
    case = choice.change(check.timed.case)
    if case is check.timed.case and choice.values is None:
        return error_of(check)
    return tokens_of(case) / time_of(case, choice.values).step_s / check.measured - 1
