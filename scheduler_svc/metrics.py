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

from scheduler_svc.counters import Histogram
from scheduler_svc.engine import Engine


class EngineCollector(Collector):
    """All `pagemill_` metrics of a scheduler."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def collect(self) -> Iterable[Metric]:
        """One reading."""
        yield from self._queues()
        yield from self._steps()
        yield from self._blocks()
        yield from self._troubles()

    def _queues(self) -> Iterable[Metric]:
        stats = self._engine.core.stats()
        yield _gauge("queue_requests", "Requests waiting.", stats.queue_requests)
        yield _gauge("queue_tokens", "Tokens that waiting requests have to compute first.", stats.queue_tokens)
        yield _gauge("running_requests", "Requests running.", stats.running)
        yield _counter("requests", "Streams that ended or were refused.", ("outcome",), self._engine.counters.outcomes)
        yield _counter("generated_tokens", "Output tokens.", (), {"": stats.generated_tokens_total})
        prompt = {"computed": stats.prefill_tokens_total}
        yield _counter("prompt_tokens", "Prompt and recomputed tokens.", ("source",), prompt)
        recompute = {("recompute", "memory"): stats.num_preemptions_total}
        yield _counter("preemptions", "Running requests sent back to wait.", ("action", "reason"), recompute)

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
            ("step_tokens", "Tokens computed per step.", counters.step_tokens),
            ("step_rows", "Sequences per step.", counters.step_rows),
        ):
            family = HistogramMetricFamily(f"pagemill_{name}", text)
            _add_histogram(family, [], histogram)
            yield family
        yield _counter("plans_sent", "Step plans sent.", (), {"": counters.plans_sent})
        text = "Step plans sent while the result of an earlier one was not in."
        yield _counter("plans_sent_ahead", text, (), {"": counters.plans_sent_ahead})

    def _blocks(self) -> Iterable[Metric]:
        stats = self._engine.core.stats()
        session = self._engine.executors.session
        executors = GaugeMetricFamily("pagemill_executors", "Executors by state.", labels=["state"])
        executors.add_metric(["ready"], int(session is not None))
        yield executors
        blocks = GaugeMetricFamily("pagemill_kv_blocks", "KV blocks by state.", labels=["executor", "tier", "state"])
        name = "none" if session is None else session.name
        for state in ("free", "used", "cached", "in_flight"):
            blocks.add_metric([name, "device", state], getattr(stats, f"blocks_{state}"))
        yield blocks

    def _troubles(self) -> Iterable[Metric]:
        counters = self._engine.counters
        yield _counter("stale_messages", "Messages dropped.", ("kind",), counters.stale)
        yield _counter("gateways_dropped", "Gateways given up.", ("reason",), counters.gateways_dropped)
        yield _counter("executor_sessions", "Sessions begun with executors.", (), {"": counters.executor_sessions})
        stalls = {"": counters.executor_stalls}
        yield _counter("executor_stalls", "Frames an executor's link did not take at once.", (), stalls)
        yield _counter("plans_resent", "Step plans sent again.", (), {"": counters.plans_resent})
        yield _counter("faults", "Exceptions that were contained.", (), {"": counters.faults})
        violations = {"": counters.invariant_violations}
        yield _counter("invariant_violations", "Mismatches found in the books.", (), violations)


def _gauge(name: str, text: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"pagemill_{name}", text, value=value)


def _counter(
    name: str, text: str, labels: tuple[str, ...], values: Mapping[str, int] | Mapping[tuple[str, str], int]
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
