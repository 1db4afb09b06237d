"""What a start says about caching and preemption: counted when it happens, because only then it is known."""

from __future__ import annotations

from math import inf

from scheduler_svc.core.costs import TailLosses
from scheduler_svc.core.limits import StepLimits
from scheduler_svc.core.running import Need
from scheduler_svc.core.sequence import Sequence
from scheduler_svc.core.stats import Counters


def count_start(counters: Counters, losses: TailLosses, seq: Sequence, need: Need, limits: StepLimits) -> None:
    """A waiting sequence is about to start with what `need` says; called before its state changes."""
    block_size = limits.block_size
    num_swapped = min(len(need.host_ids) * block_size, need.num_cached)
    counters.cached_tokens += need.num_cached - num_swapped
    counters.swapped_tokens += num_swapped
    if seq.first_run is None:
        seq.num_cached_prompt = min(need.num_cached, seq.prompt_len)
        if seq.spec.reads_prefix_cache:
            counters.prefix_query_tokens += len(seq.token_ids)
            counters.prefix_hit_tokens += need.num_cached
        return
    num_recomputed = max(0, seq.num_lost - need.num_cached)
    counters.recomputed_tokens += num_recomputed
    if seq.forecast is not None:
        if seq.forecast.let_go:
            losses.resumed(seq.num_lost, min(seq.num_lost, num_recomputed + num_swapped))
        counters.regret_s += seq.forecast.regret_s(limits.costs, num_recomputed / block_size, len(need.host_ids))
        if seq.forecast.best_s < inf:
            counters.forecast_s += seq.forecast.best_s
        seq.forecast = None
