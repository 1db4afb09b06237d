"""The table of errors is whole, and what a client decodes is what was meant."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2  # type: ignore[import-untyped]
from grpc._cython.cygrpc import ExecuteBatchError  # type: ignore[import-not-found]

from pagemill.errors import HTTP_STATUS_OF, PUSHBACK_KEY, STATUS_OF, PagemillError, Reason, Status, invalid, unsupported
from scheduler_svc.gateway.status import DETAILS_KEY, ErrorInterceptor, grpc_code, hide, trailers


@pytest.mark.parametrize("reason", Reason)
def test_every_reason_has_a_status_that_grpc_and_http_know(reason: Reason) -> None:
    assert grpc_code(STATUS_OF[reason]).name == STATUS_OF[reason].name
    assert 400 <= HTTP_STATUS_OF[STATUS_OF[reason]] < 600


def test_status_numbers_are_grpcs() -> None:
    for status in Status:
        assert getattr(grpc.StatusCode, status.name).value[0] == status.value


def details(error: PagemillError) -> status_pb2.Status:
    return status_pb2.Status.FromString(dict(trailers(error))[DETAILS_KEY])


def test_details_carry_reason_violations_and_retry() -> None:
    info, bad, retry = (
        error_details_pb2.ErrorInfo(),
        error_details_pb2.BadRequest(),
        error_details_pb2.RetryInfo(),
    )
    status = details(invalid("a.b", "wrong"))
    assert status.details[0].Unpack(info)
    assert status.details[1].Unpack(bad)
    assert (info.domain, info.reason) == ("pagemill", "INVALID_PARAMETER")
    assert [(v.field, v.description) for v in bad.field_violations] == [("a.b", "wrong")]
    full = PagemillError(Reason.QUEUE_FULL, "full", retry_after_ms=1500)
    assert details(full).details[1].Unpack(retry)
    assert retry.retry_delay.ToMilliseconds() == 1500
    assert dict(trailers(full))[PUSHBACK_KEY] == "1500"
    assert PUSHBACK_KEY not in dict(trailers(unsupported("x")))


def test_s26_a_hidden_exception_tells_nothing() -> None:
    error = hide(ValueError("secret"))
    assert error.reason is Reason.INTERNAL
    assert "secret" not in error.message
    assert "ValueError" not in error.message


class Over:
    """The context of a call whose deadline has passed, which grpc has not noticed yet."""

    def __init__(self) -> None:
        self.num_words = 0

    async def write(self, message: object) -> None:
        self.num_words += 1
        raise ExecuteBatchError("Failed grpc_call_start_batch: 8")

    async def abort(self, *args: object) -> None:
        await self.write(None)


async def wrapped(method: Any, *, streams: bool) -> Any:
    """The method as the server calls it."""
    handler = SimpleNamespace(
        request_streaming=False,
        response_streaming=streams,
        unary_stream=method if streams else None,
        unary_unary=None if streams else method,
        request_deserializer=bytes,
        response_serializer=bytes,
    )

    async def continuation(details: object) -> Any:
        return handler

    made = await ErrorInterceptor().intercept_service(continuation, None)  # type: ignore[arg-type]
    return made.unary_stream if streams else made.unary_unary


async def writes(request: object, context: Over) -> None:
    await context.write(b"x")


async def yields(request: object, context: Over) -> AsyncIterator[bytes]:
    yield b"x"


async def fails(request: object, context: Over) -> None:
    raise PagemillError(Reason.NOT_READY, "too late")


@pytest.mark.parametrize(
    ("method", "streams"), [(writes, True), (yields, True), (fails, True), (writes, False), (fails, False)]
)
async def test_a_call_that_ends_as_it_is_spoken_to_is_a_cancelled_one(
    method: Any, streams: bool, caplog: pytest.LogCaptureFixture
) -> None:
    context = Over()
    call = await wrapped(method, streams=streams)
    with caplog.at_level(logging.DEBUG), pytest.raises(asyncio.CancelledError):  # which grpc takes quietly
        await call(b"", context)
    assert context.num_words == 1
    assert caplog.records == []
