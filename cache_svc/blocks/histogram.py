"""A histogram that costs nanoseconds to add to: plain ints, for others to publish."""

from __future__ import annotations

from bisect import bisect_left


class Histogram:
    """Counts per bucket and a sum; `bounds` are upper bounds, inclusive, and one bucket more takes the rest."""

    __slots__ = ("bounds", "buckets", "sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.buckets = [0] * (len(bounds) + 1)
        self.sum = 0.0

    @property
    def count(self) -> int:
        """How many values were counted."""
        return sum(self.buckets)

    def observe(self, value: float) -> None:
        """Counts one value."""
        self.buckets[bisect_left(self.bounds, value)] += 1
        self.sum += value
