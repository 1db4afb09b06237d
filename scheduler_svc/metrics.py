"""Publishes the engine's numbers to Prometheus. Read when scraped, so the loop pays nothing for it.

A scrape runs in the exporter's thread and reads plain ints while the loop changes them: a scrape may see two gauges of
neighbouring rounds, never a torn value.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.gc_collector import GCCollector
from prometheus_client.platform_collector import PlatformCollector
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

from cache_svc.blocks.histogram import Histogram
from scheduler_svc import admin
from scheduler_svc.core.preemption import Action, Reason
from scheduler_svc.engine import Engine


class EngineCollector(Collector):
    """All `pagemill_` metrics of a scheduler."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def collect(self) -> Iterable[Metric]:
        """One reading."""
        yield from self._queues()
        yield from self._steps()
        yield from self._executors()
        yield from self._memory()
        yield from self._cache()
        yield from self._residency()
        yield from self._troubles()

    def _queues(self) -> Iterable[Metric]:
        stats = self._engine.core.stats()
        yield _gauge("queue_requests", "Requests waiting.", stats.queue_requests)
        yield _gauge("queue_tokens", "Tokens that waiting requests have to compute first.", stats.queue_tokens)
        yield _gauge("running_requests", "Requests running.", stats.running)
        yield _counter("requests", "Streams that ended or were refused.", ("outcome",), self._engine.counters.outcomes)
        yield _counter("generated_tokens", "Output tokens.", (), {"": stats.generated_tokens_total})
        yield _gauge("swapped_requests", "Waiting requests whose KV is in host memory.", stats.swapped)
        prompt = {
            "computed": stats.prefill_tokens_total,
            "cached": stats.cached_tokens_total,
            "swapped": stats.swapped_tokens_total,
        }
        yield _counter("prompt_tokens", "Positions filled when requests start or resume.", ("source",), prompt)
        recomputed = {"": stats.recomputed_tokens_total}
        yield _counter("recomputed_tokens", "Of those, computed again after a preemption or a loss.", (), recomputed)
        preemptions = {(action.value, reason.value): 0 for action in Action for reason in Reason}
        for (action, reason), count in stats.preemptions_total.items():
            preemptions[action.value, reason.value] = count
        yield _counter("preemptions", "Running requests sent back to wait.", ("action", "reason"), preemptions)
        forecast, regret = stats.preemption_forecast_s_total, stats.preemption_regret_s_total
        yield _counter("preemption_forecast_seconds", "What preemptions were expected to cost.", (), {"": forecast})
        yield _counter("preemption_regret_seconds", "What they cost beyond that.", (), {"": regret})

    def _steps(self) -> Iterable[Metric]:
        counters = self._engine.counters
        phases = {
            "schedule": counters.schedule_seconds,
            "wire": counters.wire_seconds,
            "execute": counters.execute_seconds,
        }
        seconds = HistogramMetricFamily("pagemill_step_seconds", "Time of one step by phase.", labels=["phase"])
        for phase, histogram in phases.items():
            _add_histogram(seconds, [phase], histogram)
        yield seconds
        for name, text, histogram in (
            ("swap_seconds", "Time in copies between device and host, of steps that had any.", counters.swap_seconds),
            ("step_tokens", "Tokens computed per step.", counters.step_tokens),
            ("step_rows", "Sequences per step.", counters.step_rows),
        ):
            family = HistogramMetricFamily(f"pagemill_{name}", text)
            _add_histogram(family, [], histogram)
            yield family
        yield _counter("plans_sent", "Step plans sent.", (), {"": counters.plans_sent})
        text = "Step plans sent while the result of an earlier one was not in."
        yield _counter("plans_sent_ahead", text, (), {"": counters.plans_sent_ahead})

    def _executors(self) -> Iterable[Metric]:
        executors = GaugeMetricFamily("pagemill_executors", "Executors by state.", labels=["state"])
        executors.add_metric(["ready"], int(self._engine.executors.session is not None))
        yield executors
        session = self._engine.executors.session
        limits = None if session is None else session.limits
        prefill = 0.0 if limits is None else limits.prefill_tokens_per_s
        yield _gauge("prefill_tokens_per_second", "Rate by which computing blocks again is weighed.", prefill)
        copies = GaugeMetricFamily(
            "pagemill_copy_bytes_per_second", "Rates by which copies of blocks are weighed.", labels=["direction"]
        )
        copies.add_metric(["out"], 0.0 if limits is None else limits.swap_out_bytes_per_s)
        copies.add_metric(["in"], 0.0 if limits is None else limits.swap_in_bytes_per_s)
        yield copies
        startup = GaugeMetricFamily("pagemill_startup_seconds", "Duration of start by phase.", labels=["phase"])
        for phase, seconds in self._engine.counters.startup_seconds.items():
            startup.add_metric([phase], seconds)
        yield startup

    def _memory(self) -> Iterable[Metric]:
        stats = self._engine.core.stats()
        session = self._engine.executors.session
        blocks = GaugeMetricFamily("pagemill_kv_blocks", "KV blocks by state.", labels=["executor", "tier", "state"])
        name = "none" if session is None else session.name
        for tier in admin.tiers(stats):
            for state in ("free", "used", "cached", "in_flight", "reserved"):
                blocks.add_metric([name, tier.tier, state], getattr(tier, state))
        yield blocks

    def _cache(self) -> Iterable[Metric]:
        stats = self._engine.core.stats()
        evictions = {"device": stats.evictions_total, "host": stats.host_evictions_total}
        yield _counter("kv_evictions", "Cached KV blocks given up for other content.", ("tier",), evictions)
        beyond = {"device": stats.share_evictions_total, "host": stats.host_share_evictions_total}
        text = "Those given up before their time, because their cache salt had more than its share."
        yield _counter("kv_share_evictions", text, ("tier",), beyond)
        hits, queries = {"": stats.prefix_hit_tokens_total}, {"": stats.prefix_query_tokens_total}
        yield _counter("prefix_cache_hits", "Prompt tokens found in the prefix cache.", (), hits)
        yield _counter("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", (), queries)
        copied = self._engine.counters.swapped_bytes
        yield _counter("swap_bytes", "Bytes copied between device and host.", ("direction",), copied)

    def _residency(self) -> Iterable[Metric]:
        residency = self._engine.core.residency
        family = HistogramMetricFamily(
            "pagemill_kv_residency_seconds",
            "Of a sample of cached KV blocks: time until eviction (lifetime), unused time before it (idle), and "
            "from one use to the next (reuse_gap).",
            labels=["kind"],
        )
        for kind in ("lifetime", "idle", "reuse_gap"):
            _add_histogram(family, [kind], getattr(residency, kind))
        yield family

    def _troubles(self) -> Iterable[Metric]:
        counters = self._engine.counters
        stale = dict(counters.stale) | {"transport": self._engine.num_dropped_frames}
        yield _counter("stale_messages", "Messages dropped.", ("kind",), stale)
        yield _counter("gateways_dropped", "Gateways given up.", ("reason",), counters.gateways_dropped)
        yield _counter("executor_sessions", "Sessions begun with executors.", (), {"": counters.executor_sessions})
        stalls = {"": counters.executor_stalls}
        yield _counter("executor_stalls", "Frames an executor's link did not take at once.", (), stalls)
        yield _counter("plans_resent", "Step plans sent again.", (), {"": counters.plans_resent})
        yield _counter("faults", "Exceptions that were contained.", (), {"": counters.faults})
        violations = counters.violations
        yield _counter("invariant_violations", "Mismatches found in the books.", ("kind",), violations)


def _gauge(name: str, text: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"pagemill_{name}", text, value=value)


def _counter(
    name: str, text: str, labels: tuple[str, ...], values: Mapping[str, float] | Mapping[tuple[str, str], float]
) -> CounterMetricFamily:
    """A counter; the keys of `values` are label values, "" when there are no labels."""
    family = CounterMetricFamily(f"pagemill_{name}", text, labels=labels)
    for key, value in dict(values).items():
        family.add_metric([] if not labels else [key] if isinstance(key, str) else list(key), value)
    return family


def _add_histogram(family: HistogramMetricFamily, labels: list[str], histogram: Histogram) -> None:
    total, buckets = 0, []
    for bound, count in zip((*map(str, histogram.bounds), "+Inf"), list(histogram.buckets), strict=True):
        total += count
        buckets.append((bound, total))
    family.add_metric(labels, buckets, histogram.sum)


def serve(engine: Engine, host: str, port: int) -> int:
    """Start the exporter's thread; returns the port. OSError when it cannot be bound."""
    registry = CollectorRegistry()
    registry.register(EngineCollector(engine))
    ProcessCollector(registry=registry)
    PlatformCollector(registry=registry)
    GCCollector(registry=registry)
    server, _ = start_http_server(port, addr=host, registry=registry)
    return int(server.server_port)
