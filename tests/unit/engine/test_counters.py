from __future__ import annotations

import pytest

from cache_svc.blocks.histogram import Histogram
from scheduler_svc.core.params import PreemptionMode, SchedulerConfig
from scheduler_svc.counters import RateMeter
from scheduler_svc.sessions import MAX_EPOCH, EpochSource, plain
from tests.oracles.base import Geometry
from tests.oracles.kv import KvExecutor
from tests.oracles.rig import LockstepRig
from tests.unit.engine.engine_samples import samples_of

PUBLIC = {
    "pagemill_requests_total",
    "pagemill_queue_requests",
    "pagemill_queue_tokens",
    "pagemill_running_requests",
    "pagemill_prompt_tokens_total",
    "pagemill_generated_tokens_total",
    "pagemill_step_seconds_count",
    "pagemill_step_tokens_sum",
    "pagemill_step_rows_bucket",
    "pagemill_kv_blocks",
    "pagemill_preemptions_total",
    "pagemill_executors",
    "pagemill_stale_messages_total",
    "pagemill_invariant_violations_total",
    "pagemill_swapped_requests",
    "pagemill_startup_seconds",
    "pagemill_kv_evictions_total",
    "pagemill_kv_share_evictions_total",
    "pagemill_prefix_cache_hits_total",
    "pagemill_prefix_cache_queries_total",
    "pagemill_swap_bytes_total",
    "pagemill_swap_seconds_bucket",
}


def test_histogram_bounds_are_inclusive() -> None:
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 2.0, 99.0):
        histogram.observe(value)
    assert (histogram.buckets, histogram.sum) == ([2, 2, 1], 104.0)


def test_rate_follows_the_last_seconds_of_running() -> None:
    rate = RateMeter(horizon_s=5.0)
    assert rate.tokens_per_s() is None
    for _ in range(100):
        rate.add(10, 0.1)
    assert rate.tokens_per_s() == pytest.approx(100)
    for _ in range(300):
        rate.add(1, 0.1)
    assert rate.tokens_per_s() == pytest.approx(10, rel=0.05)


def test_epochs_only_rise() -> None:
    epochs = EpochSource(1000)
    found = [epochs.next(), epochs.next(5000), epochs.next(10), epochs.for_reject(9000), epochs.for_reject(2**64 - 1)]
    assert found == sorted(set(found))
    assert found[1] > 5000
    assert found[-1] < MAX_EPOCH


def test_words_of_a_peer_fit_a_log_line() -> None:
    assert plain("a\nb\x1b[31m" + "x" * 500) == "a?b?[31m" + "x" * 192


def test_metrics_tell_what_happened() -> None:
    rig = LockstepRig()
    rig.add_executor(KvExecutor)
    rig.engine.counters.startup_seconds["ready"] = 0.5
    gateway = rig.add_gateway()
    rig.turn(3)
    for seed in range(3):
        gateway.submit([1, 2, seed], max_tokens=5)
    gateway.submit([1], max_tokens=0)
    rig.finish()
    rig.turn(20)
    samples = samples_of(rig)
    assert {name for name, *_ in samples} >= PUBLIC
    assert samples["pagemill_requests_total", ("outcome", "length")] == 3
    assert samples["pagemill_requests_total", ("outcome", "internal")] == 1
    assert samples["pagemill_generated_tokens_total",] == 15
    assert samples["pagemill_prompt_tokens_total", ("source", "computed")] == 9
    assert samples["pagemill_executors", ("state", "ready")] == 1
    for source in ("cached", "swapped"):
        assert samples["pagemill_prompt_tokens_total", ("source", source)] == 0
    assert samples["pagemill_startup_seconds", ("phase", "ready")] == 0.5
    assert samples["pagemill_preemptions_total", ("action", "swap"), ("reason", "memory")] == 0
    assert samples["pagemill_invariant_violations_total", ("kind", "state_digest")] == 0
    assert samples["pagemill_kv_evictions_total", ("tier", "device")] == 0
    assert samples["pagemill_swap_bytes_total", ("direction", "out")] == 0
    labels = (("executor", "oracle"), ("state", "free"), ("tier", "device"))
    assert samples["pagemill_kv_blocks", *labels] == 64
    plans = samples["pagemill_plans_sent_total",]
    assert samples["pagemill_step_seconds_count", ("phase", "execute")] == plans
    assert samples["pagemill_step_tokens_sum",] >= 9 + 3 * 4


def test_frames_that_the_links_drop_are_published() -> None:
    rig = LockstepRig()
    assert samples_of(rig)["pagemill_stale_messages_total", ("kind", "transport")] == 0
    rig.executor_hub.num_dropped, rig.gateway_hub.num_dropped = 2, 5
    assert samples_of(rig)["pagemill_stale_messages_total", ("kind", "transport")] == 7


def test_metrics_of_the_prefix_cache_count_tokens() -> None:
    rig = LockstepRig()
    rig.add_executor(KvExecutor, Geometry(num_blocks=12))
    gateway = rig.add_gateway()
    for _ in range(2):  # the second finds the first one's blocks, but for the last token's
        gateway.submit(range(32), max_tokens=2)
        rig.finish()
    gateway.submit(range(500, 580), max_tokens=2)  # needs what they left
    rig.finish()
    samples = samples_of(rig)
    assert samples["pagemill_prefix_cache_queries_total",] == 32 + 32 + 80
    assert samples["pagemill_prefix_cache_hits_total",] == 24
    assert samples["pagemill_prompt_tokens_total", ("source", "cached")] == 24
    assert samples["pagemill_prompt_tokens_total", ("source", "computed")] == 32 + 8 + 80
    assert samples["pagemill_kv_evictions_total", ("tier", "device")] > 0
    (ended,) = [record.ended for record in gateway.streams.values() if record.stream == 2]
    assert ended is not None
    assert ended.cached_tokens == 24


def test_copied_bytes_are_those_of_the_executor_that_copied_them() -> None:
    rig = LockstepRig(core=SchedulerConfig(preemption_mode=PreemptionMode.SWAP))
    total = {"out": 0, "in": 0}
    for number, size in enumerate((1 << 16, 1 << 10)):
        geometry = Geometry(num_blocks=12, num_host_blocks=64, bytes_per_block=size)
        executor = rig.add_executor(KvExecutor, geometry, name=f"executor-{number}")
        gateway = rig.add_gateway(f"gw-{number}")
        for seed in range(6):
            gateway.submit([seed] * 20, max_tokens=40)
        rig.finish()
        rig.turn(20)
        total["out"] += executor.counts.num_swapped_out * size
        total["in"] += executor.counts.num_swapped_in * size
        rig.kill_executor(executor)
        rig.turn(20)
    assert min(total.values()) > 1 << 16
    for way, num_bytes in total.items():  # scraped for the first time when both have gone
        assert samples_of(rig)["pagemill_swap_bytes_total", ("direction", way)] == num_bytes


def test_a_step_and_a_preemption_are_explained_by_one_debug_line_each(caplog: pytest.LogCaptureFixture) -> None:
    rig = LockstepRig()
    rig.add_executor(KvExecutor, Geometry(num_blocks=12))
    gateway = rig.add_gateway()
    with caplog.at_level("DEBUG", logger="scheduler_svc"):
        for seed in range(6):
            gateway.submit([seed] * 20, max_tokens=40)
        rig.finish()
    facts: dict[str, list[dict[str, object]]] = {"step": [], "preempted": []}
    for record in caplog.records:
        facts.get(record.message, []).append(record.kv)  # type: ignore[attr-defined]
    assert len(facts["step"]) == rig.engine.counters.plans_sent
    keys = {"step_id", "tokens", "rows", "running", "waiting", "free_blocks", "preemptions", "ms", "execute_ms"}
    assert all(keys <= set(fact) for fact in facts["step"])
    stats = rig.engine.core.stats()
    assert sum(int(str(fact["count"])) for fact in facts["preempted"]) == stats.num_preemptions_total > 0
    assert {fact["reason"] for fact in facts["preempted"]} == {"memory"}
