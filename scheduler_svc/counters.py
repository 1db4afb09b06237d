"""Numbers the loop keeps about itself: plain ints, so that counting costs nanoseconds. `metrics` publishes them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from cache_svc.blocks.histogram import Histogram

_SECONDS = (
    1e-5,
    2.5e-5,
    5e-5,
    1e-4,
    2.5e-4,
    5e-4,
    1e-3,
    2.5e-3,
    5e-3,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    10.0,
)
_COUNTS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0, 16384.0)

# A label value that has not occurred yet is published as 0, so that rates and alerts exist before the first case.
_STALE = ("malformed", "protocol", "stale_epoch", "duplicate", "no_session", "duplicate_result", "result_gap")
_VIOLATIONS = ("books", "state_digest", "streams")
_OUTCOMES = (
    "stop",
    "length",
    "cancelled",
    "queue_timeout",
    "deadline",
    "numerical",
    "internal",
    "poison",
    "queue_full",
)


def _zeros(kinds: tuple[str, ...]) -> Counter[str]:
    return Counter(dict.fromkeys(kinds, 0))


def _seconds() -> Histogram:
    return Histogram(_SECONDS)


def _counts() -> Histogram:
    return Histogram(_COUNTS)


@dataclass(slots=True)
class EngineCounters:
    """Since the start of the process."""

    schedule_seconds: Histogram = field(default_factory=_seconds)
    """Time in `schedule` and encoding, per plan."""
    wire_seconds: Histogram = field(default_factory=_seconds)
    """From a plan's leaving to its result's arrival, less what the executor spent on it."""
    execute_seconds: Histogram = field(default_factory=_seconds)
    """As the executor reports it."""
    swap_seconds: Histogram = field(default_factory=_seconds)
    """Time in copies between device and host, of steps that had any; as the executor reports it."""
    swapped_bytes: Counter[str] = field(default_factory=lambda: _zeros(("out", "in")))
    """Copied between device and host, by direction; counted when the executor reports the copy."""
    step_tokens: Histogram = field(default_factory=_counts)
    step_rows: Histogram = field(default_factory=_counts)
    plans_sent: int = 0
    plans_sent_ahead: int = 0
    """Plans that left while the result of an earlier one was not in: pipelining at work."""
    plans_resent: int = 0
    executor_stalls: int = 0
    """Plans that the executor's link did not take at once."""
    executor_sessions: int = 0
    stale: Counter[str] = field(default_factory=lambda: _zeros(_STALE))
    """Messages dropped, by kind."""
    outcomes: Counter[str] = field(default_factory=lambda: _zeros(_OUTCOMES))
    """Streams that ended or were refused, by outcome."""
    gateways_dropped: Counter[str] = field(default_factory=Counter)
    """Gateways given up, by reason."""
    faults: int = 0
    """Exceptions that were contained."""
    violations: Counter[str] = field(default_factory=lambda: _zeros(_VIOLATIONS))
    """Mismatches found in the books, by kind."""
    startup_seconds: dict[str, float] = field(default_factory=dict)
    """Duration of the start of the process, by phase."""

    @property
    def invariant_violations(self) -> int:
        """Mismatches of all kinds."""
        return self.violations.total()


class RateMeter:
    """Tokens per second while steps run, over about the last `horizon_s` seconds of running."""

    def __init__(self, horizon_s: float = 5.0) -> None:
        self._horizon_s = horizon_s
        self._tokens = 0.0
        self._seconds = 0.0

    def add(self, num_tokens: int, seconds: float) -> None:
        """One step took `seconds`, from its start or the end of the step before it, whichever was later."""
        keep = max(0.0, 1.0 - seconds / self._horizon_s)
        self._tokens = self._tokens * keep + num_tokens
        self._seconds = self._seconds * keep + seconds

    def tokens_per_s(self) -> float | None:
        """None until something was measured."""
        return self._tokens / self._seconds if self._seconds > 0 else None
