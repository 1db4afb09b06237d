"""A scheduler that dies at an awkward moment, and faults of the gateway's own that must stay with one stream."""

from __future__ import annotations

import asyncio
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


async def test_an_admitted_stream_outlasts_the_wait_for_a_session() -> None:
    async with running_gateway(session_wait_s=0.0) as rig:
        rig.scheduler.script = some_tokens
        task = asyncio.create_task(rig.generate(request(4)))
        await until(lambda: any(s.output.token_ids for s in rig.gateway.scheduler._streams.values()))
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
