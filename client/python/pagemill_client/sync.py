"""The blocking client."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack

import grpc

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


class GenerateStream:
    """One running generation: iterate for its events, or `collect` the whole. Leaving it early cancels it.

    Nothing is retried once the server has answered; errors are `pagemill_client.errors`.
    """

    def __init__(self, start: Callable[[float], Any], request: pb.GenerateRequest, attempts: Attempts) -> None:
        """`start` begins an attempt with that many seconds to its deadline; the first begins now."""
        self._start = start
        self._attempts = attempts
        self._closed = threading.Event()
        self._call = start(attempts.remaining_s())
        self._folder = StreamFolder(request)
        self._events = self._iterate()
        self.request_id = request.request_id

    def __iter__(self) -> Iterator[Event]:
        return self._events

    def __next__(self) -> Event:
        return next(self._events)

    def texts(self) -> Iterator[str]:
        """Non-empty pieces of the first output's text as they arrive."""
        for event in self._events:
            if isinstance(event, Delta) and event.output_index == 0 and event.text:
                yield event.text

    def collect(self) -> Generation:
        """Run to the end and return everything, what was iterated before included."""
        for _ in self._events:
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
        """Cancel what is left. Idempotent; safe from another thread, where the iteration then ends with an error."""
        self._closed.set()
        self._call.cancel()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _iterate(self) -> Iterator[Event]:
        while True:
            try:
                for response in self._call:
                    yield self._folder.add(response)
                self._folder.end()
                self._attempts.succeeded()
                return
            except grpc.RpcError as error:
                failure = from_rpc(error)
            finally:
                self._call.cancel()
            delay = self._attempts.delay_s(failure) if self._folder.accepted is None else None
            if delay is None:
                raise failure
            self._try_again(delay)

    def _try_again(self, delay_s: float) -> None:
        if not self._closed.wait(delay_s):
            self._call = self._start(self._attempts.remaining_s())
        if self._closed.is_set():
            self._call.cancel()
            raise RequestCancelledError("the stream was closed", status="CANCELLED")


class Client:
    """A connection to a Pagemill gateway; safe to share between threads. Close it, or use it in `with`.

    `target` is host:port or unix:/path. Clear text is used only to this machine, or anywhere with `insecure=True`;
    otherwise TLS. Every call has a deadline.
    """

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
            grpc.insecure_channel(target, options)
            if credentials is None
            else grpc.secure_channel(target, credentials.load(), options)
        )
        self._generate = self._channel.unary_stream(
            operations.GENERATE, pb.GenerateRequest.SerializeToString, pb.GenerateResponse.FromString
        )

    def close(self) -> None:
        """Cancel what runs and free the connection."""
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def generate(
        self, prompt: Prompt, *, timeout_s: float | None = None, **options: Unpack[GenerateOptions]
    ) -> GenerateStream:
        """Start a generation from text, token ids or a conversation."""
        request = generate_request(prompt, options)
        timeout = self.timeout_s if timeout_s is None else checked_timeout(timeout_s)
        attempts = Attempts(self._budget, timeout)
        return GenerateStream(lambda left_s: self._generate(request, timeout=left_s), request, attempts)

    def chat(
        self, messages: Sequence[Message], *, timeout_s: float | None = None, **options: Unpack[GenerateOptions]
    ) -> GenerateStream:
        """Start the assistant's next turn."""
        return self.generate(messages, timeout_s=timeout_s, **options)

    def cancel(self, request_id: str, *, timeout_s: float = DEFAULT_UNARY_TIMEOUT_S) -> bool:
        """End a live request; whether it was alive. Idempotent."""
        return self._send(operations.cancel(request_id), timeout_s)

    def tokenize(
        self,
        prompt: str | Sequence[Message],
        *,
        model: str = "",
        add_special_tokens: bool = True,
        timeout_s: float = DEFAULT_UNARY_TIMEOUT_S,
    ) -> list[int]:
        """Token ids exactly as `generate` would compute them."""
        return self._send(operations.tokenize(prompt, model, add_special_tokens), timeout_s)

    def detokenize(
        self,
        token_ids: Sequence[int],
        *,
        model: str = "",
        skip_special_tokens: bool = True,
        timeout_s: float = DEFAULT_UNARY_TIMEOUT_S,
    ) -> str:
        """Text of token ids."""
        return self._send(operations.detokenize(token_ids, model, skip_special_tokens), timeout_s)

    def list_models(self, *, timeout_s: float = DEFAULT_UNARY_TIMEOUT_S) -> list[ModelInfo]:
        """All models behind the gateway."""
        return self._send(operations.list_models(), timeout_s)

    def get_model(self, model: str = "", *, timeout_s: float = DEFAULT_UNARY_TIMEOUT_S) -> ModelInfo:
        """One model; empty: the only one."""
        return self._send(operations.get_model(model), timeout_s)

    def alive(self, *, timeout_s: float = 5.0) -> bool:
        """Whether the gateway process answers in time, ready or not."""
        return self._probe("", timeout_s)

    def ready(self, *, timeout_s: float = 5.0) -> bool:
        """Whether the service can generate now; False also when nothing answers in time."""
        return self._probe(operations.READINESS, timeout_s)

    def _probe(self, service: str, timeout_s: float) -> bool:
        try:
            return self._send(operations.check_health(service), timeout_s)
        except (UnavailableError, DeadlineExceededError):  # refused, or accepted by something that keeps silent
            return False

    def _send(self, operation: Unary[T], timeout_s: float) -> T:
        call = self._channel.unary_unary(
            operation.path, type(operation.request).SerializeToString, operation.response_type.FromString
        )
        attempts = Attempts(self._budget, checked_timeout(timeout_s))
        while True:
            try:
                result = operation.read(call(operation.request, timeout=attempts.remaining_s()))
            except grpc.RpcError as error:
                failure = from_rpc(error)
            else:
                attempts.succeeded()
                return result
            delay = attempts.delay_s(failure)
            if delay is None:
                raise failure
            time.sleep(delay)
