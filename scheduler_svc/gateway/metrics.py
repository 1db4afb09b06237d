"""The gateway's Prometheus metrics; names are public (docs) and kept."""

from __future__ import annotations

from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

_FINE = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.25, 0.5, 1, 2.5, 5)
_COARSE = (0.01, 0.025, 0.05, 0.1, 0.2, 0.4, 0.8, 1.5, 3, 6, 12, 30, 60, 120, 300, 600)


class GatewayMetrics:
    """One set of metrics in a registry of its own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        options: Any = {"namespace": "pagemill", "registry": self.registry}
        self.requests = Counter(
            "requests_total",
            "Generate calls that ended, by outcome: stop, length, cancelled, or the error's reason",
            ["outcome"],
            **options,
        )
        self.ttft = Histogram(
            "time_to_first_token_seconds",
            "From a call's arrival to its first output on the stream",
            buckets=_COARSE,
            **options,
        )
        self.inter_token = Histogram(
            "inter_token_seconds", "Between output tokens of one stream, behind the first", buckets=_FINE, **options
        )
        self.e2e = Histogram(
            "e2e_seconds", "From a call's arrival to its last message, if it ended well", buckets=_COARSE, **options
        )
        self.prompt_tokens = Counter(
            "prompt_tokens_total",
            "Prompt tokens of calls that ended well, by where their KV came from",
            ["source"],
            **options,
        )
        self.generated_tokens = Counter("generated_tokens_total", "Tokens accepted from the scheduler", **options)
        self.live_requests = Gauge("gateway_live_requests", "Generate calls in this gateway", **options)
        self.ready = Gauge("gateway_ready", "1 while new work can run", **options)
        self.stale = Counter("stale_messages_total", "Messages dropped, by kind", ["kind"], **options)
        self.sessions = Counter("gateway_sessions_total", "Sessions opened with a scheduler", **options)

    def ended(self, outcome: str) -> None:
        """Count one call."""
        self.requests.labels(outcome.lower()).inc()
