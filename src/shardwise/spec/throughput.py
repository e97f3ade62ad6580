"""The Throughput: what a step's time comes to, in tokens, in shares of the cards' peak, and in money."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from shardwise.spec.problems import BadInput, Problem

SECONDS_PER_HOUR = 3600
MILLION = 1_000_000
MOST_PRICE = 1e12
"""Of one card or machine and hour, in any currency; costs stay numbers up to it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Price:
    """What cards cost, in any currency."""

    amount: float
    """For one hour; above 0, `MOST_PRICE` at most."""
    per: Literal["gpu", "node"]
    """Of one card, or of one machine with all its cards."""

    def __post_init__(self) -> None:
        """Refuse what is no price.

        Raises:
            BadInput: naming it.
        """
        if not 0 < self.amount <= MOST_PRICE:
            field, whole = ("--price", "card") if self.per == "gpu" else ("--price-per-node", "machine")
            reason = f"is not what an hour of one {whole} costs"
            allowed = f"a number above 0, {MOST_PRICE:g} at most"
            raise BadInput(Problem(field=field, value=self.amount, reason=reason, allowed=allowed))

    def per_gpu_hour(self, per_node: int) -> float:
        """Return what an hour of one card costs.

        Args:
            per_node: Cards of one machine.
        """
        return self.amount if self.per == "gpu" else self.amount / per_node


@dataclass(frozen=True, kw_only=True, slots=True)
class Flops:
    """Floating point operations of one optimizer step, over all ranks; `docs/timeline.md` says what counts."""

    model: float
    """Those that the training needs: forward, gradients of inputs, gradients of what trains."""
    again: float
    """Those that are done a second time: blocks that are recomputed, the head of a chunked loss."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Throughput:
    """What the time of one optimizer step comes to."""

    step_s: float
    """Seconds of a step."""
    tokens: int
    """Tokens of a step over all ranks: rows of the global batch times their length."""
    gpus: int
    """Devices, one per rank."""
    flops: Flops
    """Of a step, over all ranks."""
    peak_flops: float | None
    """What one device could do at most per second: dense matrix products in the dtype of computation, by its vendor; on
    CPUs the best that was measured. None: not known."""
    price_per_gpu_hour: float | None
    """What an hour of one device costs; None: not said."""

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second of all devices together."""
        return self.tokens / self.step_s

    @property
    def tokens_per_s_per_gpu(self) -> float:
        """Tokens per second and device."""
        return self.tokens_per_s / self.gpus

    @property
    def mfu(self) -> float | None:
        """Model FLOPs utilisation: FLOPs that the training needs, over what all devices could do in that time.

        After the PaLM paper (arXiv 2204.02311, appendix B): operations that are done again do not count, and attention
        counts the whole square of a row, as if nothing were skipped. None where no peak is known.
        """
        return self._share(self.flops.model)

    @property
    def hfu(self) -> float | None:
        """Hardware FLOPs utilisation: as `mfu`, with what is done again. None where no peak is known."""
        return self._share(self.flops.model + self.flops.again)

    @property
    def s_per_million(self) -> float:
        """Seconds for a million tokens, all devices together."""
        return MILLION / self.tokens_per_s

    @property
    def cost_per_million(self) -> float | None:
        """What a million tokens cost, in the price's currency; None without a price."""
        if self.price_per_gpu_hour is None:
            return None
        return self.price_per_gpu_hour * self.gpus * self.s_per_million / SECONDS_PER_HOUR

    def _share(self, flops: float) -> float | None:
        return None if self.peak_flops is None else flops / (self.step_s * self.gpus * self.peak_flops)
