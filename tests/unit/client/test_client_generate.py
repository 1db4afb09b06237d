"""Both clients against a scripted gateway: the same cases, once blocking and once asyncio."""

from __future__ import annotations

import asyncio
import time
import tracemalloc
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import pytest

from pagemill.v1 import inference_pb2 as pb
from pagemill_client import (
    Accepted,
    AsyncClient,
    Client,
    DeadlineExceededError,
    Delta,
    Event,
    Finished,
    FinishReason,
    Generation,
    InvalidRequestError,
    Message,
    OverloadedError,
    PagemillError,
    ProtocolError,
    RequestCancelledError,
    ServerError,
    UnavailableError,
    Violation,
)
from tests.unit.client.fake_gateway import FakeGateway, accepted, delta, echo, finished, refuse, serving

Run = Callable[..., Awaitable[list[Event]]]


async def run_async(target: str, prompt: Any = "x", **options: Any) -> list[Event]:
    async with AsyncClient(target) as client, client.generate(prompt, **options) as stream:
        return [event async for event in stream]


async def run_sync(target: str, prompt: Any = "x", **options: Any) -> list[Event]:
    def events() -> list[Event]:
        with Client(target) as client, client.generate(prompt, **options) as stream:
            return list(stream)

    return await asyncio.to_thread(events)


both = pytest.mark.parametrize("run", [run_async, run_sync])


@both
async def test_events_arrive_in_order_and_typed(gateway: FakeGateway, run: Run) -> None:
    events = await run(gateway.target, max_tokens=2, request_id="r-1")
    assert events[0] == Accepted("r-1", 3, 7, "fake")
    assert events[1:3] == [Delta(0, 0, (0,), "a", ()), Delta(0, 1, (1,), "b", ())]
    assert isinstance(events[3], Finished)
    assert events[3].reason is FinishReason.LENGTH
    assert events[3].usage.completion_tokens == 2
    assert events[3].bill.queue_ms == 5
    assert len(events) == 4


@both
async def test_every_option_reaches_its_field(gateway: FakeGateway, run: Run) -> None:
    options: dict[str, Any] = {
        "request_id": "r", "model": "fake", "priority": -3, "cache_salt": "s", "max_queue_ms": 9,
        "temperature": 0.0, "top_p": 0.5, "top_k": 0, "min_p": 0.25, "presence_penalty": 1.0, "frequency_penalty": -1.0,
        "repetition_penalty": 1.5, "seed": -(2**63), "logit_bias": {5: -1.0}, "allowed_token_ids": [1],
        "bad_words": ["b"],
        "max_tokens": 1, "min_tokens": 0, "stop": "end", "stop_token_ids": [4], "ignore_eos": True,
        "include_stop": False,
        "n": 1, "logprobs": 0, "prompt_logprobs": 0, "echo": False, "return_text": True, "return_token_ids": True,
    }  # fmt: skip
    await run(gateway.target, [1, 2], **options)
    request = gateway.requests[0]
    assert list(request.token_ids.ids) == [1, 2]
    seen = {f.name: v for part in (request.sampling, request.stopping, request.output) for f, v in part.ListFields()}
    seen |= {name: getattr(request, name) for name in ("request_id", "model", "priority", "cache_salt", "max_queue_ms")}
    seen = {k: (dict(v) if k == "logit_bias" else list(v) if hasattr(v, "append") else v) for k, v in seen.items()}
    assert seen == options | {"stop": ["end"]}  # zeros and falses included: set is not the same as unset


@both
async def test_an_option_that_is_not_given_stays_unset(gateway: FakeGateway, run: Run) -> None:
    await run(gateway.target)
    request = gateway.requests[0]
    assert request.text == "x"
    assert request.request_id  # made here, so that a retried request is recognised
    assert not request.sampling.ListFields()
    assert not request.stopping.ListFields()
    assert not request.output.ListFields()


async def test_a_conversation_is_sent_as_chat(gateway: FakeGateway) -> None:
    async with AsyncClient(gateway.target) as client:
        await client.chat([Message("system", "be brief"), Message("user", "hi", name="ann")]).collect()
    sent = [(m.role, m.content, m.name) for m in gateway.requests[0].chat.messages]
    assert sent == [("system", "be brief", ""), ("user", "hi", "ann")]


@pytest.mark.parametrize("prompt", [[1, "a"], [Message("user", "x"), 3], ["a"], [1.5]])
async def test_a_prompt_of_mixed_kinds_is_refused_before_sending(gateway: FakeGateway, prompt: Any) -> None:
    async with AsyncClient(gateway.target) as client:
        with pytest.raises(TypeError, match="prompt"):
            client.generate(prompt)
    assert gateway.requests == []


async def test_an_unknown_option_is_refused_before_sending(gateway: FakeGateway) -> None:
    async with AsyncClient(gateway.target) as client:
        with pytest.raises(TypeError, match="temprature"):
            client.generate("x", temprature=1)  # type: ignore[call-arg]
    assert gateway.requests == []


@both
async def test_b12_many_outputs_cost_nothing_before_the_server_has_agreed_to_them(
    gateway: FakeGateway, run: Run
) -> None:
    async def refuses(request: pb.GenerateRequest, context: Any, attempt: int) -> None:
        await refuse(context, grpc.StatusCode.INVALID_ARGUMENT, "INVALID_PARAMETER")

    gateway.script = refuses
    tracemalloc.start()
    try:
        with pytest.raises(InvalidRequestError):
            await run(gateway.target, n=200_000)
        assert tracemalloc.get_traced_memory()[1] < 8 * 2**20
    finally:
        tracemalloc.stop()


@both
async def test_every_call_carries_a_deadline(gateway: FakeGateway, run: Run) -> None:
    await run(gateway.target)
    await run(gateway.target, timeout_s=20)
    default, given = gateway.deadlines
    assert 500 < (default or 0) < 601
    assert 10 < (given or 0) < 21


@pytest.mark.parametrize("timeout_s", [0, -1, float("inf"), float("nan")])
def test_a_deadline_that_is_none_is_refused(timeout_s: float) -> None:
    with pytest.raises(ValueError, match="timeout_s"):
        Client("127.0.0.1:1", timeout_s=timeout_s)


@both
async def test_a_passed_deadline_is_its_own_error(gateway: FakeGateway, run: Run) -> None:
    async def hang(request: pb.GenerateRequest, context: Any, attempt: int) -> None:
        await context.write(accepted(request))
        await asyncio.sleep(30)

    gateway.script = hang
    with pytest.raises(DeadlineExceededError) as caught:
        await run(gateway.target, timeout_s=0.3)
    assert caught.value.status == "DEADLINE_EXCEEDED"
    await asyncio.wait_for(gateway.cancelled.wait(), 30)


@both
async def test_refusals_carry_reason_violations_and_retry_delay(gateway: FakeGateway, run: Run) -> None:
    async def invalid(request: pb.GenerateRequest, context: Any, attempt: int) -> None:
        await refuse(
            context, grpc.StatusCode.INVALID_ARGUMENT, "INVALID_PARAMETER", "bad", violations={"sampling.top_p": "is 2"}
        )

    gateway.script = invalid
    with pytest.raises(InvalidRequestError) as caught:
        await run(gateway.target)
    assert caught.value.reason == "INVALID_PARAMETER"
    assert caught.value.violations == (Violation("sampling.top_p", "is 2"),)
    assert str(caught.value) == "INVALID_PARAMETER: bad; sampling.top_p: is 2"
    assert len(gateway.requests) == 1  # not retryable


@both
@pytest.mark.parametrize(
    ("status", "reason", "expected"),
    [
        (grpc.StatusCode.UNAVAILABLE, "NOT_READY", UnavailableError),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL", OverloadedError),
    ],
)
async def test_a_refusal_before_headers_is_retried_to_three_attempts(
    gateway: FakeGateway, run: Run, status: grpc.StatusCode, reason: str, expected: type[PagemillError]
) -> None:
    async def always(request: pb.GenerateRequest, context: Any, attempt: int) -> None:
        await refuse(context, status, reason, retry_after_s=0.25, pushback_ms=1)

    gateway.script = always
    with pytest.raises(expected) as caught:
        await run(gateway.target)
    assert caught.value.reason == reason
    assert caught.value.retry_after_s == pytest.approx(0.25)
    assert len(gateway.requests) == 3
    assert len({request.request_id for request in gateway.requests}) == 1


@both
async def test_a_retry_that_is_admitted_succeeds_and_waits_for_the_pushback(gateway: FakeGateway, run: Run) -> None:
    arrivals: list[float] = []

    async def second_time(request: pb.GenerateRequest, context: Any, attempt: int) -> None:
        arrivals.append(time.monotonic())
        if attempt == 1:
            await refuse(context, grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL", pushback_ms=300)
        await echo(request, context, attempt)

    gateway.script = second_time
    events = await run(gateway.target)
    assert isinstance(events[-1], Finished)
    assert arrivals[1] - arrivals[0] >= 0.29


@both
async def test_a_negative_pushback_stops_retries(gateway: FakeGateway, run: Run) -> None:
    async def never_again(request: pb.GenerateRequest, context: Any, attempt: int) -> None:
        await refuse(context, grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL", pushback_ms=-1)

    gateway.script = never_again
    with pytest.raises(OverloadedError) as caught:
        await run(gateway.target)
    assert caught.value.retry_after_s is None
    assert len(gateway.requests) == 1


@both
@pytest.mark.parametrize("reason", ["QUEUE_TIMEOUT", "", "POISON_REQUEST"])
async def test_what_does_not_pass_is_not_retried(gateway: FakeGateway, run: Run, reason: str) -> None:
    async def never_better(request: pb.GenerateRequest, context: Any, attempt: int) -> None:
        await refuse(context, grpc.StatusCode.RESOURCE_EXHAUSTED, reason, retry_after_s=0.01, pushback_ms=10)

    gateway.script = never_better
    with pytest.raises(OverloadedError):
        await run(gateway.target)
    assert len(gateway.requests) == 1


@both
async def test_a_message_that_is_too_large_is_sent_once(gateway: FakeGateway, run: Run) -> None:
    """Larger than a default gRPC server takes: refused by the transport, without a reason, before any handler."""
    start = time.monotonic()
    with pytest.raises(OverloadedError) as caught:
        await run(gateway.target, "x" * (5 * 1024 * 1024))
    assert (caught.value.status, caught.value.reason) == ("RESOURCE_EXHAUSTED", "")
    assert "arger" in caught.value.message
    assert time.monotonic() - start < 10
    assert gateway.requests == []


@both
async def test_a_full_queue_is_not_waited_for_beyond_the_deadline(gateway: FakeGateway, run: Run) -> None:
    async def full(request: pb.GenerateRequest, context: Any, attempt: int) -> None:
        await refuse(context, grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL", retry_after_s=0.9)

    gateway.script = full
    with pytest.raises(OverloadedError):
        await run(gateway.target, timeout_s=0.8)
    assert len(gateway.requests) == 1


async def test_a_stream_closed_while_it_waits_for_a_retry_makes_none(gateway: FakeGateway) -> None:
    refused = asyncio.Event()

    async def full(request: pb.GenerateRequest, context: Any, attempt: int) -> None:
        refused.set()
        await refuse(context, grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL", retry_after_s=0.3)

    gateway.script = full
    async with AsyncClient(gateway.target) as client:
        stream = client.generate("x")
        collecting = asyncio.create_task(stream.collect())
        await refused.wait()
        await asyncio.sleep(0.1)
        stream.close()
        with pytest.raises(RequestCancelledError):
            await collecting
    with Client(gateway.target) as blocking:
        refused.clear()
        waiting = blocking.generate("x")
        collecting = asyncio.create_task(asyncio.to_thread(waiting.collect))
        await refused.wait()
        await asyncio.sleep(0.1)
        waiting.close()
        with pytest.raises(RequestCancelledError):
            await collecting
    assert len(gateway.requests) == 2


@both
async def test_nothing_is_retried_after_admission(gateway: FakeGateway, run: Run) -> None:
    async def fail_late(request: pb.GenerateRequest, context: Any, attempt: int) -> None:
        # As a gateway does: metadata at admission, and Accepted behind it whatever comes next. Metadata with nothing
        # but a status behind it may arrive as a response without headers, which is retried.
        await context.send_initial_metadata(())
        await context.write(accepted(request))
        await refuse(context, grpc.StatusCode.UNAVAILABLE, "DRAINING")

    gateway.script = fail_late
    with pytest.raises(UnavailableError):
        await run(gateway.target)
    assert len(gateway.requests) == 1


@both
async def test_tokens_before_a_failure_are_delivered_once(gateway: FakeGateway, run: Run) -> None:
    async def fail_midway(request: pb.GenerateRequest, context: Any, attempt: int) -> None:
        await context.write(accepted(request))
        await context.write(delta(0, [1], "a"))
        await refuse(context, grpc.StatusCode.INTERNAL, "INTERNAL", "error id 42")

    gateway.script = fail_midway
    with pytest.raises(ServerError, match="INTERNAL: error id 42"):
        await run(gateway.target)
    assert len(gateway.requests) == 1


async def test_what_arrived_before_a_failure_stays_readable(gateway: FakeGateway) -> None:
    async def fail_midway(request: pb.GenerateRequest, context: Any, attempt: int) -> None:
        await context.write(accepted(request))
        await context.write(delta(0, [1], "a"))
        await refuse(context, grpc.StatusCode.ABORTED, "SLOW_CONSUMER")

    gateway.script = fail_midway
    async with AsyncClient(gateway.target) as client, client.generate("x") as stream:
        with pytest.raises(PagemillError):
            await stream.collect()
        assert stream.text == "a"
        assert stream.so_far.token_ids == (1,)
        assert stream.so_far.finished is None


BROKEN_STREAMS: dict[str, list[Callable[[pb.GenerateRequest], pb.GenerateResponse]]] = {
    "no Accepted": [lambda r: delta(0, [1])],
    "two Accepted": [accepted, accepted],
    "a gap": [accepted, lambda r: delta(1, [1])],
    "a repeated token": [accepted, lambda r: delta(0, [1]), lambda r: delta(0, [1])],
    "no end": [accepted, lambda r: delta(0, [1])],
    "an event after the end": [accepted, lambda r: finished(), lambda r: delta(0, [1])],
    "an unknown output": [accepted, lambda r: delta(0, [1], output_index=1)],
    "an unknown reason": [accepted, lambda r: finished(pb.FINISH_REASON_UNSPECIFIED)],
    "an empty event": [accepted, lambda r: pb.GenerateResponse()],
    "nothing": [],
}


@both
@pytest.mark.parametrize("name", BROKEN_STREAMS)
async def test_a_stream_that_breaks_the_contract_is_an_error(gateway: FakeGateway, run: Run, name: str) -> None:
    async def broken(request: pb.GenerateRequest, context: Any, attempt: int) -> None:
        for make in BROKEN_STREAMS[name]:
            await context.write(make(request))

    gateway.script = broken
    with pytest.raises(ProtocolError):
        await run(gateway.target)


async def test_outputs_are_folded_apart(gateway: FakeGateway) -> None:
    async def two(request: pb.GenerateRequest, context: Any, attempt: int) -> None:
        await context.write(accepted(request))
        await context.write(delta(0, [1], "a", output_index=1))
        await context.write(delta(0, [2], "b", output_index=0))
        await context.write(finished(pb.FINISH_REASON_STOP, 1, output_index=1, stop_string="."))
        await context.write(delta(1, [3, 4], "cd", output_index=0))
        await context.write(finished(pb.FINISH_REASON_STOP, 3, stop_token_id=4))

    gateway.script = two
    async with AsyncClient(gateway.target) as client:
        generation = await client.generate("x", n=2).collect()
    assert [(o.text, o.token_ids) for o in generation.outputs] == [("bcd", (2, 3, 4)), ("a", (1,))]
    assert [o.finished.stop_match for o in generation.outputs if o.finished] == [4, "."]


async def test_text_only_streams_need_no_indices(gateway: FakeGateway) -> None:
    async def text_only(request: pb.GenerateRequest, context: Any, attempt: int) -> None:
        await context.write(accepted(request))
        await context.write(delta(0, [], "ab"))
        await context.write(delta(2, [], "c"))
        await context.write(finished(completion_tokens=3))

    gateway.script = text_only
    async with AsyncClient(gateway.target) as client:
        assert (await client.generate("x", return_token_ids=False).collect()).text == "abc"


async def test_leaving_an_async_stream_cancels_it(gateway: FakeGateway) -> None:
    gateway.script = endless
    async with AsyncClient(gateway.target) as client, client.generate("x") as stream:
        async for text in stream.texts():
            assert text == "a"
            break
    await asyncio.wait_for(gateway.cancelled.wait(), 30)


async def test_leaving_a_blocking_stream_cancels_it(gateway: FakeGateway) -> None:
    gateway.script = endless

    def leave() -> str:
        with Client(gateway.target) as client, client.generate("x") as stream:
            return next(stream.texts())

    assert await asyncio.to_thread(leave) == "a"
    await asyncio.wait_for(gateway.cancelled.wait(), 30)


async def test_a_stream_closed_from_elsewhere_ends_with_an_error(gateway: FakeGateway) -> None:
    gateway.script = endless
    async with AsyncClient(gateway.target) as client:
        stream = client.generate("x")
        assert await anext(stream.texts()) == "a"
        stream.close()
        stream.close()
        with pytest.raises((RequestCancelledError, asyncio.CancelledError)):
            await stream.collect()


async def endless(request: pb.GenerateRequest, context: Any, attempt: int) -> None:
    await context.write(accepted(request))
    await context.write(delta(0, [1], "a"))
    await asyncio.sleep(60)


async def test_a_unix_socket_serves_as_well(gateway: FakeGateway, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("u") / "g.sock"
    async with serving(FakeGateway(), f"unix:{path}") as fake:
        assert len(await run_async(fake.target)) == 5
        assert len(await run_sync(fake.target)) == 5


async def test_collect_after_iterating_returns_the_whole(gateway: FakeGateway) -> None:
    def collect() -> Generation:
        with Client(gateway.target) as client:
            stream = client.generate("x", max_tokens=4)
            assert next(stream) == Accepted(stream.request_id, 3, 7, "fake")
            assert next(stream.texts()) == "a"
            return stream.collect()

    assert (await asyncio.to_thread(collect)).text == "abcd"
