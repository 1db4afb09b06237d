"""`ResidencySampler`: how long content stays in a tier, and whether it goes too soon.

Three times tell whether a pool is large enough for its load: how long content stays until it is evicted (*lifetime*),
how long it had not been used by then (*idle*), and how long it takes from one use to the next (*reuse gap*). When idle
times are shorter than reuse gaps, blocks are evicted just before they would have been hit.
"""

from __future__ import annotations

from cache_svc.blocks.histogram import Histogram

BOUNDS_S = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1e3, 3e3, 1e4, 3e4, 1e5)
"""From one decode step to a day, two to each power of ten: as exact as a decision about memory needs."""

_WORD = 1 << 32
_GOLDEN = 0x9E3779B1
"""2**32 over the golden ratio, odd: its multiples modulo 2**32 are spread as evenly as can be, however many."""


class ResidencySampler:
    """Follows one in `every` stays of content in a block, from its publication to its eviction; 1 follows all.

    Which ones depends on nothing but how many were published before, so that a replay follows the same; they are spread
    so that no period of the load (the n-th block of each prompt, say) is followed always or never. Memory: one entry
    per block followed, at most as many as the pool has blocks. `now` is in seconds of any clock that does not go back.
    """

    __slots__ = ("_followed", "_num_published", "_threshold", "idle", "lifetime", "reuse_gap")

    def __init__(self, every: int) -> None:
        if every < 1:
            raise ValueError(f"Got {every = } but expected at least 1")
        self._threshold = -(-_WORD // every)
        self._num_published = 0
        self._followed: dict[int, list[float]] = {}
        """Of each block that is followed: when its content was published, and when it was last used."""
        self.lifetime = Histogram(BOUNDS_S)
        """From publication to eviction."""
        self.idle = Histogram(BOUNDS_S)
        """From the last use to eviction."""
        self.reuse_gap = Histogram(BOUNDS_S)
        """From one use to the next; publication is the first use."""

    @property
    def num_followed(self) -> int:
        """Blocks whose stay has been sampled and has not ended."""
        return len(self._followed)

    def published(self, block_id: int, now: float) -> None:
        """New content is known in the block. What was followed there before, if its end was not told, is forgotten."""
        place = self._num_published * _GOLDEN % _WORD
        self._num_published += 1
        if place < self._threshold:
            self._followed[block_id] = [now, now]
        else:
            self._followed.pop(block_id, None)

    def hit(self, block_id: int, now: float) -> None:
        """A sequence starts on the block's content."""
        times = self._followed.get(block_id)
        if times is not None:
            self.reuse_gap.observe(now - times[1])
            times[1] = now

    def evicted(self, block_id: int, now: float) -> None:
        """The block's content had to make room."""
        times = self._followed.pop(block_id, None)
        if times is not None:
            self.lifetime.observe(now - times[0])
            self.idle.observe(now - times[1])

    def flush_samples(self) -> int:
        """Forgets the blocks that are followed, without counting them; how many. The histograms stay.

        For when all content goes at once and not for want of room: `BlockPool.flush`, or the loss of an executor.
        """
        num_followed = len(self._followed)
        self._followed.clear()
        return num_followed
