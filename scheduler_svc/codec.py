"""Core values ↔ wire messages. Everything that comes from a socket is checked here, before the core sees it.

Columns go through `array`, not through per-row messages: a 256-row plan costs a few microseconds (bench/bench_wire.py).
What does not hold raises `WireError`; its text is for the log and never holds token ids.
"""

from __future__ import annotations

import math

from pagemill.columns import pack, unpack
from pagemill.engine.v1 import executor_pb2 as ex
from pagemill.engine.v1 import frontend_pb2 as fe
from pagemill.engine.v1 import sampling_pb2
from scheduler_svc.core.events import FinishedEvent, FinishReason, Refusal, RefusalReason
from scheduler_svc.core.params import ExecutorLimits, SamplingSpec, SeqId, SequenceSpec
from scheduler_svc.core.plan import NO_TOKEN, Admit, RowErrorCode, StepPlan, StepResult, StepStatus

MAX_STOP_TOKEN_IDS = 1024
"""The gateway allows 64 and adds the model's end-of-sequence ids."""
MAX_PRIORITY = 1000
MAX_SALT_BYTES = 256
MAX_DTYPE_CHARS = 64
MAX_HELLO_CHARS = 256
"""In each of the texts of an executor's hello."""
MAX_HELLO_BYTES = 65_536
MAX_COPY_STEPS = 65_536
"""Steps whose copies one result may report: they may run behind the batches for long, but not for ever."""
MAX_RATE = 1e15
"""Bytes or tokens per second; more is a fault of the measurement."""
MIN_RATE = 1e-3
"""A measurement below it is none: what it would cost to wait for such a copy has no use, and overflows."""
MAX_COUNT = 2**31 - 1
"""Largest id, count or size of anything on the wire."""
_LIMITS = {
    "block_size": (1, MAX_COUNT),
    "num_device_blocks": (1, 4_194_304),
    "num_host_blocks": (0, 4_194_304),
    "max_rows": (1, 65_536),
    "max_tokens": (1, MAX_COUNT),
    "num_lanes": (1, 262_144),
    "max_model_len": (1, MAX_COUNT),
    "vocab_size": (1, MAX_COUNT),
}
"""Smallest and largest of each number of an executor's hello. Blocks and lanes cost memory here, so they are bounded
by what one executor can have."""


class WireError(ValueError):
    """A message that parses but says what cannot be."""


# Plans and results


def encode_plan(plan: StepPlan) -> ex.StepPlan:
    """The message for a plan. Absent columns cost nothing, so a steady decode step is a few bytes."""
    message = ex.StepPlan(step_id=plan.step_id, repeat_decode=plan.repeat_decode)
    if plan.row_lanes:
        message.row_lanes = pack(plan.row_lanes)
        if plan.row_num_tokens is not None:
            message.row_num_tokens = pack(plan.row_num_tokens)
    if plan.append_lanes:
        message.append_lanes = pack(plan.append_lanes)
        message.append_block_ids = pack(plan.append_block_ids)
    if plan.release_lanes:
        message.release_lanes = pack(plan.release_lanes)
    for admit in plan.admit:
        message.admit.append(_encode_admit(admit))
    if plan.rewind_lanes or plan.copy_src or plan.swap_out_src or plan.swap_in_src:
        _encode_rare(plan, message)
    return message


def _encode_rare(plan: StepPlan, message: ex.StepPlan) -> None:
    for name in (
        "rewind_lanes",
        "rewind_num_tokens",
        "rewind_num_blocks",
        "swap_out_src",
        "swap_out_dst",
        "copy_src",
        "copy_dst",
        "swap_in_src",
        "swap_in_dst",
    ):
        setattr(message, name, pack(getattr(plan, name)))


def _encode_admit(admit: Admit) -> ex.Admit:
    sampling = admit.sampling
    return ex.Admit(
        lane=admit.lane,
        generation=admit.generation,
        token_ids=pack(admit.token_ids),
        num_prompt_tokens=admit.num_prompt_tokens,
        num_cached_tokens=admit.num_cached_tokens,
        block_ids=pack(admit.block_ids),
        sampling=sampling_pb2.Sampling(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
            seed=sampling.seed,
            min_tokens=sampling.min_tokens,
            stop_token_ids=pack(sorted(admit.stop_token_ids)),
        ),
        choice_index=admit.choice_index,
    )


_STATUS = {
    ex.STEP_STATUS_OK: StepStatus.OK,
    ex.STEP_STATUS_ROW_ERRORS: StepStatus.ROW_ERRORS,
    ex.STEP_STATUS_FAILED: StepStatus.FAILED,
}
_ROW_ERROR = {
    ex.ROW_ERROR_CODE_NUMERICAL: RowErrorCode.NUMERICAL,
    ex.ROW_ERROR_CODE_BAD_ROW: RowErrorCode.BAD_ROW,
    ex.ROW_ERROR_CODE_INTERNAL: RowErrorCode.INTERNAL,
}


def decode_result(message: ex.StepResult, vocab_size: int, max_ids: int) -> StepResult:
    """The result, with every id in the vocabulary or NO_TOKEN. Its fit to the plan is for the core to judge.

    Raises WireError.
    """
    status = _STATUS.get(message.status)
    if status is None:
        raise WireError(f"Got {message.status = } but expected OK, ROW_ERRORS or FAILED")
    token_ids = _column(message.token_ids, "token_ids", max_ids)
    if token_ids and (min(token_ids) < NO_TOKEN or max(token_ids) >= vocab_size):
        raise WireError(f"Got a token id outside the vocabulary of {vocab_size}")
    num_tokens = _column(message.num_tokens, "num_tokens", max_ids) if message.num_tokens else None
    if num_tokens is not None and (min(num_tokens) < 1 or sum(num_tokens) != len(token_ids)):
        raise WireError(f"Got {len(num_tokens)} counts that do not add up to {len(token_ids)} ids")
    if len(message.row_errors) > max_ids:
        raise WireError(f"Got {len(message.row_errors)} row errors but expected at most {max_ids}")
    if len(message.finished_copy_steps) > MAX_COPY_STEPS:
        raise WireError(f"Got {len(message.finished_copy_steps)} finished copies, expected at most {MAX_COPY_STEPS}")
    errors = {error.row: _ROW_ERROR.get(error.code, RowErrorCode.INTERNAL) for error in message.row_errors}
    return StepResult(message.step_id, token_ids, num_tokens, status, errors, tuple(message.finished_copy_steps))


def decode_limits(hello: ex.ExecutorHello) -> ExecutorLimits:
    """What an executor can do. Raises WireError naming the first number or text that is out of bounds."""
    for name, (least, most) in _LIMITS.items():
        value = getattr(hello, name)
        if not least <= value <= most:
            raise WireError(f"Got {name} = {value} but expected {least} to {most}")
    _check_texts(hello)
    return ExecutorLimits(
        block_size=hello.block_size,
        num_device_blocks=hello.num_device_blocks,
        max_rows=hello.max_rows,
        max_tokens=hello.max_tokens,
        num_lanes=hello.num_lanes,
        max_model_len=hello.max_model_len,
        num_host_blocks=hello.num_host_blocks,
        bytes_per_block=hello.bytes_per_block,
        swap_out_bytes_per_s=_rate(hello, "swap_out_bytes_per_s"),
        swap_in_bytes_per_s=_rate(hello, "swap_in_bytes_per_s"),
        prefill_tokens_per_s=_rate(hello, "prefill_tokens_per_s"),
        model_fingerprint=hello.model_fingerprint,
        kv_dtype=hello.kv_dtype,
    )


def _check_texts(hello: ex.ExecutorHello) -> None:
    for name in ("device", "version", "host", "incarnation", "dtype", "schema_hash", "tokenizer_hash", "kv_dtype"):
        length, most = len(getattr(hello, name)), MAX_DTYPE_CHARS if name == "kv_dtype" else MAX_HELLO_CHARS
        if length > most:
            raise WireError(f"Got {name} of {length} characters but expected at most {most}")
    if hello.ByteSize() > MAX_HELLO_BYTES:
        raise WireError(f"Got features and the rest of {hello.ByteSize()} bytes, expected at most {MAX_HELLO_BYTES}")


def _rate(hello: ex.ExecutorHello, name: str) -> float:
    """A measured rate; 0, unknown, for one too small to be one."""
    rate = float(getattr(hello, name))
    if not 0.0 <= rate <= MAX_RATE:  # false for NaN too
        raise WireError(f"Got {name} = {rate} but expected 0 to {MAX_RATE:g}")
    return rate if rate >= MIN_RATE else 0.0


# Streams


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
    ids = _column(message.stop_token_ids, "stop_token_ids", MAX_STOP_TOKEN_IDS)
    if ids and (min(ids) < 0 or (vocab_size is not None and max(ids) >= vocab_size)):
        raise WireError("Got a stop token id outside the vocabulary")
    return frozenset(ids)


def _ids(data: bytes, name: str, vocab_size: int | None) -> list[int]:
    ids = _column(data, name)
    if ids and (min(ids) < 0 or (vocab_size is not None and max(ids) >= vocab_size)):
        raise WireError(f"Got an id in {name} outside the vocabulary of {vocab_size}")
    return ids


def _column(data: bytes, name: str, max_len: int | None = None) -> list[int]:
    try:
        return unpack(data, name, max_len)
    except ValueError as error:
        raise WireError(str(error)) from None


def decode_cancel(message: fe.CancelStreams) -> list[int]:
    """Stream numbers to end. Raises WireError."""
    return _column(message.streams, "streams")


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
