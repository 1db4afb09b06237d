"""The asyncio client: the same calls as `pagemill_client.sync`, awaited."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack

import grpc.aio

from pagemill.v1 import inference_pb2 as pb
from pagemill_client import operations
from pagemill_client.channel import DEFAULT_TARGET, TlsCredentials, channel_options, choose_credentials
from pagemill_client.errors import DeadlineExceededError, RequestCancelledError, UnavailableError, from_rpc
from pagemill_client.folding import StreamFolder
from pagemill_client.operations import DEFAULT_TIMEOUT_S, DEFAULT_UNARY_TIMEOUT_S, Unary, checked_timeout
from pagemill_client.options import GenerateOptions, Prompt, generate_request
from pagemill_client.retries import Attempts, RetryBudget
from pagemill_client.types import Delta, Event, Generation, Message, ModelInfo

T = TypeVar("T")


class AsyncGenerateStream:
    """One running generation, as `pagemill_client.sync.GenerateStream`. Use `async with` where it may be left early:
    leaving a bare `async for` cancels only when the garbage collector sees it.
    """

    def __init__(self, start: Callable[[float], Any], request: pb.GenerateRequest, attempts: Attempts) -> None:
        """`start` begins an attempt with that many seconds to its deadline; the first begins now."""
        self._start = start
        self._attempts = attempts
        self._closed = False
        self._call = start(attempts.remaining_s())
        self._folder = StreamFolder(request)
        self._events = self._iterate()
        self.request_id = request.request_id

    def __aiter__(self) -> AsyncIterator[Event]:
        return self._events

    async def __anext__(self) -> Event:
        return await anext(self._events)

    async def texts(self) -> AsyncIterator[str]:
        """Non-empty pieces of the first output's text as they arrive."""
        async for event in self._events:
            if isinstance(event, Delta) and event.output_index == 0 and event.text:
                yield event.text

    async def collect(self) -> Generation:
        """Run to the end and return everything, what was iterated before included."""
        async for _ in self._events:
            pass
        return self._folder.end()

    @property
    def text(self) -> str:
        """Text of the first output so far."""
        return self._folder.text()

    @property
    def so_far(self) -> Generation:
        """What has arrived; for a stream that was left or failed."""
        return self._folder.so_far()

    def close(self) -> None:
        """Cancel what is left. Idempotent."""
        self._closed = True
        self._call.cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.close()

    async def _iterate(self) -> AsyncIterator[Event]:
        while True:
            try:
                async for response in self._call:
                    yield self._folder.add(response)
                self._folder.end()
                self._attempts.succeeded()
                return
            except grpc.aio.AioRpcError as error:
                failure = from_rpc(error)
            finally:
                self._call.cancel()
            delay = self._attempts.delay_s(failure) if self._folder.accepted is None else None
            if delay is None:
                raise failure
            await asyncio.sleep(delay)
            if self._closed:
                raise RequestCancelledError("the stream was closed", status="CANCELLED")
            self._call = self._start(self._attempts.remaining_s())


class AsyncClient:
    """A connection to a Pagemill gateway, for one event loop. Arguments as `pagemill_client.sync.Client`."""

    def __init__(
        self,
        target: str = DEFAULT_TARGET,
        *,
        tls: TlsCredentials | None = None,
        insecure: bool = False,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> None:
        self.timeout_s = checked_timeout(timeout_s)
        self._budget = RetryBudget()
        credentials = choose_credentials(target, tls, insecure)
        options = channel_options(target)
        self._channel = (
            grpc.aio.insecure_channel(target, options)
            if credentials is None
            else grpc.aio.secure_channel(target, credentials.load(), options)
        )
        self._generate = self._channel.unary_stream(
            operations.GENERATE, pb.GenerateRequest.SerializeToString, pb.GenerateResponse.FromString
        )

    async def close(self) -> None:
        """Cancel what runs and free the connection."""
        await self._channel.close(grace=None)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self.close()

    def generate(
        self, prompt: Prompt, *, timeout_s: float | None = None, **options: Unpack[GenerateOptions]
    ) -> AsyncGenerateStream:
        """Start a generation from text, token ids or a conversation."""
        request = generate_request(prompt, options)
        timeout = self.timeout_s if timeout_s is None else checked_timeout(timeout_s)
        attempts = Attempts(self._budget, timeout)
        return AsyncGenerateStream(lambda left_s: self._generate(request, timeout=left_s), request, attempts)

    def chat(
        self, messages: Sequence[Message], *, timeout_s: float | None = None, **options: Unpack[GenerateOptions]
    ) -> AsyncGenerateStream:
        """Start the assistant's next turn."""
        return self.generate(messages, timeout_s=timeout_s, **options)

    async def cancel(self, request_id: str, *, timeout_s: float = DEFAULT_UNARY_TIMEOUT_S) -> bool:
        """End a live request; whether it was alive. Idempotent."""
        return await self._send(operations.cancel(request_id), timeout_s)

    async def tokenize(
        self,
        prompt: str | Sequence[Message],
        *,
        model: str = "",
        add_special_tokens: bool = True,
        timeout_s: float = DEFAULT_UNARY_TIMEOUT_S,
    ) -> list[int]:
        """Token ids exactly as `generate` would compute them."""
        return await self._send(operations.tokenize(prompt, model, add_special_tokens), timeout_s)

    async def detokenize(
        self,
        token_ids: Sequence[int],
        *,
        model: str = "",
        skip_special_tokens: bool = True,
        timeout_s: float = DEFAULT_UNARY_TIMEOUT_S,
    ) -> str:
        """Text of token ids."""
        return await self._send(operations.detokenize(token_ids, model, skip_special_tokens), timeout_s)

    async def list_models(self, *, timeout_s: float = DEFAULT_UNARY_TIMEOUT_S) -> list[ModelInfo]:
        """All models behind the gateway."""
        return await self._send(operations.list_models(), timeout_s)

    async def get_model(self, model: str = "", *, timeout_s: float = DEFAULT_UNARY_TIMEOUT_S) -> ModelInfo:
        """One model; empty: the only one."""
        return await self._send(operations.get_model(model), timeout_s)

    async def alive(self, *, timeout_s: float = 5.0) -> bool:
        """Whether the gateway process answers in time, ready or not."""
        return await self._probe("", timeout_s)

    async def ready(self, *, timeout_s: float = 5.0) -> bool:
        """Whether the service can generate now; False also when nothing answers in time."""
        return await self._probe(operations.READINESS, timeout_s)

    async def _probe(self, service: str, timeout_s: float) -> bool:
        try:
            return await self._send(operations.check_health(service), timeout_s)
        except (UnavailableError, DeadlineExceededError):  # refused, or accepted by something that keeps silent
            return False

    async def _send(self, operation: Unary[T], timeout_s: float) -> T:
        call = self._channel.unary_unary(
            operation.path, type(operation.request).SerializeToString, operation.response_type.FromString
        )
        attempts = Attempts(self._budget, checked_timeout(timeout_s))
        while True:
            try:
                result = operation.read(await call(operation.request, timeout=attempts.remaining_s()))
            except grpc.aio.AioRpcError as error:
                failure = from_rpc(error)
            else:
                attempts.succeeded()
                return result
            delay = attempts.delay_s(failure)
            if delay is None:
                raise failure
            await asyncio.sleep(delay)
