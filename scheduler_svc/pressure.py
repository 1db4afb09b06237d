"""Says when KV memory is too small for the load: when a good part of the work is work that was done before."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from scheduler_svc.core.stats import SchedulerStats

WINDOW_S = 10.0
"""How long counts are gathered before they are judged; shorter bursts are what preemption is for."""
SILENCE_S = 60.0
"""Between two lines."""
SHARE = 0.1
"""Tokens brought back or computed again, of all that were computed, from which memory is called too small."""
MIN_PREEMPTIONS = 4
"""In a window: one long request that makes room once is no load."""


@dataclass(frozen=True, slots=True)
class Finding:
    """What a window showed."""

    preemptions: int
    recomputed_tokens: int
    swapped_tokens: int
    evictions: int
    share: float
    """Of all tokens computed meanwhile."""
    advice: str


class MemoryPressure:
    """Compares the counters of one window with those of the last."""

    __slots__ = ("_next_line", "_next_look", "_seen")

    def __init__(self) -> None:
        self._seen: SchedulerStats | None = None
        self._next_look = 0.0
        self._next_line = 0.0

    def look(self, read: Callable[[], SchedulerStats], now: float) -> Finding | None:
        """A finding when a window has ended that is worth a line; reads nothing in between."""
        if now < self._next_look:
            return None
        stats = read()
        seen, self._seen, self._next_look = self._seen, stats, now + WINDOW_S
        if seen is None or now < self._next_line:
            return None
        preemptions = stats.num_preemptions_total - seen.num_preemptions_total
        recomputed = stats.recomputed_tokens_total - seen.recomputed_tokens_total
        swapped = stats.swapped_tokens_total - seen.swapped_tokens_total
        computed = stats.prefill_tokens_total - seen.prefill_tokens_total
        computed += stats.generated_tokens_total - seen.generated_tokens_total
        share = (recomputed + swapped) / max(1, computed)
        if preemptions < MIN_PREEMPTIONS or share < SHARE:
            return None
        self._next_line = now + SILENCE_S
        evictions = stats.evictions_total - seen.evictions_total
        return Finding(preemptions, recomputed, swapped, evictions, round(share, 3), _advice(stats))


def _advice(stats: SchedulerStats) -> str:
    advice = "give the executor more --kv-memory-bytes or --kv-dtype int8, or run fewer at once with --max-num-seqs"
    if not stats.host_blocks_total:
        return advice + ", or give it a host tier with --host-kv-memory-bytes"
    return advice
