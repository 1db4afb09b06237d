"""The calls that are alive in this gateway: unique ids per tenant, the bound on their number, drain, slow clients."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from pagemill.errors import PagemillError, Reason
from scheduler_svc.gateway.metrics import GatewayMetrics
from scheduler_svc.gateway.streams import LiveStream


class Call:
    """One Generate call. `killed_by`: the error it is being ended with from outside."""

    __slots__ = ("_task", "cancel_requested", "killed_by", "stream", "writing_since")

    def __init__(self, task: asyncio.Task[Any] | None) -> None:
        self._task = task
        self.stream: LiveStream | None = None
        self.cancel_requested = False
        self.writing_since: float | None = None
        self.killed_by: PagemillError | None = None

    def attach(self, stream: LiveStream) -> None:
        """The call has a stream now; a cancellation that came earlier reaches it."""
        self.stream = stream
        if self.cancel_requested:
            stream.cancel()

    def cancel(self) -> None:
        """Another call asked to end this one; it ends with Finished."""
        self.cancel_requested = True
        if self.stream is not None:
            self.stream.cancel()

    def kill(self, error: PagemillError) -> None:
        """End the call with `error` wherever it is; a write that does not return is abandoned."""
        if self.killed_by is None and self._task is not None:
            self.killed_by = error
            self._task.cancel()

    def survived(self) -> None:
        """The cancellation of `kill` has arrived and become an error."""
        if self._task is not None:
            self._task.uncancel()

    async def write(self, context: Any, message: Any) -> None:
        """Write to the client; `Registry.cut_slow` watches how long that takes."""
        self.writing_since = time.monotonic()
        await context.write(message)
        self.writing_since = None


class Registry:
    """All live calls. Used from the event loop only."""

    def __init__(self, metrics: GatewayMetrics, *, max_live: int = 10_000) -> None:
        self._metrics = metrics
        self._max_live = max_live
        self._calls: dict[tuple[str, str], Call] = {}
        self._empty = asyncio.Event()
        self._empty.set()
        self.draining = False

    def __len__(self) -> int:
        return len(self._calls)

    def check_open(self) -> None:
        """Raise unless new calls are taken."""
        if self.draining:
            raise PagemillError(Reason.DRAINING, "the server is shutting down")
        if len(self._calls) >= self._max_live:
            raise PagemillError(Reason.QUEUE_FULL, f"{self._max_live} requests are alive already", retry_after_ms=1000)

    @contextmanager
    def enter(self, tenant: str, request_id: str) -> Iterator[Call]:
        """A new call, alive until the end of the block. Raises DUPLICATE_REQUEST_ID, or what the call is killed by."""
        key = (tenant, request_id)
        if key in self._calls:
            raise PagemillError(Reason.DUPLICATE_REQUEST_ID, "a request with this request_id is alive")
        call = self._calls[key] = Call(asyncio.current_task())
        self._metrics.live_requests.inc()
        self._empty.clear()
        try:
            yield call
        except asyncio.CancelledError:
            if call.killed_by is None:
                raise  # the client's own; it must pass
            call.survived()
            raise call.killed_by from None
        finally:
            del self._calls[key]
            self._metrics.live_requests.dec()
            if not self._calls:
                self._empty.set()

    def find(self, tenant: str, request_id: str) -> Call | None:
        """The live call of that id."""
        return self._calls.get((tenant, request_id))

    def cut_slow(self, timeout_s: float) -> int:
        """End calls whose client has not read for `timeout_s` seconds; returns how many."""
        limit = time.monotonic() - timeout_s
        slow = [
            call
            for call in self._calls.values()
            if call.writing_since is not None and call.writing_since < limit and call.killed_by is None
        ]
        for call in slow:
            call.kill(PagemillError(Reason.SLOW_CONSUMER, "the client did not read its stream"))
        return len(slow)

    async def wait_empty(self, timeout_s: float) -> bool:
        """Whether all calls have ended, after waiting for at most `timeout_s` seconds."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._empty.wait()
        except TimeoutError:
            return False
        return True

    def end_all(self, error: PagemillError) -> None:
        """End what is left with `error`; what was generated until now still goes out first where the client reads.

        A call that answers already is not killed before its first message is on its way (`InferenceService`).
        """
        for call in list(self._calls.values()):
            answers = call.stream is not None and (call.stream.admitted or call.stream.is_over)
            if call.stream is not None and answers and call.writing_since is None:
                call.stream.fail(error)
            else:
                call.kill(error)
