from __future__ import annotations

import pytest

from scheduler_svc.audit import Audit
from scheduler_svc.core.params import SchedulerConfig
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.counters import EngineCounters


class SlowBooks(Scheduler):
    """A check takes `cost_s` of its own clock."""

    def __init__(self, cost_s: float) -> None:
        super().__init__(SchedulerConfig())
        self.cost_s, self.now, self.num_checks = cost_s, 0.0, 0

    def check_invariants(self) -> list[str]:
        self.now += self.cost_s
        self.num_checks += 1
        return []


@pytest.mark.parametrize(("cost_s", "fresh_s"), [(0.001, 0.1), (0.5, 5.0), (3.0, 30.0)])
def test_answer_is_fresh_from_the_end_of_the_check_and_for_ten_times_what_it_took(
    cost_s: float, fresh_s: float
) -> None:
    books = SlowBooks(cost_s)
    audit = Audit(EngineCounters(), 100, clock=lambda: books.now)
    audit.check_unless_fresh(books, books.now)
    done_at = books.now
    assert done_at == cost_s
    audit.check_unless_fresh(books, done_at + 0.99 * fresh_s)
    assert books.num_checks == 1
    audit.check_unless_fresh(books, done_at + 1.01 * fresh_s)
    assert books.num_checks == 2


def test_flood_of_questions_takes_a_tenth_of_the_time_at_most() -> None:
    books = SlowBooks(0.4)
    audit = Audit(EngineCounters(), 100, clock=lambda: books.now)
    while books.now < 100:
        audit.check_unless_fresh(books, books.now)
        books.now += 0.01
    assert books.num_checks * books.cost_s <= 10
