"""The line that says that KV memory is too small, and when it is not said."""

from __future__ import annotations

from dataclasses import replace

import pytest

from scheduler_svc.core.params import SchedulerConfig
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.stats import SchedulerStats
from scheduler_svc.pressure import MIN_PREEMPTIONS, SILENCE_S, WINDOW_S, Finding, MemoryPressure

IDLE = Scheduler(SchedulerConfig()).stats()


def later(stats: SchedulerStats, **more: int) -> SchedulerStats:
    return replace(stats, **{name: getattr(stats, name) + count for name, count in more.items()})


def look(pressure: MemoryPressure, stats: SchedulerStats, now: float) -> Finding | None:
    return pressure.look(lambda: stats, now)


def test_repeated_work_beyond_a_tenth_is_a_finding_with_advice() -> None:
    pressure = MemoryPressure()
    assert look(pressure, IDLE, 100.0) is None
    busy = later(
        IDLE,
        num_preemptions_total=5,
        prefill_tokens_total=800,
        generated_tokens_total=200,
        recomputed_tokens_total=60,
        swapped_tokens_total=50,
    )
    assert look(pressure, busy, 100.0 + WINDOW_S / 2) is None, "the window has not ended"
    finding = look(pressure, busy, 100.0 + WINDOW_S)
    assert finding is not None
    assert (finding.preemptions, finding.recomputed_tokens, finding.swapped_tokens, finding.share) == (5, 60, 50, 0.11)
    assert "--kv-memory-bytes" in finding.advice
    assert "--host-kv-memory-bytes" in finding.advice, "there is no host tier"


@pytest.mark.parametrize(
    "more",
    [
        {"num_preemptions_total": MIN_PREEMPTIONS - 1, "recomputed_tokens_total": 500},
        {"num_preemptions_total": 50, "recomputed_tokens_total": 50},
        {"recomputed_tokens_total": 500},
    ],
)
def test_little_of_it_is_none(more: dict[str, int]) -> None:
    pressure = MemoryPressure()
    look(pressure, IDLE, 0.0)
    assert look(pressure, later(IDLE, generated_tokens_total=1000, **more), WINDOW_S) is None


def test_one_line_a_minute_and_each_window_for_itself() -> None:
    pressure = MemoryPressure()
    stats, found = IDLE, []
    for window in range(20):
        found.append(look(pressure, stats, window * WINDOW_S) is not None)
        stats = later(stats, num_preemptions_total=9, generated_tokens_total=100, recomputed_tokens_total=50)
    assert found.index(True) == 1
    every = round(SILENCE_S / WINDOW_S)
    assert [number for number, is_found in enumerate(found) if is_found] == [1, 1 + every, 1 + 2 * every, 1 + 3 * every]


def test_what_was_long_ago_does_not_count() -> None:
    pressure = MemoryPressure()
    bad = later(IDLE, num_preemptions_total=99, generated_tokens_total=100, recomputed_tokens_total=90)
    look(pressure, bad, 0.0)
    assert look(pressure, later(bad, generated_tokens_total=100), WINDOW_S) is None
