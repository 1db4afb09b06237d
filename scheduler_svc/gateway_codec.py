"""Submissions in, tokens and endings out: core values ↔ messages. What comes from a socket is checked here.

What does not hold raises `WireError`; its text is for the log and never holds token ids.
"""

from __future__ import annotations

import math

from pagemill.columns import pack
from pagemill.engine.v1 import frontend_pb2 as fe
from pagemill.engine.v1 import sampling_pb2
from scheduler_svc.core.events import FinishedEvent, FinishReason, Refusal, RefusalReason
from scheduler_svc.core.params import SamplingSpec, SeqId, SequenceSpec
from scheduler_svc.wire_checks import MAX_COUNT, WireError, column

MAX_STOP_TOKEN_IDS = 1024
"""The gateway allows 64 and adds the model's end-of-sequence ids."""
MAX_PRIORITY = 1000
MAX_SALT_BYTES = 256


def decode_submit(message: fe.Submit, *, seq_id: SeqId, group: int, vocab_size: int | None, now: float) -> SequenceSpec:
    """The sequence a gateway asks for. `vocab_size` None: not known yet. Raises WireError."""
    prompt_ids = _ids(message.prompt_ids, "prompt_ids", vocab_size)
    emitted_ids = _ids(message.emitted_ids, "emitted_ids", vocab_size)
    if not prompt_ids:
        raise WireError("Got no prompt ids but expected at least 1")
    if not 1 <= message.max_tokens <= MAX_COUNT:
        raise WireError(f"Got max_tokens = {message.max_tokens} but expected 1 to {MAX_COUNT}")
    if not -MAX_PRIORITY <= message.priority <= MAX_PRIORITY:
        raise WireError(f"Got priority = {message.priority} but expected -{MAX_PRIORITY} to {MAX_PRIORITY}")
    if len(message.cache_salt) > MAX_SALT_BYTES:
        raise WireError(f"Got a cache salt of {len(message.cache_salt)} bytes but expected at most {MAX_SALT_BYTES}")
    return SequenceSpec(
        seq_id=seq_id,
        prompt_ids=prompt_ids,
        max_tokens=message.max_tokens,
        stop_token_ids=_stop_ids(message.sampling, vocab_size),
        sampling=_decode_sampling(message.sampling),
        choice_index=message.choice_index,
        priority=message.priority,
        emitted_ids=emitted_ids,
        arrival=now - message.age_ms / 1000,
        deadline=now + message.deadline_ms / 1000 if message.HasField("deadline_ms") else None,
        queue_deadline=now + message.max_queue_ms / 1000 if message.HasField("max_queue_ms") else None,
        group=group,
        cache_salt=message.cache_salt,
    )


def _decode_sampling(message: sampling_pb2.Sampling) -> SamplingSpec:
    checks = (
        ("temperature", 0.0 <= message.temperature <= 100.0),
        ("top_p", 0.0 < message.top_p <= 1.0),
        ("min_p", 0.0 <= message.min_p <= 1.0),
    )
    for name, holds in checks:  # comparisons with NaN are false, so NaN is refused too
        if not holds or not math.isfinite(getattr(message, name)):
            raise WireError(f"Got {name} = {getattr(message, name)} outside its range")
    return SamplingSpec(
        temperature=message.temperature,
        top_p=message.top_p,
        top_k=message.top_k,
        min_p=message.min_p,
        seed=message.seed,
        min_tokens=message.min_tokens,
    )


def _stop_ids(message: sampling_pb2.Sampling, vocab_size: int | None) -> frozenset[int]:
    ids = column(message.stop_token_ids, "stop_token_ids", MAX_STOP_TOKEN_IDS)
    if ids and (min(ids) < 0 or (vocab_size is not None and max(ids) >= vocab_size)):
        raise WireError("Got a stop token id outside the vocabulary")
    return frozenset(ids)


def _ids(data: bytes, name: str, vocab_size: int | None) -> list[int]:
    ids = column(data, name)
    has_negative = not data[3::4].isascii()  # by the sign bits: a prompt may be long, and min() reads it once more
    if ids and (has_negative or (vocab_size is not None and max(ids) >= vocab_size)):
        raise WireError(f"Got an id in {name} outside the vocabulary of {vocab_size}")
    return ids


def decode_cancel(message: fe.CancelStreams) -> list[int]:
    """Stream numbers to end. Raises WireError."""
    return column(message.streams, "streams")


def encode_tokens(
    streams: list[int], counts: list[int] | None, first_index: list[int], ids: list[int]
) -> fe.TokenBatch:
    """One batch; parallel columns as in the message. `counts` None: 1 each."""
    return fe.TokenBatch(
        streams=pack(streams),
        counts=pack(counts) if counts is not None else b"",
        first_index=pack(first_index),
        token_ids=pack(ids),
    )


_END: dict[FinishReason, fe.EndReason] = {
    FinishReason.STOP: fe.END_REASON_STOP,
    FinishReason.LENGTH: fe.END_REASON_LENGTH,
    FinishReason.CANCELLED: fe.END_REASON_CANCELLED,
}
_ERROR: dict[FinishReason, tuple[fe.StreamError, str]] = {
    FinishReason.QUEUE_TIMEOUT: (fe.STREAM_ERROR_QUEUE_TIMEOUT, "the request waited longer than its limit"),
    FinishReason.DEADLINE: (fe.STREAM_ERROR_DEADLINE, "the deadline has passed"),
    FinishReason.NUMERICAL: (fe.STREAM_ERROR_NUMERICAL, "the model gave no finite numbers for this request"),
    FinishReason.INTERNAL: (fe.STREAM_ERROR_INTERNAL, "the request could not be computed"),
    FinishReason.POISON: (fe.STREAM_ERROR_POISON, "executors died while they ran this request"),
    FinishReason.NO_FIT: (
        fe.STREAM_ERROR_PROMPT_EXCEEDS_KV_CAPACITY,
        "the executor that is connected now has no room for the prompt and the output so far",
    ),
}
_REFUSAL: dict[RefusalReason, fe.StreamError] = {
    RefusalReason.PROMPT_EXCEEDS_KV_CAPACITY: fe.STREAM_ERROR_PROMPT_EXCEEDS_KV_CAPACITY,
    RefusalReason.CONTEXT_LENGTH: fe.STREAM_ERROR_CONTEXT_LENGTH,
    RefusalReason.QUEUE_FULL: fe.STREAM_ERROR_QUEUE_FULL,
    RefusalReason.POISON: fe.STREAM_ERROR_POISON,
}


def encode_ended(stream: int, event: FinishedEvent, retry_after_ms: int | None = None) -> fe.StreamEnded:
    """How a stream ended: a reason, or an error with a text of the catalogue above or of the core's refusal."""
    error, text = _ERROR.get(event.reason, (fe.STREAM_ERROR_UNSPECIFIED, ""))
    if event.refusal is not None:
        error, text = _REFUSAL[event.refusal.reason], event.refusal.message
    return fe.StreamEnded(
        stream=stream,
        reason=_END.get(event.reason, fe.END_REASON_UNSPECIFIED),
        error=error,
        message=text,
        num_output_tokens=event.num_output_tokens,
        cached_tokens=event.num_cached_tokens,
        queue_ms=max(0, min(MAX_COUNT, round(event.queue_s * 1000))),
        computed_tokens=event.num_computed_tokens,
        num_preemptions=event.num_preemptions,
        retry_after_ms=retry_after_ms,
    )


def encode_refusal(stream: int, refusal: Refusal, retry_after_ms: int | None = None) -> fe.StreamRejected:
    """Why a stream was refused."""
    return fe.StreamRejected(
        stream=stream, error=_REFUSAL[refusal.reason], message=refusal.message, retry_after_ms=retry_after_ms
    )
