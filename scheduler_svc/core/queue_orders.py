"""Orders of waiting sequences of one priority, behind one seam, `QueueOrder`.

`Fifo` is first come, first served. `ResponseRatio` gives the highest response ratio, (wait + service) / service, where
the service is the number of tokens that must be computed first.

The response ratio prefers short prompts while everyone has waited little, and ages: a long prompt's ratio grows as
long as it waits. (A constant number of seconds per token multiplies every ratio's distance from 1 alike, so the order
needs none.) Two things bound it. Sequences of similar length share a bucket (powers of two) and are served in order of
arrival within it, so a pick looks at one head per bucket whatever the queue's length. And under sustained overload by
short prompts, whose own waits then grow, ratios alone would starve a long one; so every `OLDEST_TURN`-th admission of
a class goes to its oldest sequence.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Protocol

from scheduler_svc.core.sequence import Sequence

OLDEST_TURN = 8
"""One admission in this many goes to the oldest: an eighth of the throughput is the price of no starvation."""
_FIRST_BUCKET_BITS = 4
"""Prompts below 16 tokens are equally short."""


class QueueOrder(Protocol):
    """An ordered set of waiting sequences."""

    def __len__(self) -> int:
        """Number of sequences."""
        ...

    def push(self, seq: Sequence) -> None:
        """A sequence joins: behind its peers, or before them all if it is `in_front`."""
        ...

    def pop(self, now: float) -> Sequence | None:
        """Takes out the one to consider next; None when empty."""
        ...

    def put_back(self, seq: Sequence) -> None:
        """Undoes its `pop`. Several are undone in reverse order."""
        ...

    def admitted(self, seq: Sequence) -> None:
        """A sequence that was popped will not come back."""
        ...

    def remove(self, seq: Sequence) -> None:
        """Takes out a given sequence. KeyError when it is not here."""
        ...

    def shorten(self, seq: Sequence, service: int) -> None:
        """A given sequence has no more than `service` tokens to compute; its place may change."""
        ...


class Fifo:
    """First come, first served."""

    __slots__ = ("_waiting",)

    def __init__(self) -> None:
        # Ordered both ways and O(1) to delete from: a plain dict slows down when its head is popped again and again.
        self._waiting: OrderedDict[int, Sequence] = OrderedDict()

    def __len__(self) -> int:
        """Number of sequences."""
        return len(self._waiting)

    def push(self, seq: Sequence) -> None:
        """Joins at the tail."""
        self._waiting[seq.seq_id] = seq

    def head(self) -> Sequence:
        """The first one, left in place. StopIteration when empty."""
        return next(iter(self._waiting.values()))

    def pop(self, now: float) -> Sequence | None:
        """Takes out the first."""
        return self._waiting.popitem(last=False)[1] if self._waiting else None

    def put_back(self, seq: Sequence) -> None:
        """Puts it at the head."""
        self._waiting[seq.seq_id] = seq
        self._waiting.move_to_end(seq.seq_id, last=False)

    def admitted(self, seq: Sequence) -> None:
        """Nothing to learn."""

    def remove(self, seq: Sequence) -> None:
        """Takes it out of the middle."""
        del self._waiting[seq.seq_id]

    def shorten(self, seq: Sequence, service: int) -> None:
        """Keeps its place."""
        seq.service = service


class ResponseRatio:
    """Highest response ratio over uncached tokens; see the module's text."""

    __slots__ = ("_admitted_since_turn", "_buckets", "_num_waiting")

    def __init__(self) -> None:
        self._buckets: list[Fifo] = []
        self._num_waiting = 0
        self._admitted_since_turn = 0

    def __len__(self) -> int:
        """Number of sequences."""
        return self._num_waiting

    def push(self, seq: Sequence) -> None:
        """Joins the tail of its length's bucket."""
        self._bucket(seq).push(seq)
        self._num_waiting += 1

    def pop(self, now: float) -> Sequence | None:
        """Takes out the best head; the shorter one of equals."""
        if not self._num_waiting:
            return None
        self._num_waiting -= 1
        if self._admitted_since_turn >= OLDEST_TURN - 1:
            return min((bucket for bucket in self._buckets if bucket), key=_head_age).pop(now)
        best, best_ratio = None, -1.0
        for bucket in self._buckets:
            if bucket:
                head = bucket.head()
                ratio = max(0.0, now - head.arrival) / head.service
                if ratio > best_ratio:
                    best, best_ratio = bucket, ratio
        assert best is not None
        return best.pop(now)

    def put_back(self, seq: Sequence) -> None:
        """Puts it at the head of its bucket."""
        self._bucket(seq).put_back(seq)
        self._num_waiting += 1

    def admitted(self, seq: Sequence) -> None:
        """Counts towards the oldest one's turn, which has come when it was the oldest itself."""
        others = [_head_age(bucket) for bucket in self._buckets if bucket]
        if not others or arrival_order(seq) <= min(others):
            self._admitted_since_turn = 0
        else:
            self._admitted_since_turn += 1

    def remove(self, seq: Sequence) -> None:
        """Takes it out of the middle of its bucket."""
        self._bucket(seq).remove(seq)
        self._num_waiting -= 1

    def shorten(self, seq: Sequence, service: int) -> None:
        """Goes to the tail of the bucket where it belongs now, or keeps its place in the one it is in."""
        before = self._bucket(seq)
        seq.service = service
        after = self._bucket(seq)
        if after is not before:
            before.remove(seq)
            after.push(seq)

    def _bucket(self, seq: Sequence) -> Fifo:
        index = max(0, seq.service.bit_length() - _FIRST_BUCKET_BITS)
        while len(self._buckets) <= index:
            self._buckets.append(Fifo())
        return self._buckets[index]


def arrival_order(seq: Sequence) -> tuple[float, int]:
    """Sorts the oldest first."""
    return (seq.arrival, seq.seq_id)


def _head_age(bucket: Fifo) -> tuple[float, int]:
    return arrival_order(bucket.head())
