"""What a start adds to the counters: where its positions come from, and what a preemption has cost in the end."""

from __future__ import annotations

from math import inf

import pytest

from scheduler_svc.core.accounting import count_start
from scheduler_svc.core.costs import Forecast, TailLosses
from scheduler_svc.core.params import SeqId, SequenceSpec
from scheduler_svc.core.running import Need
from scheduler_svc.core.sequence import Sequence
from scheduler_svc.core.stats import Counters
from tests.unit.core.kv_samples import limits

RECOMPUTE_S, SWAP_IN_S = limits().costs.recompute_s, limits().costs.swap_in_s


def waiting(num_lost: int | None = None, forecast: Forecast | None = None, **fields: object) -> Sequence:
    """A sequence of 12 prompt tokens and 4 of output; with `num_lost` one that has run before."""
    spec = SequenceSpec(SeqId(1), list(range(12)), 20, emitted_ids=[7] * 4, **fields)  # type: ignore[arg-type]
    seq = Sequence(spec, priority=0)
    seq.forecast = forecast
    if num_lost is not None:
        seq.first_run, seq.num_lost = 0.0, num_lost
    return seq


def counted(seq: Sequence, num_cached: int, num_host: int = 0) -> tuple[Counters, float]:
    """The counters, and what share of a tail is expected to be lost from then on."""
    counters, losses = Counters(), TailLosses()
    need = Need(
        num_blocks=5,
        num_taken=5,
        num_reserved=0,
        num_cached=num_cached,
        device_ids=[],
        host_ids=list(range(num_host)),
        should_wait=False,
    )
    count_start(counters, losses, seq, need, limits())
    return counters, losses.share


@pytest.mark.parametrize(("num_host", "num_swapped"), [(0, 0), (1, 4), (4, 15)])
def test_positions_come_from_the_device_or_from_the_host(num_host: int, num_swapped: int) -> None:
    counters, _ = counted(waiting(), 15, num_host)
    assert (counters.cached_tokens, counters.swapped_tokens) == (15 - num_swapped, num_swapped)
    assert (counters.prefix_query_tokens, counters.prefix_hit_tokens) == (16, 15)
    assert counters.recomputed_tokens == 0


def test_the_bill_has_no_more_cached_tokens_than_the_prompt() -> None:
    for num_cached, num_billed in ((8, 8), (15, 12)):
        seq = waiting()
        counted(seq, num_cached)
        assert seq.num_cached_prompt == num_billed


def test_who_does_not_read_the_cache_has_not_asked_it() -> None:
    counters, _ = counted(waiting(reads_prefix_cache=False), 0)
    assert (counters.prefix_query_tokens, counters.prefix_hit_tokens) == (0, 0)


def test_a_resumed_sequence_asks_nothing_and_computes_what_is_not_there_again() -> None:
    counters, _ = counted(waiting(num_lost=15), 8)
    assert (counters.prefix_query_tokens, counters.prefix_hit_tokens) == (0, 0)
    assert (counters.cached_tokens, counters.recomputed_tokens) == (8, 7)
    assert counted(waiting(num_lost=6), 8)[0].recomputed_tokens == 0, "others have computed more of it meanwhile"


def test_what_a_tail_lost_is_learned_from_those_who_let_go_of_one() -> None:
    forecast = Forecast(best_s=1.0, spent_s=0.0, let_go=True)
    assert counted(waiting(15, forecast), 12, num_host=1)[1] == pytest.approx(1 - 0.1 * (1 - 7 / 15))
    assert counted(waiting(6, forecast), 8, num_host=2)[1] == 1.0, "8 came from the host, but it had only 6"
    kept = Forecast(best_s=1.0, spent_s=0.0, let_go=False)
    assert counted(waiting(15, kept), 12, num_host=1)[1] == 1.0
    assert counted(waiting(15), 12, num_host=1)[1] == 1.0


def test_regret_and_forecast_are_counted_once() -> None:
    seq = waiting(14, Forecast(best_s=0.01, spent_s=0.0, let_go=True))
    counters, _ = counted(seq, 8, num_host=1)
    assert counters.regret_s == pytest.approx(6 / 4 * RECOMPUTE_S + SWAP_IN_S - 0.01)
    assert counters.forecast_s == 0.01
    assert counted(seq, 8, num_host=1)[0] == Counters(cached_tokens=4, swapped_tokens=4, recomputed_tokens=6)


def test_a_preemption_without_a_rate_to_judge_by_is_not_summed_up() -> None:
    counters, _ = counted(waiting(14, Forecast(best_s=inf, spent_s=0.0, let_go=True)), 8)
    assert (counters.forecast_s, counters.regret_s) == (0.0, 0.0)
