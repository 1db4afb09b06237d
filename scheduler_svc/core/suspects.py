"""Which sequences may have killed an executor, and what becomes of them.

A sequence with a row in flight when an executor died is a *suspect*, and so is every other one with its prompt.
Suspects run on probation, one at a time, beside whatever else runs: so a second death has one culprit, and its
neighbours are not blamed. A suspect that gets past the tokens that were under way when its executor died is cleared.
One under which a second executor dies is poisonous: it ends, with all that have its prompt, and for `REFUSED_S` a
prompt like its own is refused before it can reach an executor.

Suspicion outlives a sequence that leaves before it is cleared: a gateway submits a request again under another number
when it lost its session, and clients retry. So whoever comes with that prompt within `REFUSED_S` inherits it.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from hashlib import sha256
from typing import Generic, TypeVar

from scheduler_svc.core.events import FinishReason, Refusal, RefusalReason
from scheduler_svc.core.params import SeqId
from scheduler_svc.core.running import InFlight
from scheduler_svc.core.sequence import Sequence, SequenceState

MAX_DEATHS = 2
"""Executors that may die under one sequence."""
REFUSED_S = 600.0
MAX_REFUSED = 1_024
"""Prompts remembered as poisonous, and as suspected without a sequence; beyond it the oldest is forgotten."""
_REFUSAL = Refusal(RefusalReason.POISON, f"{MAX_DEATHS} executors died while they ran this prompt")
_GOOD_ENDS = (FinishReason.STOP, FinishReason.LENGTH)


@dataclass(frozen=True, slots=True)
class _Record:
    num_deaths: int
    cleared_at: int
    """Tokens known when the sequence has got past what it ran when the executor died."""

    def worse(self, other: _Record | None) -> _Record:
        """What is true of whom both are said."""
        if other is None:
            return self
        return _Record(max(self.num_deaths, other.num_deaths), max(self.cleared_at, other.cleared_at))


Value = TypeVar("Value")


class _Remembered(Generic[Value]):
    """Something about at most `MAX_REFUSED` prompts, each for `REFUSED_S`."""

    __slots__ = ("_entries",)

    def __init__(self) -> None:
        self._entries: OrderedDict[bytes, tuple[float, Value]] = OrderedDict()
        """Digest of a prompt → until when it is remembered, and what; the oldest first."""

    def is_empty(self, now: float) -> bool:
        """Whether nothing is remembered any more."""
        while self._entries and next(iter(self._entries.values()))[0] <= now:
            self._entries.popitem(last=False)
        return not self._entries

    def get(self, prompt_ids: list[int], now: float) -> Value | None:
        """What is remembered of a prompt; a prompt is hashed only where there is anything."""
        entry = None if self.is_empty(now) else self._entries.get(_digest(prompt_ids))
        return None if entry is None else entry[1]

    def put(self, digest: bytes, value: Value, now: float) -> None:
        """Remembers it from now on, in place of what was."""
        self._entries[digest] = (now + REFUSED_S, value)
        self._entries.move_to_end(digest)
        if len(self._entries) > MAX_REFUSED:
            self._entries.popitem(last=False)

    def forget(self, digest: bytes) -> None:
        """It is as if nothing had been."""
        self._entries.pop(digest, None)


class Suspects:
    """Suspects among `sequences`, all that have not ended; kept by the owner."""

    def __init__(self, sequences: Mapping[SeqId, Sequence]) -> None:
        self._sequences = sequences
        self._records: dict[SeqId, _Record] = {}
        self._on_probation: SeqId | None = None
        self._absent: _Remembered[_Record] = _Remembered()
        """Of suspects that have left."""
        self._refused: _Remembered[Refusal] = _Remembered()

    def executor_died(self, inflight: Iterable[InFlight], now: float) -> list[Sequence]:
        """Suspects everyone with a row in those plans; returns those who are poisonous, for the caller to end.

        Some may have ended since; who was submitted again in their place answers for them.
        """
        num_coming: dict[SeqId, int] = {}
        involved: dict[SeqId, Sequence] = {}
        for plan in inflight:
            for row, seq in enumerate(plan.rows):
                if seq.finish_reason not in _GOOD_ENDS:
                    involved[seq.seq_id] = seq
                    num_coming[seq.seq_id] = num_coming.get(seq.seq_id, 0) + (row not in plan.silent)
        records: dict[SeqId, _Record] = {}
        by_prompt: dict[bytes, _Record] = {}
        gone: set[bytes] = set()
        for seq_id, seq in involved.items():
            is_here = seq_id in self._sequences
            before = self._record(seq) if is_here else self._absent.get(seq.spec.prompt_ids, now)
            num_deaths = 1 + (0 if before is None else before.num_deaths)
            records[seq_id] = _Record(num_deaths, len(seq.token_ids) + max(1, num_coming[seq_id]))
            prompt = _digest(seq.spec.prompt_ids)
            by_prompt[prompt] = records[seq_id].worse(by_prompt.get(prompt))
            if not is_here:
                gone.add(prompt)
            if num_deaths >= MAX_DEATHS:
                self._refused.put(prompt, _REFUSAL, now)
        for prompt in gone:  # only now: one death counts once, however many had the prompt
            self._absent.put(prompt, by_prompt[prompt], now)
        lengths = {seq.prompt_len for seq in involved.values()}
        return self._blame(records, by_prompt, lengths)

    def submitted(self, seq: Sequence, now: float) -> None:
        """A sequence has come: it inherits the suspicion that is left of its prompt."""
        if (record := self._absent.get(seq.spec.prompt_ids, now)) is not None:
            self._records[seq.seq_id] = record

    def ended(self, seq: Sequence, reason: FinishReason, now: float) -> None:
        """A sequence ends. A suspect leaves its suspicion behind, unless it does well: then there is none left."""
        if seq.seq_id not in self._records:
            return
        record = self._record(seq)
        del self._records[seq.seq_id]
        if record is None or reason in _GOOD_ENDS:
            self._absent.forget(_digest(seq.spec.prompt_ids))
        else:
            self._absent.put(_digest(seq.spec.prompt_ids), record, now)

    def must_wait(self, seq: Sequence) -> bool:
        """Whether the sequence is a suspect and another one is on probation."""
        if not self._records or self._record(seq) is None:
            return False
        other = None if self._on_probation is None else self._sequences.get(self._on_probation)
        if other is None or other is seq:
            return False
        return other.state is SequenceState.RUNNING and self._record(other) is not None

    def started(self, seq: Sequence) -> None:
        """The sequence runs now: on probation, if it is a suspect."""
        if self._records and self._record(seq) is not None:
            self._on_probation = seq.seq_id

    def refusal(self, prompt_ids: list[int], now: float) -> Refusal | None:
        """Why a prompt is not taken; None for all that are not known to be poisonous."""
        return self._refused.get(prompt_ids, now)

    def _blame(
        self, records: Mapping[SeqId, _Record], by_prompt: Mapping[bytes, _Record], lengths: set[int]
    ) -> list[Sequence]:
        """Gives out the records of a death, also to those who share a prompt; returns the poisonous.

        Only prompts of these lengths are looked at: hashing those of a long queue would take a while.
        """
        poisonous = []
        for seq_id, seq in self._sequences.items():
            shared = by_prompt.get(_digest(seq.spec.prompt_ids)) if seq.prompt_len in lengths else None
            if shared is None:
                continue
            self._records[seq_id] = records.get(seq_id, shared)
            if shared.num_deaths >= MAX_DEATHS:
                poisonous.append(seq)
        return poisonous

    def _record(self, seq: Sequence) -> _Record | None:
        """What the sequence is suspected of; None once it is cleared."""
        record = self._records.get(seq.seq_id)
        return record if record is not None and len(seq.token_ids) < record.cleared_at else None


def _digest(prompt_ids: list[int]) -> bytes:
    return sha256(array("i", prompt_ids).tobytes()).digest()
