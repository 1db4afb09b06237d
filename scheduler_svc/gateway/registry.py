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

_CANCEL_GRACE_S = 0.2
"""How long a request whose id is alive waits for the news that the client has cancelled the earlier call: gRPC tells
of cancellations and of new calls in no fixed order, and none at all between two connections."""


def draining() -> PagemillError:
    """Why a gateway that goes down takes or keeps no call; another one, or its successor, may do so soon."""
    return PagemillError(Reason.DRAINING, "the server is shutting down", retry_after_ms=1000)


class Call:
    """One Generate call. `killed_by`: the error it is being ended with from outside."""

    __slots__ = ("_task", "cancel_requested", "finishing", "gone", "killed_by", "stream", "writing_since")

    def __init__(self, task: asyncio.Task[Any] | None) -> None:
        self._task = task
        self.stream: LiveStream | None = None
        self.cancel_requested = False
        self.finishing = False
        """Its last message is on its way."""
        self.gone = asyncio.Event()
        """Its id is free."""
        self.writing_since: float | None = None
        self.killed_by: PagemillError | None = None

    @property
    def is_leaving(self) -> bool:
        """Whether its end is certain, though its bill or its last message may still be awaited."""
        cancelled = self._task is not None and self._task.cancelling() > 0
        return self.cancel_requested or self.finishing or self.killed_by is not None or cancelled

    def attach(self, stream: LiveStream) -> None:
        """The call has a stream now; a cancellation that came earlier reaches it."""
        self.stream = stream
        if self.cancel_requested:
            stream.cancel()

    def cancel(self) -> None:
        """Another call asked to end this one; it ends with Finished."""
        self.cancel_requested = True
        self.gone.set()
        if self.stream is not None:
            self.stream.cancel()

    def finish(self) -> None:
        """Its last message goes out now."""
        self.finishing = True
        self.gone.set()

    def kill(self, error: PagemillError) -> None:
        """End the call with `error` wherever it is; a write that does not return is abandoned."""
        if self.killed_by is None and self._task is not None:
            self.killed_by = error
            self.gone.set()
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
        self._calls: set[Call] = set()
        self._by_id: dict[tuple[str, str], Call] = {}
        """The latest call of each id. One before it that is leaving is in `_calls` only."""
        self._empty = asyncio.Event()
        self._empty.set()
        self.draining = False

    def __len__(self) -> int:
        return len(self._calls)

    def check_open(self) -> None:
        """Raise unless new calls are taken."""
        if self.draining:
            raise draining()
        if len(self._calls) >= self._max_live:
            raise PagemillError(Reason.QUEUE_FULL, f"{self._max_live} requests are alive already", retry_after_ms=1000)

    async def wait_for_id(self, tenant: str, request_id: str) -> None:
        """Give a cancellation under way a moment to free the id; `enter` then decides. Raises as `check_open`."""
        holder = self._by_id.get((tenant, request_id))
        if holder is None or holder.is_leaving:
            return
        try:
            async with asyncio.timeout(_CANCEL_GRACE_S):
                await holder.gone.wait()
        except TimeoutError:
            pass
        self.check_open()

    @contextmanager
    def enter(self, tenant: str, request_id: str) -> Iterator[Call]:
        """A new call, alive until the end of the block. Raises DUPLICATE_REQUEST_ID, or what the call is killed by.

        A call that is leaving gives its id away at once: its late end touches nothing of the new one.
        """
        key = (tenant, request_id)
        holder = self._by_id.get(key)
        if holder is not None and not holder.is_leaving:
            raise PagemillError(Reason.DUPLICATE_REQUEST_ID, "a request with this request_id is alive")
        call = self._by_id[key] = Call(asyncio.current_task())
        self._calls.add(call)
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
            call.gone.set()
            self._calls.discard(call)
            if self._by_id.get(key) is call:
                del self._by_id[key]
            self._metrics.live_requests.dec()
            if not self._calls:
                self._empty.set()

    def find(self, tenant: str, request_id: str) -> Call | None:
        """The live call of that id, the latest one."""
        return self._by_id.get((tenant, request_id))

    def cut_slow(self, timeout_s: float) -> int:
        """End calls whose client has not read for `timeout_s` seconds; returns how many."""
        limit = time.monotonic() - timeout_s
        slow = [
            call
            for call in self._calls
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
        for call in list(self._calls):
            answers = call.stream is not None and (call.stream.admitted or call.stream.is_over)
            if call.stream is not None and answers and call.writing_since is None:
                call.stream.fail(error)
            else:
                call.kill(error)
