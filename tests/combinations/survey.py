"""Every pair of values, what becomes of it, and the rows that prove those that run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from combinations.array import CoveringArray, Group
from combinations.features import APART, COST, FEATURES, GPU_KERNELS, TRIPLE, Pair, Row, all_pairs
from combinations.product import Product, Tiny, Verdict


@dataclass(frozen=True, kw_only=True)
class Survey:
    """What there is to prove and how."""

    verdicts: dict[Pair, Verdict]
    """Every pair."""
    rows: list[Row]
    """Live runs that between them hold every pair that runs on a CPU."""

    def pairs(self, runs_on: str) -> list[Pair]:
        """Return the pairs with this verdict."""
        return [pair for pair, verdict in self.verdicts.items() if verdict.runs_on == runs_on]


def survey(tiny: Tiny) -> Survey:
    """Ask the product about every pair, and find the rows."""
    asked = Product(tiny)
    verdicts = {pair: asked.verdict(pair) for pair in all_pairs()}
    runs = [pair for pair, verdict in verdicts.items() if verdict.runs_on == "cpu"]
    array = CoveringArray(on_cpu(), runs, [*runs, *triples(set(runs))], COST, APART)
    return Survey(verdicts=verdicts, rows=array.rows)


def on_cpu() -> dict[str, list[str]]:
    """Return the values of every feature whose kernels exist on CPUs."""
    return {
        feature: [value for value in values if GPU_KERNELS.get(feature) != value]
        for feature, values in FEATURES.items()
    }


def triples(runs: set[Pair]) -> Iterator[Group]:
    """Yield the values of the features of `TRIPLE` that can stand together."""
    for values in product(*(on_cpu()[feature] for feature in TRIPLE)):
        one, two, three = zip(TRIPLE, values, strict=True)
        if {(one, two), (one, three), (two, three)} <= runs:
            yield one, two, three
