"""Work without an executor: for a while it queues in hope, then what has had no token ends and new work is refused."""

from __future__ import annotations

import logging

from pagemill.engine.v1 import frontend_pb2 as pb
from pagemill.logs import kv
from scheduler_svc.executor_port import ExecutorPort
from scheduler_svc.gateway_port import GatewayPort
from scheduler_svc.gateway_session import EarlyRefusal

log = logging.getLogger(__name__)


class Grace:
    """`grace_s` from the moment an executor goes, or the scheduler starts without one; longer while one is starting."""

    def __init__(
        self, executors: ExecutorPort, gateways: GatewayPort, *, grace_s: float, most_s: float, retry_after_ms: int
    ) -> None:
        """`most_s`: the longest absence in which one that is starting counts; executors that die while they load and
        come back must not keep work waiting for ever."""
        self._executors, self._gateways = executors, gateways
        self._grace_s = grace_s
        self._most_s = max(grace_s, most_s)
        self._retry_after_ms = retry_after_ms
        self._is_spent = False
        """Whether this absence has had its consequences."""

    def refusal(self, now: float) -> EarlyRefusal | None:
        """Why no work is taken now, if none is."""
        if not self._is_over(now):
            return None
        return EarlyRefusal(pb.STREAM_ERROR_NO_EXECUTOR, self._text(), self._retry_after_ms)

    def check(self, now: float) -> None:
        """Once per absence: what was queued in hope and has had no token ends. Streams that have, wait on."""
        if not self._is_over(now):
            self._is_spent = False
        elif not self._is_spent:
            self._is_spent = True
            ended = self._gateways.end_streams(
                now,
                pb.STREAM_ERROR_NO_EXECUTOR,
                self._text(),
                among=lambda session: session.silent,
                retry_after_ms=self._retry_after_ms,
            )
            log.warning("no executor", extra=kv(grace_s=self._grace_s, refused=ended))

    def _is_over(self, now: float) -> bool:
        executors = self._executors
        if executors.session is not None:
            return False
        absent_s = now - executors.absent_since
        return absent_s >= (self._most_s if executors.is_one_starting(now) else self._grace_s)

    def _text(self) -> str:
        return f"no executor has been connected for {self._grace_s:g} s or more"
