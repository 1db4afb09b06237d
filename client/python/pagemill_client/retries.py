"""Whether a refused call is worth another attempt, and when. Pure but for the clock.

gRPC's own retries (`channel`) know a status and no more. UNAVAILABLE is theirs: a lost connection, a server that cannot
serve now. RESOURCE_EXHAUSTED may be a full queue, which passes, or a message that is too large, which does not; only
the reason tells them apart, so it is decided here: for reasons that pass, with the server's word on when, before
anything was accepted.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable

from pagemill_client.errors import PagemillError

MAX_ATTEMPTS = 3
_PASSING = frozenset({"QUEUE_FULL", "TENANT_QUOTA"})
"""Not QUEUE_TIMEOUT: the caller said how long the queue may take, and it took that long."""
_JITTER = 0.2
"""Share by which waits are drawn out at random, so that many refused clients do not come back as one."""


class RetryBudget:
    """What one client object may spend on retries; safe between threads.

    As gRPC's throttling: each failure costs one of ten tokens, each success earns a tenth, and while half or less is
    left nothing is retried. A server that refuses everything is asked little more often than without retries.
    """

    def __init__(self, max_tokens: float = 10.0, token_ratio: float = 0.1) -> None:
        self._lock = threading.Lock()
        self._max_tokens = self._tokens = max_tokens
        self._token_ratio = token_ratio

    def failed(self) -> bool:
        """Count a failure; whether it may be followed by a retry."""
        with self._lock:
            self._tokens = max(0.0, self._tokens - 1)
            return self._tokens > self._max_tokens / 2

    def succeeded(self) -> None:
        """Count a success."""
        with self._lock:
            self._tokens = min(self._max_tokens, self._tokens + self._token_ratio)


class Attempts:
    """The attempts of one call, which together have one deadline."""

    def __init__(self, budget: RetryBudget, timeout_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._budget = budget
        self._clock = clock
        self._deadline = clock() + timeout_s
        self._num_made = 1

    def remaining_s(self) -> float:
        """Seconds until the deadline; never below a millisecond, since gRPC takes no less for a time-out."""
        return max(0.001, self._deadline - self._clock())

    def delay_s(self, error: PagemillError) -> float | None:
        """Seconds to wait before the next attempt; None: the error is the call's end.

        A wait that would outlast the deadline is not begun: the caller learns now what it would learn then.
        """
        if error.reason not in _PASSING:
            return None
        may = self._budget.failed()
        if not may or error.no_retry or error.retry_after_s is None or self._num_made >= MAX_ATTEMPTS:
            return None
        delay = error.retry_after_s * (1 + random.uniform(0, _JITTER))  # noqa: S311 (spreads load, no secret)
        if delay >= self._deadline - self._clock():
            return None
        self._num_made += 1
        return delay

    def succeeded(self) -> None:
        """The call ended well."""
        self._budget.succeeded()
