"""Metrics of an executor, in a registry of their own (docs: names are public and kept)."""

from __future__ import annotations

from collections import Counter as CounterDict
from collections.abc import Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, start_http_server

from executor_svc.kv.copy_engine import CopyReport
from executor_svc.plans import StepOutcome
from pagemill.engine.v1 import executor_pb2 as pb
from pagemill.framing import Drop

_SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 120.0)
_POWERS = tuple(float(1 << i) for i in range(15))


class ExecutorMetrics:
    """Counts what the worker tells it; `serve` shows it."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        registry = self.registry
        self._step_seconds = Histogram(
            "pagemill_step_seconds", "Duration of one step", ["phase"], buckets=_SECONDS, registry=registry
        )
        self._execute = self._step_seconds.labels(phase="execute")
        self._wait = self._step_seconds.labels(phase="wait")
        self._rows = Histogram("pagemill_step_rows", "Rows of one step", buckets=_POWERS, registry=registry)
        self._tokens = Histogram("pagemill_step_tokens", "Tokens of one step", buckets=_POWERS, registry=registry)
        self._row_errors = Counter("pagemill_row_errors_total", "Failed rows", ["code"], registry=registry)
        self._failed = Counter("pagemill_failed_steps_total", "Steps answered with FAILED", registry=registry)
        self._stale = Counter(
            "pagemill_stale_messages_total",
            "Messages dropped as stale, doubled or malformed",
            ["kind"],
            registry=registry,
        )
        self._startup = Gauge("pagemill_startup_seconds", "Duration of start", ["phase"], registry=registry)
        self._mapped = Gauge("pagemill_mapped_blocks", "Device blocks in the tables of lanes", registry=registry)
        self._blocks = Gauge("pagemill_device_blocks", "Device blocks of the pool", registry=registry)
        self._host_blocks = Gauge("pagemill_host_blocks", "Blocks of the host tier", registry=registry)
        self._copy_wait = self._step_seconds.labels(phase="copy_wait")
        self._copied_bytes = Counter(
            "pagemill_swap_bytes_total",
            "Bytes copied between and within tiers",
            ["direction"],
            registry=registry,
        )
        self._copy_seconds = Histogram(
            "pagemill_swap_seconds",
            "Duration of one step's copies in one direction",
            ["direction"],
            buckets=_SECONDS,
            registry=registry,
        )
        self._mismatches = Counter(
            "pagemill_copy_mismatches_total", "Copied blocks with another checksum than before", registry=registry
        )
        self._sessions = Counter("pagemill_sessions_total", "Sessions begun with a scheduler", registry=registry)
        self._seen: CounterDict[str] = CounterDict()

    def serve(self, host: str, port: int) -> int:
        """Serve the page from a thread of its own; returns the port. Raises OSError if it cannot be bound."""
        server, _ = start_http_server(port, addr=host, registry=self.registry)
        return int(server.server_port)

    def step(self, outcome: StepOutcome, *, num_rows: int, num_tokens: int) -> None:
        """One step ran."""
        self._execute.observe(outcome.execute_us / 1e6)
        self._wait.observe(outcome.wait_us / 1e6)
        self._rows.observe(num_rows)
        self._tokens.observe(num_tokens)
        self._mapped.set(outcome.num_mapped_blocks)
        if outcome.failed:
            self._failed.inc()
        if outcome.copy_wait_us:
            self._copy_wait.observe(outcome.copy_wait_us / 1e6)
        if outcome.copies is not None:
            self._copies(outcome.copies)
        for code in outcome.row_errors.values():
            self._row_errors.labels(code=pb.RowErrorCode.Name(code).removeprefix("ROW_ERROR_CODE_").lower()).inc()

    def _copies(self, report: CopyReport) -> None:
        for copy in report.done:
            self._copied_bytes.labels(direction=copy.kind.value).inc(copy.num_bytes)
            self._copy_seconds.labels(direction=copy.kind.value).observe(copy.seconds)
        self._mismatches.inc(report.num_mismatches)

    def stale(self, kind: str) -> None:
        """One message was dropped."""
        self._stale.labels(kind=kind).inc()

    def dropped(self, totals: Mapping[Drop, int]) -> None:
        """Running totals of a channel's drops, by reason."""
        for reason, total in totals.items():
            kind = str(reason.value)
            if total > self._seen[kind]:
                self._stale.labels(kind=kind).inc(total - self._seen[kind])
                self._seen[kind] = total

    def session(self) -> None:
        """A scheduler took this executor."""
        self._sessions.inc()

    def started(self, phases: Mapping[str, float], num_blocks: int, num_host_blocks: int) -> None:
        """The executor is ready; seconds per phase of its start."""
        for phase, seconds in phases.items():
            self._startup.labels(phase=phase).set(seconds)
        self._blocks.set(num_blocks)
        self._host_blocks.set(num_host_blocks)
