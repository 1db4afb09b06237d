"""`Outlook`: whether those that run on one executor can be expected to get all their blocks if one more joins them.

Made for one plan's admissions and built when first asked: it costs a pass over the running sequences, and most plans
admit nobody or have more than half of the pool to spare.
"""

from __future__ import annotations

from collections.abc import Iterable
from operator import ge

from scheduler_svc.core.reserve import Crowd, OutputLengths
from scheduler_svc.core.running import Need, RunningSet
from scheduler_svc.core.sequence import Sequence


class Outlook:
    """The expected growth of a running set; `share` of it is to be left to those that run, 0 for none."""

    __slots__ = ("_lengths", "_lowest", "_num_brought", "_peers", "_refused", "_running", "_share", "_sizes")

    def __init__(self, running: RunningSet, lengths: OutputLengths, share: float) -> None:
        self._running = running
        self._lengths = lengths
        self._share = share
        self._sizes: list[tuple[int, float, int]] | None = None
        """Of each running sequence: priority, positions beyond its slots, blocks that it brought."""
        self._num_brought = 0
        """Blocks that all of them brought."""
        self._peers: Crowd | None = None
        """Those of at least the priority `_lowest`; None where there are none."""
        self._lowest: int | None = None
        """None: `_peers` are not known, because nobody has asked since the last one started."""
        self._refused: tuple[int, float, int] | None = None
        """The last sequence there was no room for; there is none for one that is larger in everything either."""

    def has_room_for(self, seq: Sequence, need: Need) -> bool:
        """Whether the sequence can start without taking blocks that others are expected to need.

        With nothing of its priority running there is nobody to leave anything to, below half of the pool there is no
        hurry, and those of lower priority make room when it comes to that.
        """
        running = self._running
        pool, block_size = running.pool, running.limits.block_size
        num_used = pool.num_used + need.num_taken
        if not self._share or not running.num_running or 2 * num_used <= pool.num_blocks:
            return True
        if self._sizes is None:
            self._sizes = self._sizes_of(running)
            self._num_brought = sum(num_brought for _, _, num_brought in self._sizes)
        num_shared = max(0, pool.num_used - self._num_brought)
        size = (-seq.priority, self._growth(seq, need.num_blocks * block_size), need.num_taken)
        if self._refused is not None and all(map(ge, size, self._refused)):
            return False
        peers = self._at_least(seq.priority)
        if peers is None or num_shared + peers.peak_with(*size[1:]) <= pool.num_blocks:
            return True
        self._refused = size
        return False

    def started(self, seq: Sequence) -> None:
        """The sequence runs now."""
        if self._sizes is not None:
            self._sizes.append((seq.priority, self._growth(seq, seq.num_slots), seq.num_brought))
            self._num_brought += seq.num_brought
            self._lowest = None

    def _at_least(self, priority: int) -> Crowd | None:
        """The running sequences of at least that priority; None when there are none."""
        if self._lowest != priority:
            assert self._sizes is not None
            peers = [(growth, brought) for of_peer, growth, brought in self._sizes if of_peer >= priority]
            self._peers = Crowd(peers, self._running.limits.block_size) if peers else None
            self._lowest = priority
        return self._peers

    def _sizes_of(self, sequences: Iterable[Sequence]) -> list[tuple[int, float, int]]:
        """`_sizes` of running sequences, with `_growth` and properties written out: there may be a thousand of them."""
        remaining, share, block_size = self._lengths.remaining, self._share, self._running.limits.block_size
        sizes = []
        for seq in sequences:
            assert seq.table is not None
            num_known, num_blocks = len(seq.token_ids), len(seq.table.block_ids)
            most, num_outputs = seq.token_limit - seq.prompt_len, num_known - seq.prompt_len
            growth = num_known + remaining(num_outputs, most) - 1 - num_blocks * block_size
            sizes.append((seq.priority, growth * share if growth > 0 else 0.0, num_blocks - seq.num_found))
        return sizes

    def _growth(self, seq: Sequence, num_slots: int) -> float:
        """Positions that the sequence is expected to need beyond those slots; its last token needs none."""
        remaining = self._lengths.remaining(seq.num_output_tokens, seq.token_limit - seq.prompt_len)
        return max(0.0, len(seq.token_ids) + remaining - 1 - num_slots) * self._share
