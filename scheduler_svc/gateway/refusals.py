"""What the scheduler's errors are for clients: one public reason and one line of text for each. Pure."""

from __future__ import annotations

from pagemill.engine.v1 import frontend_pb2 as wire
from pagemill.errors import PagemillError, Reason

_REASONS: dict[int, Reason] = {
    wire.STREAM_ERROR_PROMPT_EXCEEDS_KV_CAPACITY: Reason.PROMPT_EXCEEDS_KV_CAPACITY,
    wire.STREAM_ERROR_QUEUE_FULL: Reason.QUEUE_FULL,
    wire.STREAM_ERROR_QUEUE_TIMEOUT: Reason.QUEUE_TIMEOUT,
    wire.STREAM_ERROR_DEADLINE: Reason.DEADLINE_EXCEEDED,
    wire.STREAM_ERROR_NO_EXECUTOR: Reason.NO_EXECUTOR,
    wire.STREAM_ERROR_DRAINING: Reason.DRAINING,
    wire.STREAM_ERROR_NUMERICAL: Reason.NUMERICAL_ERROR,
    wire.STREAM_ERROR_INTERNAL: Reason.INTERNAL,
    wire.STREAM_ERROR_CONTEXT_LENGTH: Reason.CONTEXT_LENGTH_EXCEEDED,
    wire.STREAM_ERROR_POISON: Reason.POISON_REQUEST,
}
_TEXTS = {
    Reason.DEADLINE_EXCEEDED: "the call's deadline has passed",
    Reason.QUEUE_TIMEOUT: "max_queue_ms went by in the queue",
    Reason.NO_EXECUTOR: "no executor is connected",
    Reason.DRAINING: "the server is shutting down",
    Reason.POISON_REQUEST: "executors died while they ran this request; it is not tried again",
    Reason.NUMERICAL_ERROR: "the model gave no finite logits",
}
PASSING = frozenset({wire.STREAM_ERROR_QUEUE_FULL, wire.STREAM_ERROR_NO_EXECUTOR, wire.STREAM_ERROR_DRAINING})
"""Errors of a scheduler that finds its feet: they pass by themselves."""


def public_error(code: int, message: str, retry_after_ms: int | None) -> PagemillError:
    """The error that the client sees; an INTERNAL one carries no text of the scheduler."""
    reason = _REASONS.get(code, Reason.INTERNAL)
    text = message if reason is not Reason.INTERNAL else ""
    return PagemillError(reason, text or _TEXTS.get(reason, reason.value), retry_after_ms=retry_after_ms)


def not_connected() -> PagemillError:
    """There is no scheduler."""
    return PagemillError(Reason.NOT_READY, "no scheduler is connected", retry_after_ms=1000)


def not_answered() -> PagemillError:
    """There is a scheduler, and it does not answer."""
    return PagemillError(Reason.NOT_READY, "the scheduler does not answer", retry_after_ms=1000)
