"""Errors as gRPC statuses: the code, a catalogue text, and google.rpc details that every language can decode."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, NoReturn

import grpc
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.message import DecodeError, Message
from google.rpc import error_details_pb2, status_pb2  # type: ignore[import-untyped]

from pagemill.errors import DOMAIN, PUSHBACK_KEY, PagemillError, Reason, Status, invalid
from pagemill.logs import kv

_log = logging.getLogger(__name__)

CallOverError = grpc.aio.InternalError
"""What grpc raises for a word on a call whose deadline has passed or whose client has left, until it has noticed."""

_CODE_OF = {code.value[0]: code for code in grpc.StatusCode}
DETAILS_KEY = "grpc-status-details-bin"
_MAX_MESSAGE_CHARS = 1000


def grpc_code(status: Status) -> grpc.StatusCode:
    """The code as grpc names it."""
    return _CODE_OF[status.value]


def trailers(error: PagemillError) -> tuple[tuple[str, str | bytes], ...]:
    """Trailing metadata of a call that ends with `error`."""
    details: list[Message] = [error_details_pb2.ErrorInfo(domain=DOMAIN, reason=error.reason.value)]
    if error.violations:
        bad = error_details_pb2.BadRequest()
        for violation in error.violations:
            bad.field_violations.add(field=violation.field, description=violation.description)
        details.append(bad)
    metadata: list[tuple[str, str | bytes]] = []
    if error.retry_after_ms is not None:
        retry = error_details_pb2.RetryInfo()
        retry.retry_delay.FromMilliseconds(error.retry_after_ms)
        details.append(retry)
        metadata.append((PUSHBACK_KEY, str(error.retry_after_ms)))
    status = status_pb2.Status(code=error.status.value, message=error.message[:_MAX_MESSAGE_CHARS])
    for detail in details:
        packed = AnyMessage()
        packed.Pack(detail)
        status.details.append(packed)
    return (*metadata, (DETAILS_KEY, status.SerializeToString()))


async def abort(context: Any, error: PagemillError) -> NoReturn:
    """End the call with `error`. Raises CancelledError if it is over already, so that nobody hears of it."""
    try:
        await context.abort(grpc_code(error.status), error.message[:_MAX_MESSAGE_CHARS], trailers(error))
    except CallOverError as over:
        raise asyncio.CancelledError("the call is over") from over
    raise AssertionError("abort raises")


def hide(error: BaseException) -> PagemillError:
    """An unforeseen exception as an error that tells the caller nothing but an id; the log has the rest."""
    error_id = secrets.token_hex(8)
    _log.error("unhandled exception in a call", exc_info=error, extra=kv(error_id=error_id))
    return PagemillError(Reason.INTERNAL, f"internal error {error_id}")


class ErrorInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """Outermost: no exception of ours reaches a client as text, and undecodable requests are the caller's mistake.

    A CancelledError always passes: a handler that swallows one leaks the call inside grpc.
    """

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """The method's handler, wrapped."""
        handler = await continuation(handler_call_details)
        if handler is None or handler.request_streaming:  # unknown method; reflection, which is not ours
            return handler
        make = (
            grpc.unary_stream_rpc_method_handler if handler.response_streaming else grpc.unary_unary_rpc_method_handler
        )
        method = _streaming(handler.unary_stream) if handler.response_streaming else _unary(handler.unary_unary)
        return make(method, _lenient(handler.request_deserializer), handler.response_serializer)


def _lenient(deserialize: Any) -> Any:
    def parse(data: bytes) -> Any:
        try:
            return deserialize(data)
        except DecodeError:
            return None

    return parse


def _known(request: Any) -> Any:
    if request is None:
        raise invalid("request", "not a valid message of its type (text must be UTF-8)")
    return request


def _unary(method: Any) -> Any:
    async def call(request: Any, context: Any) -> Any:
        try:
            return await method(_known(request), context)
        except PagemillError as error:
            await abort(context, error)
        except (asyncio.CancelledError, grpc.aio.AbortError):
            raise
        except CallOverError as over:
            raise asyncio.CancelledError("the call is over") from over
        except Exception as error:
            await abort(context, hide(error))

    return call


def _streaming(method: Any) -> Any:
    async def call(request: Any, context: Any) -> None:
        try:
            result = method(_known(request), context)
            if isinstance(result, AsyncIterator):
                async for response in result:
                    await context.write(response)
            else:
                await result
        except PagemillError as error:
            await abort(context, error)
        except (asyncio.CancelledError, grpc.aio.AbortError):
            raise
        except CallOverError as over:
            raise asyncio.CancelledError("the call is over") from over
        except Exception as error:
            await abort(context, hide(error))

    return call
