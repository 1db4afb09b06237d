"""Conservation in production: are the scheduler's books right, and does the executor hold what they say?

The books are checked once per pause and every so many plans; on those plans the number of blocks that the executor has
mapped is compared too. A mismatch is counted and healed by whoever asked, it never ends the process.

A check costs about 0.8 µs a block in use and counting mapped ones 0.05 µs (one core of a 2-core machine): 6 ms with 256
sequences of 512 tokens in blocks of 16, 24 ms with 1,024 of them, but 421 ms with 1,024 of 8k tokens. So beyond
`MAX_BLOCKS_BUSY` blocks there are checks in pauses only: a step must not wait for one.
"""

from __future__ import annotations

import logging

from pagemill.logs import kv
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.counters import EngineCounters

log = logging.getLogger(__name__)

MAX_BLOCKS_BUSY = 32_768
"""Blocks in use up to which the books are checked while steps run."""
_IDLE_CHECK_S = 1.0
_FRESH_S = 0.1
"""A check asked for from outside is answered with one this old: a flood of questions must not stop the steps."""


class Audit:
    """When the books are checked, and what was found last."""

    def __init__(self, counters: EngineCounters, every_plans: int) -> None:
        self._counters = counters
        self._every_plans = every_plans
        self._next_check = every_plans
        self._checked_plans = 0
        self._idle_since: float | None = None
        self._found: list[str] = []
        self._found_at = float("-inf")

    def wants_mapped_blocks(self, core: Scheduler) -> bool:
        """Whether the plan that is sent next is one whose mapped blocks are compared."""
        return self._counters.plans_sent % self._every_plans == 0 and core.stats().blocks_used <= MAX_BLOCKS_BUSY

    def is_due(self, core: Scheduler, now: float, *, is_busy: bool) -> bool:
        """Whether to check now: enough plans were sent and it is cheap, or there was a pause since the last check."""
        if is_busy:
            self._idle_since = None
        elif self._idle_since is None:
            self._idle_since = now
        is_paused = self._idle_since is not None and now - self._idle_since > _IDLE_CHECK_S
        sent = self._counters.plans_sent
        if is_paused and sent > self._checked_plans:
            return True
        return sent >= self._next_check and core.stats().blocks_used <= MAX_BLOCKS_BUSY

    def check(self, core: Scheduler, now: float) -> list[str]:
        """What is wrong with the core's books, counted and logged."""
        self._checked_plans = self._counters.plans_sent
        self._next_check = self._checked_plans + self._every_plans
        self._found, self._found_at = core.check_invariants(), now
        if self._found:
            self._counters.violations["books"] += len(self._found)
            log.error("invariants violated", extra=kv(count=len(self._found), first=self._found[0]))
        return self._found

    def check_unless_fresh(self, core: Scheduler, now: float) -> list[str]:
        """As `check`, or what one of a moment ago has found."""
        return self._found if now - self._found_at < _FRESH_S else self.check(core, now)
