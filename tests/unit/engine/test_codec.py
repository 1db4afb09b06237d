from __future__ import annotations

import contextlib
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagemill.columns import pack, unpack
from pagemill.engine.v1 import executor_pb2 as ex
from pagemill.engine.v1 import frontend_pb2 as fe
from pagemill.engine.v1.sampling_pb2 import Sampling
from scheduler_svc.core.events import FinishedEvent, FinishReason, Refusal, RefusalReason
from scheduler_svc.core.params import ExecutorLimits, SamplingSpec, SeqId
from scheduler_svc.core.plan import Admit, RowErrorCode, StepPlan, StepStatus
from scheduler_svc.executor_codec import decode_limits, decode_result, encode_plan
from scheduler_svc.gateway_codec import decode_submit, encode_ended, encode_refusal
from scheduler_svc.wire_checks import WireError


def test_every_column_of_a_plan_crosses() -> None:
    columns = {
        name: [number * 10, number * 10 + 1]
        for number, name in enumerate(
            (
                "release_lanes",
                "rewind_lanes",
                "rewind_num_tokens",
                "rewind_num_blocks",
                "swap_out_src",
                "swap_out_dst",
                "copy_src",
                "copy_dst",
                "swap_in_src",
                "swap_in_dst",
                "append_lanes",
                "append_block_ids",
                "row_lanes",
                "row_num_tokens",
            ),
            start=1,
        )
    }
    sampling = SamplingSpec(temperature=0.5, top_p=0.25, top_k=3, min_p=0.125, seed=-(2**63), min_tokens=2)
    admit = Admit(7, 3, [1, 2, 3], 2, 1, [9, 8], sampling, frozenset({5, 4}), 2)
    message = encode_plan(StepPlan(11, admit=[admit], **columns))  # type: ignore[arg-type]
    assert {name: unpack(getattr(message, name)) for name in columns} == columns
    found = message.admit[0]
    assert (found.lane, found.generation, found.num_prompt_tokens, found.num_cached_tokens) == (7, 3, 2, 1)
    assert (unpack(found.token_ids), unpack(found.block_ids), found.choice_index) == ([1, 2, 3], [9, 8], 2)
    expected = Sampling(
        temperature=0.5, top_p=0.25, top_k=3, min_p=0.125, seed=-(2**63), min_tokens=2, stop_token_ids=pack([4, 5])
    )
    assert found.sampling == expected


def test_every_field_of_the_core_plan_has_one_on_the_wire() -> None:
    derived = {"num_rows", "num_tokens"}
    names = set(StepPlan.__dataclass_fields__) - derived
    assert names <= {field.name for field in ex.StepPlan.DESCRIPTOR.fields}


def test_steady_decode_plan_is_tiny() -> None:
    plan = StepPlan(1_000_000, repeat_decode=True, append_lanes=[1] * 16, append_block_ids=[2] * 16)
    assert len(encode_plan(plan).SerializeToString()) <= 140
    assert len(encode_plan(StepPlan(1_000_000, repeat_decode=True)).SerializeToString()) <= 8


def result(**fields: Any) -> ex.StepResult:
    return ex.StepResult(**{"step_id": 1, "status": ex.STEP_STATUS_OK} | fields)


def test_result_crosses() -> None:
    found = decode_result(
        result(
            status=ex.STEP_STATUS_ROW_ERRORS,
            token_ids=pack([1, 2, -1]),
            num_tokens=pack([2, 1]),
            row_errors=[ex.RowError(row=1, code=ex.ROW_ERROR_CODE_NUMERICAL)],
        ),
        10,
        100,
    )
    assert (found.token_ids, found.num_tokens, found.status) == ([1, 2, -1], [2, 1], StepStatus.ROW_ERRORS)
    assert found.row_errors == {1: RowErrorCode.NUMERICAL}


@pytest.mark.parametrize(
    "fields",
    [
        {"status": ex.STEP_STATUS_UNSPECIFIED},
        {"token_ids": b"12345"},
        {"token_ids": pack([10])},
        {"token_ids": pack([-2])},
        {"token_ids": pack([1] * 101)},
        {"token_ids": pack([1, 2]), "num_tokens": pack([1])},
        {"token_ids": pack([1, 2]), "num_tokens": pack([0, 2])},
        {"token_ids": pack([1]), "row_errors": [ex.RowError(row=0)] * 101},
    ],
)
def test_results_that_cannot_be(fields: dict[str, Any]) -> None:
    with pytest.raises(WireError):
        decode_result(result(**fields), 10, 100)


def test_finished_copies_cross_and_are_bounded() -> None:
    assert decode_result(result(finished_copy_steps=[3, 2**63]), 10, 100).finished_copy_steps == (3, 2**63)
    with pytest.raises(WireError, match="finished copies"):
        decode_result(result(finished_copy_steps=[1] * 70_000), 10, 100)


def hello(**fields: Any) -> ex.ExecutorHello:
    sizes = ("block_size", "num_device_blocks", "max_rows", "max_tokens", "num_lanes", "max_model_len", "vocab_size")
    return ex.ExecutorHello(**{name: number for number, name in enumerate(sizes, start=10)} | fields)


def test_everything_the_core_asks_of_an_executor_is_in_its_hello() -> None:
    rest = {
        "num_host_blocks": 7,
        "bytes_per_block": 2**40,
        "swap_out_bytes_per_s": 1.5e9,
        "swap_in_bytes_per_s": 2.5e9,
        "prefill_tokens_per_s": 900.0,
        "model_fingerprint": "print",
        "kv_dtype": "int8",
    }
    message = hello(**rest)
    limits = decode_limits(message)
    assert {name: getattr(limits, name) for name in rest} == rest
    for name in ExecutorLimits.__dataclass_fields__.keys() - {"decode_step_s"}:  # learned only
        assert getattr(limits, name) == getattr(message, name), name


@pytest.mark.parametrize(
    "fields",
    [
        {"block_size": 0},
        {"num_host_blocks": 4_194_305},
        {"num_device_blocks": 4_194_305},
        {"num_lanes": 262_145},
        {"max_rows": 65_537},
        {"vocab_size": 2**31},
        {"device": "x" * 257},
        {"version": "x" * 257},
        {"host": "x" * 257},
        {"incarnation": "x" * 257},
        {"dtype": "x" * 257},
        {"features": ["x" * 100] * 1000},
        {"swap_out_bytes_per_s": math.nan},
        {"swap_in_bytes_per_s": math.inf},
        {"prefill_tokens_per_s": -1.0},
        {"kv_dtype": "x" * 65},
    ],
)
def test_hellos_that_cannot_be(fields: dict[str, Any]) -> None:
    with pytest.raises(WireError, match=next(iter(fields))):
        decode_limits(hello(**fields))


def test_largest_hello_and_rates_too_small_to_be_any_are_taken() -> None:
    found = decode_limits(
        hello(
            num_device_blocks=4_194_304,
            num_host_blocks=4_194_304,
            num_lanes=262_144,
            max_rows=65_536,
            device="x" * 256,
            swap_out_bytes_per_s=5e-324,
            swap_in_bytes_per_s=9e-4,
            prefill_tokens_per_s=1e-3,
        )
    )
    assert (found.num_device_blocks, found.num_host_blocks) == (4_194_304, 4_194_304)
    assert (found.num_lanes, found.max_rows) == (262_144, 65_536)
    assert (found.swap_out_bytes_per_s, found.swap_in_bytes_per_s, found.prefill_tokens_per_s) == (0.0, 0.0, 1e-3)


def test_salt_of_the_prefix_cache_crosses_and_is_bounded() -> None:
    assert decode(submit(cache_salt=b"s" * 256)).cache_salt == b"s" * 256
    assert decode(submit()).cache_salt == b""
    with pytest.raises(WireError, match="salt"):
        decode(submit(cache_salt=b"s" * 257))


def submit(**fields: Any) -> fe.Submit:
    sampling = fields.pop("sampling", Sampling(top_p=1.0))
    return fe.Submit(**{"stream": 1, "prompt_ids": pack([1]), "max_tokens": 2, "sampling": sampling} | fields)


def decode(message: fe.Submit, vocab_size: int | None = 10) -> Any:
    return decode_submit(message, seq_id=SeqId(5), group=3, vocab_size=vocab_size, now=50.0)


def test_submit_crosses_with_times_made_absolute() -> None:
    spec = decode(
        submit(
            prompt_ids=pack([1, 2]),
            emitted_ids=pack([3]),
            priority=-4,
            choice_index=2,
            deadline_ms=1500,
            max_queue_ms=250,
            age_ms=2000,
            sampling=Sampling(temperature=0.5, top_p=0.5, top_k=4, seed=-9, min_tokens=1, stop_token_ids=pack([9])),
        )
    )
    assert (spec.prompt_ids, spec.emitted_ids, spec.max_tokens) == ([1, 2], [3], 2)
    assert (spec.seq_id, spec.group, spec.priority, spec.choice_index) == (5, 3, -4, 2)
    assert (spec.arrival, spec.deadline, spec.queue_deadline) == (48.0, 51.5, 50.25)
    assert spec.sampling == SamplingSpec(0.5, 0.5, 4, 0.0, -9, 1)
    assert spec.stop_token_ids == {9}
    assert decode(submit()).deadline is None


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt_ids": b""},
        {"prompt_ids": b"1"},
        {"prompt_ids": pack([10])},
        {"prompt_ids": pack([-1])},
        {"emitted_ids": pack([10])},
        {"max_tokens": 0},
        {"max_tokens": 2**32 - 1},
        {"priority": 1001},
        {"sampling": Sampling()},  # top_p 0: nothing may be chosen
        {"sampling": Sampling(top_p=1.5)},
        {"sampling": Sampling(top_p=1.0, temperature=math.nan)},
        {"sampling": Sampling(top_p=1.0, temperature=math.inf)},
        {"sampling": Sampling(top_p=1.0, min_p=-0.5)},
        {"sampling": Sampling(top_p=1.0, stop_token_ids=pack([10]))},
        {"sampling": Sampling(top_p=1.0, stop_token_ids=pack([1] * 1025))},
    ],
)
def test_submits_that_cannot_be(fields: dict[str, Any]) -> None:
    with pytest.raises(WireError) as caught:
        decode(submit(**fields))
    assert "[" not in str(caught.value)


def test_vocabulary_is_not_checked_before_it_is_known() -> None:
    assert decode(submit(prompt_ids=pack([10_000])), None).prompt_ids == [10_000]
    with pytest.raises(WireError):
        decode(submit(prompt_ids=pack([-1])), None)


@given(st.binary(max_size=60))
def test_any_message_that_parses_decodes_or_is_refused(data: bytes) -> None:
    for kind, take in ((fe.Submit, decode), (ex.StepResult, lambda message: decode_result(message, 10, 100))):
        message: Any = kind()
        try:
            message.ParseFromString(data)
        except Exception:
            continue
        with contextlib.suppress(WireError):
            take(message)


@pytest.mark.parametrize("reason", list(FinishReason))
def test_every_end_has_a_reason_or_an_error(reason: FinishReason) -> None:
    ended = encode_ended(3, FinishedEvent(1, SeqId(1), reason, 4, 0.25, 5, 6, 7))
    assert (ended.reason != fe.END_REASON_UNSPECIFIED) != (ended.error != fe.STREAM_ERROR_UNSPECIFIED)
    assert bool(ended.message) == (ended.error != fe.STREAM_ERROR_UNSPECIFIED)
    assert (ended.stream, ended.num_output_tokens, ended.queue_ms, ended.computed_tokens) == (3, 4, 250, 5)
    assert (ended.cached_tokens, ended.num_preemptions) == (6, 7)
    assert not ended.HasField("retry_after_ms")


@pytest.mark.parametrize("reason", list(RefusalReason))
def test_an_end_for_lack_of_room_says_what_a_refusal_says(reason: RefusalReason) -> None:
    refusal = Refusal(reason, "numbers")
    ended = encode_ended(3, FinishedEvent(1, SeqId(1), FinishReason.NO_FIT, 0, 0.25, 0, 0, 0, refusal))
    rejected = encode_refusal(3, refusal)
    assert (ended.reason, ended.error, ended.message) == (fe.END_REASON_UNSPECIFIED, rejected.error, "numbers")


@pytest.mark.parametrize("reason", list(RefusalReason))
def test_every_refusal_has_an_error(reason: RefusalReason) -> None:
    rejected = encode_refusal(3, Refusal(reason, "numbers"), 100)
    assert rejected.error != fe.STREAM_ERROR_UNSPECIFIED
    assert (rejected.message, rejected.retry_after_ms) == ("numbers", 100)
    assert not encode_refusal(3, Refusal(reason, "numbers")).HasField("retry_after_ms")
