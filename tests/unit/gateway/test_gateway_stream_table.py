"""What each stream is owed, over sessions that come and go."""

from __future__ import annotations

from typing import Any

import pytest

from pagemill import columns
from pagemill.engine.v1 import frontend_pb2 as wire
from pagemill.engine.v1.sampling_pb2 import Sampling
from pagemill.errors import Reason, Status
from scheduler_svc.gateway.metrics import GatewayMetrics
from scheduler_svc.gateway.output import EndKind, Output, StopRules
from scheduler_svc.gateway.refusals import not_connected, public_error
from scheduler_svc.gateway.stream_table import StreamTable
from scheduler_svc.gateway.streams import LiveStream, Replay
from scheduler_svc.gateway.tokenizer import TextTokenizer
from tests.unit.gateway.tiny_tokenizer import byte_level_tokenizer

TOKENIZER = TextTokenizer(byte_level_tokenizer())


def stream(number: int, stop: tuple[str, ...] = ()) -> LiveStream:
    replay = Replay(
        request_id="r", tenant="", priority=0, prompt_ids=columns.pack([1]), num_prompt_tokens=1, sampling=Sampling(),
        max_tokens=50, arrival=0.0, deadline=None, max_queue_ms=None, cache_salt=b"",
    )  # fmt: skip
    return LiveStream(number, replay, Output(TOKENIZER.new_detokenizer(), StopRules(50, stop=stop)))


@pytest.fixture
def table() -> StreamTable:
    return StreamTable(GatewayMetrics(), resume_timeout_s=60.0)


def submit_all(table: StreamTable, now: float) -> list[int]:
    sent = []
    for due in table.due(now):
        sent.append(due.stream_id)
        table.submitted(due, now)
    return sent


def tokens(*entries: tuple[int, int, bytes]) -> wire.TokenBatch:
    return wire.TokenBatch(
        streams=columns.pack([e[0] for e in entries]),
        counts=columns.pack([len(e[2]) for e in entries]),
        first_index=columns.pack([e[1] for e in entries]),
        token_ids=columns.pack([i for e in entries for i in e[2]]),
    )


def running(table: StreamTable, number: int, stop: tuple[str, ...] = ()) -> LiveStream:
    made = stream(number, stop)
    table.add(made, 0.0)
    submit_all(table, 0.0)
    table.accepted(number)
    return made


def test_a_stream_is_submitted_once_per_session_and_waits_for_its_answer(table: StreamTable) -> None:
    table.add(stream(1), 5.0)
    assert table.longest_wait(5.0) == 0.0
    assert submit_all(table, 5.0) == [1]
    assert submit_all(table, 6.0) == []
    assert table.longest_wait(7.5) == 2.5
    table.accepted(1)
    assert table.longest_wait(9.0) == 0.0
    table.open_session()
    assert submit_all(table, 9.0) == [1]


def test_the_longest_wait_is_that_of_the_oldest(table: StreamTable) -> None:
    for number, now in ((1, 1.0), (2, 4.0)):
        table.add(stream(number), now)
        submit_all(table, now)
    assert table.longest_wait(5.0) == 4.0


@pytest.mark.parametrize("leaving", ["cancelled", "failed", "stopped"])
def test_a_stream_that_leaves_is_not_submitted_again_and_has_its_last_word(table: StreamTable, leaving: str) -> None:
    staying, gone = running(table, 1), running(table, 2, stop=("b",))
    if leaving == "cancelled":
        gone.cancel()
    elif leaving == "failed":
        gone.fail(not_connected())
    else:
        table.tokens(tokens((2, 0, b"ab")))
    assert gone.bill is None
    table.open_session()
    assert submit_all(table, 1.0) == [1]
    assert gone.bill is not None
    assert staying.bill is None


def test_a_cancelled_stream_ends_when_the_session_does(table: StreamTable) -> None:
    gone = running(table, 1)
    gone.cancel()
    table.cancel(1, in_session=True)
    assert table.to_cancel == {1}
    assert gone.bill is None
    table.lose_session(1.0)
    assert gone.output.ending is not None
    assert gone.output.ending.kind is EndKind.CANCELLED
    table.open_session()
    assert table.to_cancel == set()


def test_an_end_before_its_tokens_is_no_end(table: StreamTable) -> None:
    one = running(table, 1)
    assert table.tokens(tokens((1, 0, b"ab"))) == ([], None)
    early = wire.StreamEnded(stream=1, reason=wire.END_REASON_LENGTH, num_output_tokens=3)
    assert table.ended(early) == "tokens are missing before an end"
    assert one.output.ending is None
    assert one.bill is None
    early.num_output_tokens = 2
    assert table.ended(early) is None
    assert one.output.ending is not None


def test_tokens_behind_a_stop_that_only_the_gateway_knows_are_not_missed(table: StreamTable) -> None:
    one = running(table, 1, stop=("b",))
    ended, lost = table.tokens(tokens((1, 0, b"ab")))
    assert (ended, lost) == ([one], None)
    assert table.tokens(tokens((1, 2, b"cd"))) == ([], None)
    assert table.ended(wire.StreamEnded(stream=1, reason=wire.END_REASON_CANCELLED, num_output_tokens=9)) is None
    assert one.bill is not None


def test_entries_of_other_streams_count_although_one_misses_tokens(table: StreamTable) -> None:
    one, two = running(table, 1), running(table, 2)
    assert table.tokens(tokens((1, 1, b"b"), (2, 0, b"xy"))) == ([], "tokens are missing")
    assert one.output.token_ids == []
    assert two.output.token_ids == [*b"xy"]


@pytest.mark.parametrize(
    "batch",
    [
        wire.TokenBatch(streams=b"\x01\x00\x00"),
        wire.TokenBatch(streams=columns.pack([1]), first_index=columns.pack([0]), token_ids=columns.pack([1, 2])),
        wire.TokenBatch(streams=columns.pack([1]), token_ids=columns.pack([1])),
        wire.TokenBatch(
            streams=columns.pack([1, 1]),
            first_index=columns.pack([0, 0]),
            counts=columns.pack([0, 1]),
            token_ids=columns.pack([1]),
        ),
        wire.TokenBatch(
            streams=columns.pack([1, 1]), first_index=columns.pack([0, 0]), counts=columns.pack([1]), token_ids=b""
        ),
    ],
)
def test_columns_that_do_not_fit_are_taken_by_no_stream(table: StreamTable, batch: wire.TokenBatch) -> None:
    one = running(table, 1)
    assert table.tokens(batch) == ([], "a malformed batch of tokens")
    assert one.output.token_ids == []
    assert table._metrics.stale.labels("malformed")._value.get() == 1


def test_a_submit_that_three_sessions_leave_unanswered_is_refused(table: StreamTable) -> None:
    one, two = stream(1), stream(2)
    table.add(one, 0.0)
    for now in (1.0, 2.0, 3.0):
        assert one.error is None
        table.open_session()
        submit_all(table, now)
        table.lose_session(now + 0.5)
        if now == 1.0:
            table.add(two, now)
    assert one.error is not None
    assert one.error.reason is Reason.NOT_READY
    assert one.error.retry_after_ms is not None
    assert two.error is None
    table.open_session()
    assert submit_all(table, 4.0) == [2]


def test_only_sessions_that_left_it_unanswered_count(table: StreamTable) -> None:
    one = running(table, 1)
    for now in range(10):
        table.lose_session(float(now))
        table.open_session()
        submit_all(table, float(now))
        table.accepted(1)
    assert one.error is None


def test_an_admitted_stream_is_a_promise_for_as_long_as_it_may_resume(table: StreamTable) -> None:
    one = running(table, 1)
    for now in range(100, 160, 5):
        table.open_session()
        submit_all(table, float(now))
        table.lose_session(float(now) + 4)
        assert one.error is None
    table.open_session()
    submit_all(table, 160.0)
    table.lose_session(164.0)
    assert one.error is not None
    assert one.error.reason is Reason.NOT_READY


def test_a_passing_refusal_delays_what_was_admitted_and_ends_what_was_not(table: StreamTable) -> None:
    refused = wire.StreamRejected(stream=1, error=wire.STREAM_ERROR_QUEUE_FULL)
    one = running(table, 1)
    table.rejected(refused, 10.0)
    assert one.error is None
    assert submit_all(table, 10.1) == []
    assert submit_all(table, 10.6) == [1]
    table.rejected(refused, 71.0)  # 60 s behind the first refusal
    assert one.error is not None
    assert one.error.reason is Reason.QUEUE_FULL
    new: Any = stream(2)
    table.add(new, 0.0)
    submit_all(table, 0.0)
    table.rejected(wire.StreamRejected(stream=2, error=wire.STREAM_ERROR_QUEUE_FULL, retry_after_ms=7), 0.0)
    assert new.error.retry_after_ms == 7


def test_an_answer_begins_the_wait_anew(table: StreamTable) -> None:
    one = running(table, 1)
    refused = wire.StreamRejected(stream=1, error=wire.STREAM_ERROR_QUEUE_FULL)
    table.rejected(refused, 10.0)
    submit_all(table, 11.0)
    table.accepted(1)
    table.rejected(refused, 100.0)
    assert one.error is None


def test_a_refusal_that_does_not_pass_ends_an_admitted_stream(table: StreamTable) -> None:
    one = running(table, 1)
    table.rejected(wire.StreamRejected(stream=1, error=wire.STREAM_ERROR_CONTEXT_LENGTH), 10.0)
    assert one.error is not None
    assert one.error.reason is Reason.CONTEXT_LENGTH_EXCEEDED


def test_an_internal_error_of_the_scheduler_carries_no_text_of_it(table: StreamTable) -> None:
    one = running(table, 1)
    table.ended(wire.StreamEnded(stream=1, error=wire.STREAM_ERROR_INTERNAL, message="secret"))
    assert one.error is not None
    assert "secret" not in one.error.message


def test_waiting_streams_are_refused_and_admitted_ones_are_not(table: StreamTable) -> None:
    admitted, old, new = running(table, 1), stream(2), stream(3)
    table.add(old, 10.0)
    table.add(new, 20.0)
    table.refuse_waiting(not_connected(), 10.0)
    assert (admitted.error, new.error) == (None, None)
    assert old.error is not None


def test_messages_of_unknown_streams_harm_nothing(table: StreamTable) -> None:
    table.accepted(9)
    table.rejected(wire.StreamRejected(stream=9), 0.0)
    assert table.ended(wire.StreamEnded(stream=9)) is None
    assert table.tokens(tokens((9, 5, b"x"))) == ([], None)
    table.cancel(9, in_session=True)
    assert table.to_cancel == set()


def test_what_is_removed_leaves_nothing(table: StreamTable) -> None:
    running(table, 1)
    table.add(stream(2), 0.0)
    submit_all(table, 0.0)
    table.add(stream(3), 0.0)
    for number in (1, 2, 3):
        table.remove(number)
    assert (len(table), table.to_submit, table.unanswered) == (0, {}, {})


def test_every_error_of_the_scheduler_has_a_public_reason_of_its_own() -> None:
    codes = set(wire.StreamError.values()) - {wire.STREAM_ERROR_UNSPECIFIED}
    reasons = {code: public_error(code, "", None).reason for code in codes}
    assert len(set(reasons.values())) == len(codes)
    assert [code for code, reason in reasons.items() if reason is Reason.INTERNAL] == [wire.STREAM_ERROR_INTERNAL]
    for code in codes:
        assert public_error(code, "", None).message
    assert public_error(wire.STREAM_ERROR_POISON, "", None).status is Status.ABORTED
