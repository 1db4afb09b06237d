"""In which order waiting sequences are considered. Three policies:

fcfs            first come, first served; priorities are ignored
priority        strict priority classes, first come first served within one
length-aware    strict priority classes; within one the highest response ratio

`queue_orders` has the orders within a class. Under each policy, sequences that are `in_front` (preempted, or passed
over too often) go before all others of their priority, in the order in which they came there: preempted first,
resumed first.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable

from scheduler_svc.core.params import QueuePolicy
from scheduler_svc.core.queue_orders import Fifo, QueueOrder, ResponseRatio
from scheduler_svc.core.sequence import Sequence


class PriorityClasses:
    """Strict classes, highest priority first; in each the ones in front, then the given order."""

    __slots__ = ("_classes", "_last_front_rank", "_make_order", "_num_waiting", "_ranks")

    def __init__(self, make_order: Callable[[], QueueOrder]) -> None:
        self._make_order = make_order
        self._classes: dict[int, _Class] = {}
        self._ranks: list[int] = []
        """Negated priorities of the classes that are not empty, so that the highest comes first."""
        self._num_waiting = 0
        self._last_front_rank = 0

    def __len__(self) -> int:
        """Number of sequences."""
        return self._num_waiting

    @property
    def top_priority(self) -> int | None:
        """The priority of what `pop` gives next; None when empty."""
        return -self._ranks[0] if self._ranks else None

    def push(self, seq: Sequence) -> None:
        """Joins its class."""
        self.rank_in_front(seq)
        self._class(seq).push(seq)
        self._num_waiting += 1

    def pop(self, now: float) -> Sequence | None:
        """Takes out the next of the highest class."""
        if not self._ranks:
            return None
        seq = self._classes[-self._ranks[0]].pop(now)
        assert seq is not None
        self._left(seq)
        return seq

    def put_back(self, seq: Sequence) -> None:
        """Undoes the pop; who has come to the front since must have its rank."""
        self._class(seq).put_back(seq)
        self._num_waiting += 1

    def admitted(self, seq: Sequence) -> None:
        """Tells its class."""
        if (peers := self._classes.get(seq.priority)) is not None:
            peers.admitted(seq)

    def remove(self, seq: Sequence) -> None:
        """Takes it out of its class."""
        self._classes[seq.priority].remove(seq)
        self._left(seq)

    def shorten(self, seq: Sequence, service: int) -> None:
        """Tells its class."""
        self._classes[seq.priority].shorten(seq, service)

    def rank_in_front(self, seq: Sequence) -> None:
        """A place behind all that are in front already, kept until the sequence starts."""
        if seq.in_front and not seq.front_rank:
            self._last_front_rank += 1
            seq.front_rank = self._last_front_rank

    def _class(self, seq: Sequence) -> _Class:
        peers = self._classes.get(seq.priority)
        if peers is None:
            peers = self._classes[seq.priority] = _Class(self._make_order())
            insort(self._ranks, -seq.priority)
        return peers

    def _left(self, seq: Sequence) -> None:
        """An empty class goes, so that clients cannot fill memory with priorities."""
        self._num_waiting -= 1
        if not self._classes[seq.priority]:
            del self._classes[seq.priority]
            del self._ranks[bisect_left(self._ranks, -seq.priority)]


class _Class:
    """One priority: those in front, then the policy's order."""

    __slots__ = ("front", "rest")

    def __init__(self, rest: QueueOrder) -> None:
        self.front: list[Sequence] = []
        self.rest = rest

    def __len__(self) -> int:
        return len(self.front) + len(self.rest)

    def push(self, seq: Sequence) -> None:
        if seq.in_front:
            insort(self.front, seq, key=_front_rank)
        else:
            self.rest.push(seq)

    def pop(self, now: float) -> Sequence | None:
        return self.front.pop(0) if self.front else self.rest.pop(now)

    def put_back(self, seq: Sequence) -> None:
        if seq.in_front:
            self.push(seq)
        else:
            self.rest.put_back(seq)

    def admitted(self, seq: Sequence) -> None:
        self.rest.admitted(seq)

    def remove(self, seq: Sequence) -> None:
        if not seq.in_front:
            self.rest.remove(seq)
            return
        index = bisect_left(self.front, seq.front_rank, key=_front_rank)
        if index == len(self.front) or self.front[index] is not seq:
            raise KeyError(seq.seq_id)
        del self.front[index]

    def shorten(self, seq: Sequence, service: int) -> None:
        if seq.in_front:
            seq.service = service
        else:
            self.rest.shorten(seq, service)


class WaitingQueue:
    """All waiting sequences in the policy's order, and what they add up to."""

    __slots__ = ("_order", "num_known_tokens", "num_preempted", "num_swapped", "num_tokens")

    def __init__(self, policy: QueuePolicy) -> None:
        self._order = PriorityClasses(ResponseRatio if policy is QueuePolicy.LENGTH_AWARE else Fifo)
        self.num_tokens = 0
        """Tokens that waiting sequences had to compute first when they joined."""
        self.num_known_tokens = 0
        """Tokens that they had when they joined, cached ones included: what they take in memory."""
        self.num_preempted = 0
        """Waiting sequences that have run before."""
        self.num_swapped = 0
        """Waiting sequences whose blocks are in the host tier."""

    def __len__(self) -> int:
        """Number of sequences."""
        return len(self._order)

    @property
    def top_priority(self) -> int | None:
        """The priority of what `pop` gives next; None when empty."""
        return self._order.top_priority

    def push(self, seq: Sequence) -> None:
        """A sequence joins."""
        self._order.push(seq)
        self._count(seq, 1)

    def pop(self, now: float) -> Sequence | None:
        """Takes out the one to consider next; None when empty."""
        seq = self._order.pop(now)
        if seq is not None:
            self._count(seq, -1)
        return seq

    def put_back(self, popped: list[Sequence]) -> None:
        """Undoes the pops of sequences, given in the order in which they were popped."""
        for seq in popped:
            self._order.rank_in_front(seq)
        for seq in reversed(popped):
            self._order.put_back(seq)
            self._count(seq, 1)

    def admitted(self, seq: Sequence) -> None:
        """A sequence that was popped will not come back."""
        self._order.admitted(seq)

    def remove(self, seq: Sequence) -> None:
        """Takes out a given sequence. KeyError when it is not here."""
        self._order.remove(seq)
        self._count(seq, -1)

    def shorten(self, seq: Sequence, service: int) -> None:
        """A waiting sequence has only so many tokens to compute: more of it is cached than was known."""
        self.num_tokens += service - seq.service
        self._order.shorten(seq, service)

    def _count(self, seq: Sequence, sign: int) -> None:
        if sign > 0:
            seq.num_queued = len(seq.token_ids)
        self.num_known_tokens += sign * seq.num_queued
        self.num_tokens += sign * seq.service
        if seq.first_run is not None:
            self.num_preempted += sign
        if seq.stash is not None:
            self.num_swapped += sign


def _front_rank(seq: Sequence) -> int:
    return seq.front_rank
