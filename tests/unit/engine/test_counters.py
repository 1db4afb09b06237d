from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from scheduler_svc.counters import Histogram, RateMeter
from scheduler_svc.metrics import EngineCollector
from scheduler_svc.sessions import MAX_EPOCH, EpochSource, plain
from tests.oracles.kv import KvExecutor
from tests.oracles.rig import LockstepRig

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
    gateway = rig.add_gateway()
    rig.turn(3)
    for seed in range(3):
        gateway.submit([1, 2, seed], max_tokens=5)
    gateway.submit([1], max_tokens=0)
    rig.finish()
    rig.turn(20)
    registry = CollectorRegistry()
    registry.register(EngineCollector(rig.engine))
    samples = {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(generate_latest(registry).decode())
        for sample in family.samples
    }
    assert {name for name, *_ in samples} >= PUBLIC
    assert samples["pagemill_requests_total", ("outcome", "length")] == 3
    assert samples["pagemill_requests_total", ("outcome", "internal")] == 1
    assert samples["pagemill_generated_tokens_total",] == 15
    assert samples["pagemill_prompt_tokens_total", ("source", "computed")] == 9
    assert samples["pagemill_executors", ("state", "ready")] == 1
    labels = (("executor", "oracle"), ("state", "free"), ("tier", "device"))
    assert samples["pagemill_kv_blocks", *labels] == 64
    plans = samples["pagemill_plans_sent_total",]
    assert samples["pagemill_step_seconds_count", ("phase", "execute")] == plans
    assert samples["pagemill_step_tokens_sum",] >= 9 + 3 * 4
