"""How many examples Hypothesis tries, and which.

By default each run of the suite tries the same ones, so that a failure is that of the change under test and comes
again. `PAGEMILL_RANDOM_EXAMPLES=20` is for campaigns: every Hypothesis test draws anew in each run, and the state
machines try 20 times as many examples, in as many times the time.
"""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.internal.conjecture import engine

FACTOR = int(os.environ.get("PAGEMILL_RANDOM_EXAMPLES", "0"))
"""How many times as many examples, drawn at random; 0: the same ones in each run."""

MAX_SHRINKING_S = 20
"""Longest time that a failing example is made smaller, before the smallest so far is printed.

Hypothesis has no option for it, and its own five minutes are more than a test has.
"""

TIME_LIMIT_S = 120.0
"""For as many examples as one run of the suite tries."""


def configure() -> None:
    """To be called before any test with Hypothesis is collected."""
    assert engine.MAX_SHRINKING_SECONDS >= MAX_SHRINKING_S
    engine.MAX_SHRINKING_SECONDS = MAX_SHRINKING_S
    settings.register_profile("pagemill", derandomize=FACTOR == 0, print_blob=True)
    settings.load_profile("pagemill")


def machine_settings(max_examples: int, num_steps: int) -> settings:
    """Of a state machine. The first failure is enough: looking for more takes the time in which to shrink it."""
    return settings(
        max_examples=max_examples * max(1, FACTOR),
        stateful_step_count=num_steps,
        deadline=None,
        report_multiple_bugs=False,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )


machine_time_limit = pytest.mark.timeout(TIME_LIMIT_S * max(1, FACTOR))
