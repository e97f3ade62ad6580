"""The instants of a step at which memory may peak, and what a runtime has to say about each."""

from __future__ import annotations

from typing import Literal, NamedTuple, Protocol

from shardwise.predict.terms.live import Live

Moment = Literal[
    "arrival",
    "forward",
    "head",
    "loss",
    "head_backward",
    "return",
    "backward",
    "reduction",
    "reduced",
    "deferred",
    "step",
]
"""What happens; the package's docstring explains each."""

ROOT = -1
"""Place of the root unit."""


class At(NamedTuple):
    """One instant of a step, of the last micro-batch where there are several."""

    moment: Moment
    """What happens."""
    unit: int = ROOT
    """Place of the unit at work in the order of forward; ROOT for the root."""
    evaluating: bool = False
    """A forward without gradients, after a step whose sharded gradients are still there."""


class ShardingTerms(Protocol):
    """What a runtime keeps alive on rank 0 beside what the computation needs. Every method is a pure function."""

    def at_rest(self) -> Live:
        """Return what lives all the time from the second step on: shards and optimizer states."""

    def gathered(self, at: At) -> Live:
        """Return gathered weights and the buffers that gather them."""

    def gradients(self, at: At) -> Live:
        """Return gradients, whole and sharded. Whole ones of the unit at work are not among them at `head_backward`
        and `backward`, where `predict.blocks` counts them as they come."""

    def reductions(self, at: At) -> Live:
        """Return the buffers of gradient reductions."""

    def update(self) -> Live:
        """Return the temporaries of the optimizer step."""
