"""Which refusals are worth another attempt, how many, and what all calls of a client may spend on them."""

from __future__ import annotations

import pytest

from pagemill_client.errors import OverloadedError, PagemillError
from pagemill_client.retries import MAX_ATTEMPTS, Attempts, RetryBudget


def full(retry_after_s: float | None = 1.0, reason: str = "QUEUE_FULL", no_retry: bool = False) -> PagemillError:
    return OverloadedError("full", reason=reason, retry_after_s=retry_after_s, no_retry=no_retry)


class Clock:
    def __init__(self) -> None:
        self.now = 50.0

    def __call__(self) -> float:
        return self.now


def test_a_refusal_that_passes_is_waited_for_as_told() -> None:
    attempts = Attempts(RetryBudget(), 60)
    delay = attempts.delay_s(full(2.0))
    assert delay is not None
    assert 2.0 <= delay <= 2.4


def test_the_third_attempt_is_the_last() -> None:
    attempts = Attempts(RetryBudget(), 60)
    assert [attempts.delay_s(full()) is not None for _ in range(MAX_ATTEMPTS)] == [True, True, False]


@pytest.mark.parametrize(
    "error",
    [
        full(None),
        full(no_retry=True),
        full(reason="QUEUE_TIMEOUT"),
        full(reason=""),
        full(reason="POISON_REQUEST"),
        full(reason="NOT_READY"),
    ],
)
def test_nothing_else_is_retried(error: PagemillError) -> None:
    assert Attempts(RetryBudget(), 60).delay_s(error) is None


def test_a_wait_beyond_the_deadline_is_not_begun() -> None:
    clock = Clock()
    attempts = Attempts(RetryBudget(), 10, clock)
    clock.now += 8
    assert attempts.remaining_s() == 2.0
    assert attempts.delay_s(full(2.0)) is None
    assert attempts.delay_s(full(1.0)) is not None
    clock.now += 8
    assert attempts.remaining_s() == 0.001


def test_failures_of_all_calls_use_up_one_budget_and_successes_earn_it_back() -> None:
    budget = RetryBudget()
    granted = [Attempts(budget, 60).delay_s(full()) is not None for _ in range(6)]
    assert granted == [True, True, True, True, False, False]
    for _ in range(19):
        Attempts(budget, 60).succeeded()
    assert Attempts(budget, 60).delay_s(full()) is None  # 4 left, 1.9 earned, 1 spent
    for _ in range(12):
        Attempts(budget, 60).succeeded()
    assert Attempts(budget, 60).delay_s(full()) is not None


def test_a_budget_never_holds_more_than_it_began_with() -> None:
    budget = RetryBudget()
    for _ in range(1000):
        budget.succeeded()
    assert [budget.failed() for _ in range(6)] == [True, True, True, True, False, False]
