"""A Curve: how long something takes by its size, from measured points."""

from __future__ import annotations

from bisect import bisect_right
from math import exp, log

from pydantic import Field, model_validator

from shardwise.spec.strict import Strict


class Curve(Strict):
    """Seconds of one operation by its size: bytes of a collective or a copy, FLOPs of a matrix product.

    Between two points it is a straight line in logarithms; below the first it is that point's seconds, as what is left
    there is latency; above the last it keeps that point's rate.
    """

    points: tuple[tuple[float, float], ...] = Field(min_length=1)
    """(size, seconds), both above 0, sizes ascending."""
    source: str
    """Where it is from: a document, a measurement."""

    @model_validator(mode="after")
    def _ascending(self) -> Curve:
        sizes = [size for size, _ in self.points]
        if sizes != sorted(set(sizes)) or sizes[0] <= 0 or min(seconds for _, seconds in self.points) <= 0:
            raise ValueError("sizes ascend, and sizes and seconds are above 0")
        return self

    def seconds(self, size: float) -> float:
        """Return the seconds of one operation of this size; 0 for none."""
        points = self.points
        if size <= 0:
            return 0.0
        place = bisect_right(points, (size, float("inf")))
        if place == 0:
            return points[0][1]
        low_size, low = points[place - 1]
        if place == len(points):
            return low * size / low_size
        high_size, high = points[place]
        share = log(size / low_size) / log(high_size / low_size)
        return low * exp(share * log(high / low))
