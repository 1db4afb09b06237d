"""Asks the scheduler what an operator wants to know. Bounded in number and in time, and ended with the session."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from pagemill.engine.v1 import frontend_pb2 as wire
from pagemill.errors import PagemillError, Reason
from scheduler_svc.gateway.refusals import not_answered, not_connected

_MAX_PENDING = 16
_TIMEOUT_S = 5.0


class AdminDesk:
    """Questions that wait for their answers. Used from the event loop only.

    `send` puts a question on the link and says whether it was taken.
    """

    def __init__(self, send: Callable[[wire.AdminRequest], bool], *, timeout_s: float = _TIMEOUT_S) -> None:
        self._send = send
        self._timeout_s = timeout_s
        self._next_id = 0
        self._pending: dict[int, asyncio.Future[wire.AdminReply]] = {}

    def __len__(self) -> int:
        return len(self._pending)

    async def ask(self, operation: wire.AdminOperation) -> wire.AdminReply:
        """The scheduler's answer.

        Raises PagemillError: NOT_READY without a scheduler, or without its answer in time; QUEUE_FULL when too many
        ask at once.
        """
        if len(self._pending) >= _MAX_PENDING:
            raise PagemillError(Reason.QUEUE_FULL, "too many questions wait for the scheduler", retry_after_ms=1000)
        self._next_id += 1
        number = self._next_id
        answer = self._pending[number] = asyncio.get_running_loop().create_future()
        try:
            if not self._send(wire.AdminRequest(id=number, operation=operation)):
                raise not_connected()
            async with asyncio.timeout(self._timeout_s):
                reply: wire.AdminReply = await answer
        except TimeoutError:
            raise not_answered() from None
        finally:
            del self._pending[number]
        if reply.error:
            raise PagemillError(Reason.NOT_READY, reply.error, retry_after_ms=1000)
        return reply

    def answered(self, reply: wire.AdminReply) -> None:
        """An answer came; one that nobody waits for any more is dropped."""
        waiting = self._pending.get(reply.id)
        if waiting is not None and not waiting.done():
            waiting.set_result(reply)

    def lose_session(self) -> None:
        """No answer will come: questions are not asked again, since what they ask may have been done."""
        for waiting in self._pending.values():
            if not waiting.done():
                waiting.set_exception(not_connected())
