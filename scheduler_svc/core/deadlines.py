"""Which sequences are out of time."""

from __future__ import annotations

from collections.abc import Mapping
from heapq import heapify, heappop, heappush

from scheduler_svc.core.events import FinishReason
from scheduler_svc.core.params import SeqId
from scheduler_svc.core.sequence import Sequence

_SLACK = 64

_Entry = tuple[float, SeqId, bool]
"""When, who, and whether only if it has never run."""


class Deadlines:
    """A heap of deadlines; entries of ended sequences are dropped when met, or when they outnumber the rest."""

    __slots__ = ("_heap", "_sequences")

    def __init__(self, sequences: Mapping[SeqId, Sequence]) -> None:
        self._sequences = sequences
        """All sequences that have not ended, kept by the owner."""
        self._heap: list[_Entry] = []

    def add(self, seq: Sequence) -> None:
        """Watches the sequence's deadlines, if it has any."""
        spec = seq.spec
        if spec.deadline is not None:
            heappush(self._heap, (spec.deadline, seq.seq_id, False))
        if spec.queue_deadline is not None:
            heappush(self._heap, (spec.queue_deadline, seq.seq_id, True))
        if len(self._heap) > 2 * len(self._sequences) + _SLACK:
            self._heap = [entry for entry in self._heap if self._is_live(entry)]
            heapify(self._heap)

    def next(self) -> float | None:
        """The earliest deadline that still matters; None when there is none."""
        while self._heap and not self._is_live(self._heap[0]):
            heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def pop_due(self, now: float) -> tuple[Sequence, FinishReason] | None:
        """Takes out one sequence whose deadline is at or before `now`; None when there is none."""
        deadline = self.next()
        if deadline is None or deadline > now:
            return None
        _, seq_id, only_in_queue = heappop(self._heap)
        reason = FinishReason.QUEUE_TIMEOUT if only_in_queue else FinishReason.DEADLINE
        return self._sequences[seq_id], reason

    def _is_live(self, entry: _Entry) -> bool:
        seq = self._sequences.get(entry[1])
        return seq is not None and not (entry[2] and seq.first_run is not None)
