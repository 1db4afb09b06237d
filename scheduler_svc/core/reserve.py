"""How much memory the running sequences are going to need, so that admission can leave it to them.

Two parts. `OutputLengths` learns from finished outputs how many tokens a sequence that has given `n` will still give.
`Crowd` follows the running sequences into the future: when the one with the least left ends, its blocks come
back; in between all others have grown. What is needed at the worst moment is less than the sum of what each may use,
and more than what they use now.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from itertools import accumulate, count
from math import ceil
from operator import add, itemgetter, mul

_MAX_BUCKETS = 96
"""Enough for lengths below 2**47; they come as 32-bit numbers."""
_GROWTH_OF_WEIGHT = 1.01
"""Each finished output counts this much more than the one before: the last hundred make up most of the picture."""
_RESCALE_AT = 1e12
_PRIOR_WEIGHT = 8.0
"""So many finished outputs outweigh the assumption that every output is as long as it may be."""


class OutputLengths:
    """A decaying histogram of output lengths, in buckets of half powers of two."""

    __slots__ = ("_above", "_is_stale", "_ran_out", "_step", "_sums", "_total", "_weight_at_limit", "_weights")

    def __init__(self) -> None:
        self._weights = [0.0] * _MAX_BUCKETS
        self._sums = [0.0] * _MAX_BUCKETS
        self._step = 1.0
        self._total = 0.0
        self._weight_at_limit = 0.0
        self._above: list[tuple[float, float]] = []
        """Per bucket: weight, and sum of lengths, of the buckets above it."""
        self._ran_out = 1.0
        """Share of outputs that are as long as they may be."""
        self._is_stale = True

    def finished(self, num_tokens: int, *, at_limit: bool) -> None:
        """An output ended by itself with that many tokens, or was as long as it was allowed to be."""
        self._step *= _GROWTH_OF_WEIGHT
        self._total += self._step
        if at_limit:
            self._weight_at_limit += self._step
        else:
            bucket = _bucket(num_tokens)
            self._weights[bucket] += self._step
            self._sums[bucket] += self._step * num_tokens
        self._is_stale = True
        if self._step > _RESCALE_AT:
            self._rescale()

    def remaining(self, num_tokens: int, limit: int) -> float:
        """Tokens that an output which has that many, and may have `limit`, is expected to get yet."""
        most = limit - num_tokens if limit > num_tokens else 0
        if self._is_stale:
            self._sum_up()
        weight, total = self._above[_bucket(num_tokens)]
        if not weight:
            return most
        by_itself = min(most, max(0.0, total / weight - num_tokens))
        return self._ran_out * most + (1.0 - self._ran_out) * by_itself

    def _sum_up(self) -> None:
        self._above = [(0.0, 0.0)] * _MAX_BUCKETS
        weight = total = 0.0
        for bucket in reversed(range(_MAX_BUCKETS)):
            self._above[bucket] = (weight, total)
            weight += self._weights[bucket]
            total += self._sums[bucket]
        known = self._total / self._step
        self._ran_out = (self._weight_at_limit / self._step + _PRIOR_WEIGHT) / (known + _PRIOR_WEIGHT)
        self._is_stale = False

    def _rescale(self) -> None:
        scale = 1.0 / self._step
        self._weights = [weight * scale for weight in self._weights]
        self._sums = [total * scale for total in self._sums]
        self._total *= scale
        self._weight_at_limit *= scale
        self._step = 1.0
        self._is_stale = True


class Crowd:
    """Sequences that run together: of each the positions that it is expected to need beyond its slots, and the blocks
    that it holds alone.

    Sorted once, it answers for one more sequence after the other: a queue whose heads do not fit asks in every plan.
    """

    __slots__ = ("_block_size", "_held", "_largest_first", "_needed", "_with_another")

    def __init__(self, sequences: Iterable[tuple[float, int]], block_size: int) -> None:
        self._block_size = block_size
        self._largest_first = largest_first = sorted(sequences, key=_to_come, reverse=True)
        """Those who are there when the others have ended come first."""
        growths = [ceil(num_positions / block_size) for num_positions, _ in largest_first]
        self._held = held = [*accumulate([num_blocks for _, num_blocks in largest_first], initial=0)]
        """Blocks that the first of them hold, by how many."""
        self._needed = [*map(add, held[1:], map(mul, growths, count(1)))]
        """Blocks that the first of them need, by how many, when the last of these ends."""
        self._with_another = [*map(add, self._needed, growths)]
        """The same, when somebody else is there and grows like them."""

    def peak_with(self, num_positions: float, num_blocks: int) -> int:
        """Most blocks that they will hold at once, and one more sequence with them."""
        index = bisect_right(self._largest_first, -num_positions, key=_negated)
        needed = self._held[index] + num_blocks + (index + 1) * ceil(num_positions / self._block_size)
        later = max(self._needed[:index], default=0)
        sooner = max(self._with_another[index:], default=0) + num_blocks
        return max(sooner, needed, later)


_to_come = itemgetter(0)


def _negated(size: tuple[float, int]) -> float:
    return -size[0]


def _bucket(num_tokens: int) -> int:
    bits = num_tokens.bit_length()
    half = (num_tokens >> (bits - 2)) & 1 if bits > 1 else 0
    return 2 * bits + half
