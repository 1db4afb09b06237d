"""Numbers about the scheduler that cost nothing to read."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from scheduler_svc.core.memory import KvMemory
from scheduler_svc.core.preemption import Action, Reason
from scheduler_svc.core.queues import WaitingQueue
from scheduler_svc.core.running import RunningSet


@dataclass(frozen=True, slots=True)
class SchedulerStats:
    """Gauges of this moment and counters (`*_total`) since the scheduler was made."""

    queue_requests: int
    """Waiting sequences."""
    queue_tokens: int
    """Tokens they had to compute first when they joined the queue."""
    preempted: int
    """Waiting sequences that have run before."""
    swapped: int
    """Those of them whose blocks are in the host tier."""
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
    host_blocks_total: int
    """0 without a host tier, as are the other gauges of it."""
    host_blocks_free: int
    host_blocks_used: int
    host_blocks_cached: int
    evictions_total: int
    """Device blocks whose content was given up for other content."""
    host_evictions_total: int
    share_evictions_total: int
    """Those of the device whose salt had more than its share, and that were not the least recently used."""
    host_share_evictions_total: int
    swapped_out_blocks_total: int
    """Blocks whose copy to the host tier has finished."""
    swapped_in_blocks_total: int
    num_preemptions_total: int
    preemptions_total: dict[tuple[Action, Reason], int]
    """The same by what became of the blocks and what room was made for."""
    num_executor_losses_total: int
    """Executors that left or failed a step."""
    num_plans_total: int
    num_stale_results_total: int
    """Results of plans that were not in flight; ignored."""
    generated_tokens_total: int
    prefill_tokens_total: int
    """Prompt and recomputed positions that were planned."""
    recomputed_tokens_total: int
    """Positions planned again, because a preemption or the loss of an executor threw them away."""
    cached_tokens_total: int
    """Positions that starts and resumes found in the device tier."""
    swapped_tokens_total: int
    """Positions that starts and resumes brought back from the host tier."""
    prefix_query_tokens_total: int
    """Tokens of first starts that looked into the prefix cache."""
    prefix_hit_tokens_total: int
    """Those of them that were there."""
    preemption_forecast_s_total: float
    """Seconds that preemptions were expected to cost by the cheapest way, where they are over."""
    preemption_regret_s_total: float
    """Seconds that they cost beyond that."""
    submitted_total: int
    finished_total: int


@dataclass(slots=True)
class Counters:
    """The counters behind `SchedulerStats`, of all executor sessions."""

    preemptions: Counter[tuple[Action, Reason]] = field(default_factory=Counter)
    executor_losses: int = 0
    plans: int = 0
    stale_results: int = 0
    generated_tokens: int = 0
    prefill_tokens: int = 0
    recomputed_tokens: int = 0
    cached_tokens: int = 0
    swapped_tokens: int = 0
    prefix_query_tokens: int = 0
    prefix_hit_tokens: int = 0
    forecast_s: float = 0.0
    regret_s: float = 0.0
    submitted: int = 0
    finished: int = 0
    evictions: int = 0
    """Of ended sessions, as those below."""
    host_evictions: int = 0
    share_evictions: int = 0
    host_share_evictions: int = 0
    swapped_out: int = 0
    swapped_in: int = 0

    @classmethod
    def of_session(cls, memory: KvMemory) -> Counters:
        """What the memory of a session has counted."""
        return cls(
            evictions=memory.device.num_evictions,
            host_evictions=0 if memory.host is None else memory.host.num_evictions,
            share_evictions=memory.device.num_share_evictions,
            host_share_evictions=0 if memory.host is None else memory.host.num_share_evictions,
            swapped_out=memory.copies.num_swapped_out,
            swapped_in=memory.copies.num_swapped_in,
        )

    def end_session(self, memory: KvMemory) -> None:
        """An executor session is over: what its memory counted is kept."""
        ended = self.of_session(memory)
        self.evictions += ended.evictions
        self.host_evictions += ended.host_evictions
        self.share_evictions += ended.share_evictions
        self.host_share_evictions += ended.host_share_evictions
        self.swapped_out += ended.swapped_out
        self.swapped_in += ended.swapped_in


def collect(waiting: WaitingQueue, running: RunningSet | None, counters: Counters) -> SchedulerStats:
    """All numbers of this moment, O(1)."""
    memory = None if running is None else running.memory
    pool = None if memory is None else memory.device
    host = None if memory is None else memory.host
    now = Counters() if memory is None else Counters.of_session(memory)
    return SchedulerStats(
        queue_requests=len(waiting),
        queue_tokens=waiting.num_tokens,
        preempted=waiting.num_preempted,
        swapped=waiting.num_swapped,
        running=0 if running is None else running.num_running,
        inflight_plans=0 if running is None else len(running.inflight),
        blocks_total=0 if pool is None else pool.num_blocks,
        blocks_free=0 if pool is None else pool.num_free,
        blocks_used=0 if pool is None else pool.num_used,
        blocks_cached=0 if pool is None else pool.num_cached,
        blocks_in_flight=0 if pool is None else pool.num_in_flight,
        blocks_reserved=0 if pool is None else pool.num_reserved,
        lanes_free=0 if running is None else running.lanes.num_free,
        host_blocks_total=0 if host is None else host.num_blocks,
        host_blocks_free=0 if host is None else host.num_free,
        host_blocks_used=0 if host is None else host.num_used,
        host_blocks_cached=0 if host is None else host.num_cached,
        evictions_total=counters.evictions + now.evictions,
        host_evictions_total=counters.host_evictions + now.host_evictions,
        share_evictions_total=counters.share_evictions + now.share_evictions,
        host_share_evictions_total=counters.host_share_evictions + now.host_share_evictions,
        swapped_out_blocks_total=counters.swapped_out + now.swapped_out,
        swapped_in_blocks_total=counters.swapped_in + now.swapped_in,
        num_preemptions_total=counters.preemptions.total(),
        preemptions_total=dict(counters.preemptions),
        num_executor_losses_total=counters.executor_losses,
        num_plans_total=counters.plans,
        num_stale_results_total=counters.stale_results,
        generated_tokens_total=counters.generated_tokens,
        prefill_tokens_total=counters.prefill_tokens,
        recomputed_tokens_total=counters.recomputed_tokens,
        cached_tokens_total=counters.cached_tokens,
        swapped_tokens_total=counters.swapped_tokens,
        prefix_query_tokens_total=counters.prefix_query_tokens,
        prefix_hit_tokens_total=counters.prefix_hit_tokens,
        preemption_forecast_s_total=counters.forecast_s,
        preemption_regret_s_total=counters.regret_s,
        submitted_total=counters.submitted,
        finished_total=counters.finished,
    )
