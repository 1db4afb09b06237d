"""Numbers about the scheduler that cost nothing to read."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SchedulerStats:
    """Gauges of this moment and counters (`*_total`) since the scheduler was made."""

    queue_requests: int
    """Waiting sequences."""
    queue_tokens: int
    """Tokens they had to compute first when they joined the queue."""
    preempted: int
    """Waiting sequences that have run before."""
    running: int
    inflight_plans: int
    blocks_total: int
    """0 without an executor, as are the other block gauges."""
    blocks_free: int
    blocks_used: int
    blocks_cached: int
    blocks_in_flight: int
    blocks_reserved: int
    lanes_free: int
    num_preemptions_total: int
    num_executor_losses_total: int
    """Executors that left or failed a step."""
    num_plans_total: int
    num_stale_results_total: int
    """Results of plans that were not in flight; ignored."""
    generated_tokens_total: int
    prefill_tokens_total: int
    """Prompt and recomputed positions that were planned."""
    recomputed_tokens_total: int
    """Planned positions that a preemption or the loss of an executor threw away."""
    submitted_total: int
    finished_total: int


@dataclass(slots=True)
class Counters:
    """The counters behind `SchedulerStats`."""

    preemptions: int = 0
    executor_losses: int = 0
    plans: int = 0
    stale_results: int = 0
    generated_tokens: int = 0
    prefill_tokens: int = 0
    recomputed_tokens: int = 0
    submitted: int = 0
    finished: int = 0
