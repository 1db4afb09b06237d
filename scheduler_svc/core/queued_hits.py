"""`QueuedHits`: how much of a waiting sequence is cached, for its place in the queue.

Every submission is looked up at once, but only a little way, because many come between two plans. Those that are hit as
far as that are looked up further, some blocks in each plan, and find their place anew. The keys that it takes are the
sequence's own, which it needs anyway when it starts.
"""

from __future__ import annotations

from collections import deque

from scheduler_svc.core.prefix import PrefixIndex
from scheduler_svc.core.queues import WaitingQueue
from scheduler_svc.core.sequence import Sequence, SequenceState

MAX_KEYS_AT_SUBMIT = 64
"""Keys made when a sequence is queued: some 50 microseconds."""
MAX_BLOCKS_PER_PLAN = 1024
"""Blocks that are looked up in one plan, from which it begins with no further sequence: about a millisecond."""


class QueuedHits:
    """The lookups of one executor's session."""

    __slots__ = ("_prefix", "_unfinished", "_waiting")

    def __init__(self, prefix: PrefixIndex, waiting: WaitingQueue) -> None:
        self._prefix = prefix
        self._waiting = waiting
        self._unfinished: deque[Sequence] = deque()

    def submitted(self, seq: Sequence) -> None:
        """A sequence is about to be queued: what is cached of it, as far as a quick look goes, needs no service."""
        match = self._prefix.match(seq, MAX_KEYS_AT_SUBMIT)
        seq.service = self._left_to_compute(seq, len(match.device_ids))
        if match.is_cut:
            self._unfinished.append(seq)

    def go_on(self) -> None:
        """Looks further, for a plan's worth."""
        num_left = MAX_BLOCKS_PER_PLAN
        while self._unfinished and num_left > 0:
            seq = self._unfinished[0]
            if seq.state is SequenceState.WAITING and seq.first_run is None:
                match = self._prefix.match(seq, MAX_BLOCKS_PER_PLAN)
                num_left -= len(match.device_ids)
                self._waiting.shorten(seq, self._left_to_compute(seq, len(match.device_ids)))
                if match.is_cut:
                    return
            self._unfinished.popleft()

    def _left_to_compute(self, seq: Sequence, num_hits: int) -> int:
        return max(1, len(seq.token_ids) - num_hits * self._prefix.block_size)
