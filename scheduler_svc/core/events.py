"""What the scheduler core tells its shell: values, in the order in which they happened."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from scheduler_svc.core.params import SeqId


class FinishReason(Enum):
    """Why a sequence ended. The first three are good ends."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    QUEUE_TIMEOUT = "queue_timeout"
    DEADLINE = "deadline"
    NUMERICAL = "numerical"
    INTERNAL = "internal"
    POISON = "poison"
    """Executors died while they ran it; see `suspects`."""
    NO_FIT = "no_fit"
    """A new executor turned out too small for a sequence that was queued before it came."""


class RefusalReason(Enum):
    """Why a submitted sequence was not queued."""

    PROMPT_EXCEEDS_KV_CAPACITY = "prompt_exceeds_kv_capacity"
    CONTEXT_LENGTH = "context_length"
    QUEUE_FULL = "queue_full"
    POISON = "poison"


@dataclass(frozen=True, slots=True)
class Refusal:
    """A submitted sequence was not queued, or is queued no longer; nothing of it is kept."""

    reason: RefusalReason
    message: str
    """One line with the numbers."""


@dataclass(frozen=True, slots=True)
class TokensEvent:
    """New output of one step for all sequences of one group, as parallel columns."""

    group: int
    seq_ids: list[SeqId]
    counts: list[int] | None
    """Tokens per sequence. None: 1 each."""
    first_index: list[int]
    """Index of the sequence's first new token within its whole output."""
    token_ids: list[int]


@dataclass(frozen=True, slots=True)
class FinishedEvent:
    """A sequence has ended; its last tokens came before. Exactly one per queued sequence."""

    group: int
    seq_id: SeqId
    reason: FinishReason
    num_output_tokens: int
    queue_s: float
    """Seconds from arrival to the first plan that ran it, or to its end if none did."""
    num_computed_tokens: int
    """Prompt and recomputed tokens that were planned, summed over its life."""
    num_cached_tokens: int
    num_preemptions: int
    refusal: Refusal | None = None
    """With NO_FIT: what `submit` would have answered, had that executor been there. None when the prompt alone fits."""


Event = TokensEvent | FinishedEvent
