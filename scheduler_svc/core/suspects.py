"""Which sequences may have killed an executor, and what becomes of them.

A sequence with a row in flight when an executor died is a *suspect*. Suspects run on probation, one at a time, beside
whatever else runs: so a second death has one culprit, and its neighbours are not blamed. A suspect that gets past the
tokens that were under way when its executor died is cleared. One under which a second executor dies is poisonous: it
ends, and for `REFUSED_S` a prompt like its own is refused before it can reach an executor.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from hashlib import sha256

from scheduler_svc.core.events import Refusal, RefusalReason
from scheduler_svc.core.params import SeqId
from scheduler_svc.core.running import InFlight
from scheduler_svc.core.sequence import Sequence, SequenceState

MAX_DEATHS = 2
"""Executors that may die under one sequence."""
REFUSED_S = 600.0
MAX_REFUSED = 1_024
"""Prompts remembered as poisonous; beyond it the oldest is forgotten."""


@dataclass(frozen=True, slots=True)
class _Record:
    num_deaths: int
    cleared_at: int
    """Tokens known when the sequence has got past what it ran when the executor died."""


class Suspects:
    """Suspects among `sequences`, all that have not ended; kept by the owner."""

    def __init__(self, sequences: Mapping[SeqId, Sequence]) -> None:
        self._sequences = sequences
        self._records: dict[SeqId, _Record] = {}
        self._on_probation: SeqId | None = None
        self._refused: OrderedDict[bytes, float] = OrderedDict()
        """Digest of a poisonous prompt → until when it is refused."""

    def executor_died(self, inflight: Iterable[InFlight], now: float) -> list[Sequence]:
        """Suspects everyone with a row in those plans; returns those who are poisonous, for the caller to end."""
        coming: dict[SeqId, int] = {}
        for plan in inflight:
            for row, seq in enumerate(plan.rows):
                if seq.seq_id in self._sequences:
                    coming[seq.seq_id] = coming.get(seq.seq_id, 0) + (row not in plan.silent)
        self._records = {seq_id: it for seq_id, it in self._records.items() if seq_id in self._sequences}
        poisonous = []
        for seq_id, num_coming in coming.items():
            seq = self._sequences[seq_id]
            num_deaths = 1 + (self._records[seq_id].num_deaths if self._is_suspect(seq) else 0)
            self._records[seq_id] = _Record(num_deaths, len(seq.token_ids) + max(1, num_coming))
            if num_deaths >= MAX_DEATHS:
                poisonous.append(seq)
                self._refuse(seq.spec.prompt_ids, now)
        return poisonous

    def must_wait(self, seq: Sequence) -> bool:
        """Whether the sequence is a suspect and another one is on probation."""
        if not self._records or not self._is_suspect(seq):
            return False
        other = None if self._on_probation is None else self._sequences.get(self._on_probation)
        if other is None or other is seq:
            return False
        return other.state is SequenceState.RUNNING and self._is_suspect(other)

    def started(self, seq: Sequence) -> None:
        """The sequence runs now: on probation, if it is a suspect."""
        if self._records and self._is_suspect(seq):
            self._on_probation = seq.seq_id

    def refusal(self, prompt_ids: list[int], now: float) -> Refusal | None:
        """Why a prompt is not taken; None for all that are not known to be poisonous."""
        while self._refused and next(iter(self._refused.values())) <= now:
            self._refused.popitem(last=False)
        if not self._refused or _digest(prompt_ids) not in self._refused:
            return None
        return Refusal(RefusalReason.POISON, f"{MAX_DEATHS} executors died while they ran this prompt")

    def _is_suspect(self, seq: Sequence) -> bool:
        record = self._records.get(seq.seq_id)
        return record is not None and len(seq.token_ids) < record.cleared_at

    def _refuse(self, prompt_ids: list[int], now: float) -> None:
        digest = _digest(prompt_ids)
        self._refused[digest] = now + REFUSED_S
        self._refused.move_to_end(digest)
        if len(self._refused) > MAX_REFUSED:
            self._refused.popitem(last=False)


def _digest(prompt_ids: list[int]) -> bytes:
    return sha256(array("i", prompt_ids).tobytes()).digest()
