"""Plans, results and the executor's hello: core values ↔ messages. What comes from a socket is checked here.

Columns go through `array`, not through per-row messages: a 256-row plan costs a few microseconds (bench/bench_wire.py).
What does not hold raises `WireError`; its text is for the log and never holds token ids.
"""

from __future__ import annotations

from pagemill.columns import pack
from pagemill.engine.v1 import executor_pb2 as ex
from pagemill.engine.v1 import sampling_pb2
from scheduler_svc.core.params import ExecutorLimits
from scheduler_svc.core.plan import NO_TOKEN, Admit, RowErrorCode, StepPlan, StepResult, StepStatus
from scheduler_svc.wire_checks import MAX_COUNT, WireError, column

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


def encode_plan(plan: StepPlan, state_digest: int | None = None) -> ex.StepPlan:
    """The message for a plan. Absent columns cost nothing, so a steady decode step is a few bytes.

    `state_digest` is that of the executor's lanes before the plan, to be compared there; None: no comparison.
    """
    message = ex.StepPlan(step_id=plan.step_id, repeat_decode=plan.repeat_decode, state_digest=state_digest)
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
    token_ids = column(message.token_ids, "token_ids", max_ids)
    if token_ids and (min(token_ids) < NO_TOKEN or max(token_ids) >= vocab_size):
        raise WireError(f"Got a token id outside the vocabulary of {vocab_size}")
    num_tokens = column(message.num_tokens, "num_tokens", max_ids) if message.num_tokens else None
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
