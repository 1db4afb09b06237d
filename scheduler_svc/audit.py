"""Conservation in production: are the scheduler's books right, and does the executor hold what they say?

The books are checked once per pause and every so many plans. Every 64th plan carries a digest of what the executor's
lanes must be, which compares it with what they are before it runs the plan. A mismatch is counted and healed by whoever
asked, it never ends the process.

A full check looks at every block of both tiers, about 0.9 µs each (one core of a 2-core machine): 35 ms for 40,000.
Where it would take longer than `MAX_BUSY_S`, full checks wait for pauses, because a step must not wait for one; while
steps run, the counts alone are added up then.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from pagemill.logs import kv
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.counters import EngineCounters

log = logging.getLogger(__name__)

MAX_BUSY_S = 0.02
"""What a full check may cost while steps run, by what the last one cost a block."""
FIRST_GUESS_S = 1e-6
"""Per block, before there was one."""
DIGEST_EVERY = 64
"""Plans from one digest to the next; more often where the books are checked more often."""
MAX_DIGEST_BLOCKS = 100_000
"""Blocks in use up to which there are digests: each costs both sides time."""
_IDLE_CHECK_S = 1.0
_FRESH_S = 0.1
"""A check asked for from outside is answered with one this old: a flood of questions must not stop the steps."""
_FRESH_TIMES = 10
"""Or with one that is this many times as old as it took: at most a tenth of the time goes into answers."""


class Audit:
    """When the books are checked, and what was found last."""

    def __init__(
        self, counters: EngineCounters, every_plans: int, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._counters = counters
        self._every_plans = every_plans
        self._next_check = every_plans
        self._checked_plans = 0
        self._idle_since: float | None = None
        self._found: list[str] = []
        self._fresh_until = float("-inf")
        self._clock = clock
        self._is_paused = False
        self._s_per_block = FIRST_GUESS_S

    def wants_digest(self, core: Scheduler) -> bool:
        """Whether the plan after the one that is being sent carries a digest."""
        every_plans = min(self._every_plans, DIGEST_EVERY)
        return self._counters.plans_sent % every_plans == 0 and core.stats().blocks_used <= MAX_DIGEST_BLOCKS

    def is_due(self, now: float, *, is_busy: bool) -> bool:
        """Whether to check now: enough plans were sent, or there was a pause since the last check."""
        if is_busy:
            self._idle_since = None
        elif self._idle_since is None:
            self._idle_since = now
        is_paused = self._idle_since is not None and now - self._idle_since > _IDLE_CHECK_S
        sent = self._counters.plans_sent
        self._is_paused = is_paused
        return sent >= self._next_check or (is_paused and sent > self._checked_plans)

    def check(self, core: Scheduler, now: float, *, in_full: bool | None = None) -> list[str]:
        """What is wrong with the core's books, counted and logged; in full when asked to, or when it costs little."""
        stats = core.stats()
        num_blocks = stats.blocks_total + stats.host_blocks_total
        if in_full is None:
            in_full = self._is_paused or self._s_per_block * num_blocks <= MAX_BUSY_S
        self._next_check = self._counters.plans_sent + self._every_plans
        if in_full:
            self._checked_plans = self._counters.plans_sent
            started = self._clock()
            self._found = core.check_invariants()
            took_s = self._clock() - started
            self._fresh_until = now + took_s + max(_FRESH_S, _FRESH_TIMES * took_s)
            self._s_per_block = took_s / max(1, num_blocks)
        else:
            self._found = core.check_conservation()
        if self._found:
            self._counters.violations["books"] += len(self._found)
            log.error("invariants violated", extra=kv(count=len(self._found), first=self._found[0]))
        return self._found

    def check_unless_fresh(self, core: Scheduler, now: float) -> list[str]:
        """As `check`, or what one of a moment ago has found."""
        return self._found if now < self._fresh_until else self.check(core, now, in_full=True)
