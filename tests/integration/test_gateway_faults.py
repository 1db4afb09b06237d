"""A scheduler that dies at an awkward moment, and faults of the gateway's own that must stay with one stream."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import grpc
import pytest

from pagemill.engine.v1 import frontend_pb2 as wire
from pagemill.errors import Reason
from pagemill.v1 import inference_pb2 as pb
from tests.integration.gateway_fixture import (
    DEADLINE_S,
    FakeStream,
    Rig,
    emit,
    reason_of,
    rest_of,
    running_gateway,
    until,
)


def request(max_tokens: int = 100, request_id: str = "") -> pb.GenerateRequest:
    made = pb.GenerateRequest(text="x", request_id=request_id)
    made.stopping.max_tokens = max_tokens
    return made


async def silence(stream: FakeStream) -> None:
    """No answer at all."""


async def some_tokens(stream: FakeStream) -> None:
    """Two tokens, and then nothing until it is cancelled."""
    stream.accept()
    stream.tokens([*b"ab"])
    await stream.cancelled.wait()
    stream.end(wire.END_REASON_CANCELLED)


def die(rig: Rig) -> None:
    """The scheduler is gone; the gateway has not noticed yet."""
    rig.scheduler.answers_hello = False
    rig.scheduler.restart()


async def session_lost(rig: Rig) -> None:
    await until(lambda: not rig.gateway.scheduler._in_session.is_set())


async def test_a_request_that_no_scheduler_answered_is_refused_when_there_is_none() -> None:
    async with running_gateway(session_wait_s=0.2) as rig:
        rig.scheduler.script = silence
        task = asyncio.create_task(rig.generate(request()))
        await until(lambda: len(rig.scheduler.submits) == 1)
        die(rig)
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await task
        assert reason_of(error.value) is Reason.NOT_READY
        rig.scheduler.answers_hello = True
        await until(lambda: rig.gateway.scheduler.ready)
        await rig.probe()


async def test_a_scheduler_that_answers_no_submit_is_asked_three_times_and_no_more() -> None:
    async with running_gateway(answer_timeout_s=0.2) as rig:
        rig.scheduler.script = silence
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await rig.generate(request())
        assert error.value.code() is grpc.StatusCode.UNAVAILABLE
        assert reason_of(error.value) is Reason.NOT_READY
        assert len(rig.scheduler.submits) == 3
        await until(lambda: rig.scheduler.hellos == 4)
        await until(lambda: rig.gateway.scheduler.ready)
        await rig.probe()


async def test_an_admitted_stream_that_no_session_takes_again_ends_too() -> None:
    async with running_gateway(answer_timeout_s=0.1, resume_timeout_s=0.5) as rig:
        rig.scheduler.script = some_tokens
        call = rig.api.Generate(request(4), timeout=DEADLINE_S)
        events = asyncio.create_task(rest_of(call))
        await until(lambda: any(s.output.token_ids for s in rig.gateway.scheduler.table.streams.values()))
        rig.scheduler.script = silence
        rig.scheduler.restart()
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await events
        assert reason_of(error.value) is Reason.NOT_READY
        assert len(rig.scheduler.submits) > 3  # a promise is kept up for longer than three tries


async def test_an_admitted_stream_outlasts_the_wait_for_a_session() -> None:
    async with running_gateway(session_wait_s=0.0) as rig:
        rig.scheduler.script = some_tokens
        task = asyncio.create_task(rig.generate(request(4)))
        await until(lambda: any(s.output.token_ids for s in rig.gateway.scheduler.table.streams.values()))
        die(rig)
        await session_lost(rig)
        rig.scheduler.script = emit([*b"abcd"])
        await asyncio.sleep(0.2)  # several turns of the link's loop
        rig.scheduler.answers_hello = True
        assert (await task).text == "abcd"


@pytest.mark.parametrize("noticed", [True, False])
@pytest.mark.parametrize("script", [silence, some_tokens])
async def test_cancel_ends_a_call_whose_scheduler_has_died(script: Any, noticed: bool) -> None:
    async with running_gateway(session_wait_s=600.0) as rig:
        rig.scheduler.script = script
        call = rig.api.Generate(request(request_id="mine"), timeout=DEADLINE_S)
        events = asyncio.create_task(rest_of(call))
        await until(lambda: len(rig.scheduler.submits) == 1)
        die(rig)
        if noticed:
            await session_lost(rig)
        assert (await rig.api.Cancel(pb.CancelRequest(request_id="mine"))).cancelled
        assert (await events)[-1].finished.reason == pb.FINISH_REASON_CANCELLED
        await until(lambda: rig.gateway.scheduler.num_streams == 0)


async def test_cancel_ends_a_call_that_waits_for_a_first_session() -> None:
    async with running_gateway(session_wait_s=600.0) as rig:
        die(rig)
        await session_lost(rig)
        task = asyncio.create_task(rig.generate(request(request_id="mine")))
        await until(lambda: rig.gateway.scheduler.num_streams == 1)
        assert (await rig.api.Cancel(pb.CancelRequest(request_id="mine"))).cancelled
        assert (await task).finished.reason == pb.FINISH_REASON_CANCELLED


async def test_a_deadline_ends_an_unanswered_call_whose_scheduler_has_died() -> None:
    async with running_gateway(session_wait_s=600.0) as rig:
        rig.scheduler.script = silence
        task = asyncio.create_task(rig.generate(request(), timeout=1.5))
        await until(lambda: len(rig.scheduler.submits) == 1)
        die(rig)
        await session_lost(rig)
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await task
        assert error.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await until(lambda: len(rig.gateway.registry) == 0)
        assert rig.gateway.scheduler.num_streams == 0


async def test_a_cancelled_stream_that_is_refused_again_is_over() -> None:
    async with running_gateway() as rig:
        rig.scheduler.script = some_tokens
        call = rig.api.Generate(request(request_id="mine"), timeout=DEADLINE_S)
        events = asyncio.create_task(rest_of(call))
        await until(lambda: any(s.output.token_ids for s in rig.gateway.scheduler.table.streams.values()))

        async def refuse_once_cancelled(stream: FakeStream) -> None:
            await stream.cancelled.wait()
            stream.reject(wire.STREAM_ERROR_QUEUE_FULL)

        rig.scheduler.script = refuse_once_cancelled
        rig.scheduler.restart()
        await until(lambda: len(rig.scheduler.submits) == 2)
        stream = next(iter(rig.gateway.scheduler.table.streams.values()))
        assert (await rig.api.Cancel(pb.CancelRequest(request_id="mine"))).cancelled
        await until(lambda: stream.bill is not None)  # at once: the call does not wait for a bill that never comes
        assert stream.stream_id not in rig.gateway.scheduler.table.to_submit
        assert (await events)[-1].finished.reason == pb.FINISH_REASON_CANCELLED
        assert len(rig.scheduler.submits) == 2


class BrokenDetokenizer:
    """Raises in one of its methods."""

    def __init__(self, broken: str) -> None:
        self._broken = broken

    def push(self, token_id: int) -> str:
        return self._text("push")

    def finish(self) -> str:
        return self._text("finish")

    def _text(self, method: str) -> str:
        if method == self._broken:
            raise RuntimeError("secret")
        return ""


@pytest.mark.parametrize("broken", ["push", "finish"])
async def test_a_fault_in_one_streams_output_ends_that_stream_alone(
    broken: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with running_gateway() as rig:
        go = asyncio.Event()
        seen: list[FakeStream] = []

        async def script(stream: FakeStream) -> None:
            seen.append(stream)
            stream.accept()
            await go.wait()
            stream.tokens([*b"ab"])
            if broken == "finish" and stream is seen[0]:
                stream.end(wire.END_REASON_LENGTH)
            if stream is seen[0]:
                await stream.cancelled.wait()
            stream.tokens([*b"cd"])
            stream.end(wire.END_REASON_LENGTH)

        rig.scheduler.script = script
        bad = asyncio.create_task(rig.generate(request()))
        await until(lambda: len(seen) == 1)
        good = asyncio.create_task(rig.generate(request(4)))
        await until(lambda: len(seen) == 2)
        output: Any = rig.gateway.scheduler.table.streams[seen[0].stream].output
        output.detokenizer = BrokenDetokenizer(broken)
        go.set()
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await bad
        assert reason_of(error.value) is Reason.INTERNAL
        details = str(error.value.details())
        assert "secret" not in details
        assert any(getattr(r, "kv", {}).get("error_id") == details.rsplit(maxsplit=1)[-1] for r in caplog.records)
        if broken == "push":
            await until(seen[0].cancelled.is_set)
        assert (await good).text == "abcd"
        assert rig.scheduler.hellos == 1
        await rig.probe()


async def test_a_frame_that_cannot_be_handled_costs_a_session_and_not_the_process(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with running_gateway() as rig:
        link: Any = rig.gateway.scheduler
        dispatch = link._dispatch

        def explode(*_: object) -> None:
            link._dispatch = dispatch
            raise RuntimeError

        link._dispatch = explode
        await until(lambda: rig.scheduler.hellos == 2)
        await until(lambda: rig.gateway.scheduler.ready)
        await rig.probe()
        assert any("error_id" in getattr(r, "kv", {}) for r in caplog.records if r.levelno == logging.ERROR)
