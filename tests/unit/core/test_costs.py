"""What is expected: the cost of making room, and how much those that run will need."""

from __future__ import annotations

import random
from bisect import bisect_right
from dataclasses import replace
from math import ceil, inf, nan

import pytest

from scheduler_svc.core.costs import OVERLAP, BlockCosts, Forecast, TailLosses, block_costs
from scheduler_svc.core.memory import KvMemory
from scheduler_svc.core.params import PreemptionMode
from scheduler_svc.core.preemption import Action, Victim, choose_action, forecast_s
from scheduler_svc.core.reserve import Crowd, OutputLengths
from tests.unit.core.kv_samples import EXECUTOR, limits

# Costs


def test_costs_come_from_the_rates_and_what_is_unknown_is_never_chosen() -> None:
    costs = block_costs(EXECUTOR)
    assert costs == BlockCosts(recompute_s=0.04, swap_out_s=OVERLAP * 0.01, swap_in_s=OVERLAP * 0.005)
    unknown = replace(EXECUTOR, prefill_tokens_per_s=0.0, swap_in_bytes_per_s=0.0)
    forecast = forecast_s(limits(unknown), Victim(5, 5, 5), 5, 0.0)
    assert forecast == {Action.SWAP: inf, Action.RECOMPUTE: inf}
    assert choose_action(PreemptionMode.AUTO, forecast) is Action.RECOMPUTE


@pytest.mark.parametrize("rate", [0.0, -1.0, inf, nan])
def test_a_rate_that_is_none_is_unknown(rate: float) -> None:
    odd = replace(EXECUTOR, prefill_tokens_per_s=rate, swap_in_bytes_per_s=rate, swap_out_bytes_per_s=rate)
    assert block_costs(odd) == BlockCosts(inf, inf, inf)
    assert KvMemory(limits(odd)).host is not None
    assert block_costs(replace(EXECUTOR, bytes_per_block=0)).swap_out_s == inf


def test_the_cheapest_way_is_chosen_per_victim() -> None:
    cheap_copies = limits()
    dear_copies = limits(replace(EXECUTOR, swap_out_bytes_per_s=1e3, swap_in_bytes_per_s=1e3))
    whole = Victim(num_blocks=10, num_freed=10, num_to_copy=10)
    assert choose_action(PreemptionMode.AUTO, forecast_s(cheap_copies, whole, 10, 0.0)) is Action.SWAP
    assert choose_action(PreemptionMode.AUTO, forecast_s(dear_copies, whole, 10, 0.0)) is Action.RECOMPUTE
    assert choose_action(PreemptionMode.AUTO, forecast_s(dear_copies, whole, 2, 0.0)) is Action.TAIL
    forecast = forecast_s(dear_copies, whole, 2, 0.0)
    assert forecast[Action.TAIL] == pytest.approx(2 * 0.04 + 0.04)
    assert choose_action(PreemptionMode.SWAP, forecast) is Action.SWAP
    there_already = replace(whole, num_to_copy=0)
    dear_out = limits(replace(EXECUTOR, swap_out_bytes_per_s=1e3))
    assert choose_action(PreemptionMode.AUTO, forecast_s(dear_out, whole, 10, 0.0)) is Action.RECOMPUTE
    assert choose_action(PreemptionMode.AUTO, forecast_s(dear_out, there_already, 10, 0.0)) is Action.SWAP
    assert choose_action(PreemptionMode.RECOMPUTE, forecast_s(cheap_copies, whole, 10, 0.0)) is Action.RECOMPUTE


def test_what_a_tail_costs_is_learned_from_those_that_came_back() -> None:
    victim = Victim(num_blocks=10, num_freed=10, num_to_copy=10)
    losses = TailLosses()
    first = forecast_s(limits(), victim, 2, losses.share)[Action.TAIL]
    for _ in range(50):
        losses.resumed(100, 10)
        losses.resumed(0, 0)
    learned = forecast_s(limits(), victim, 2, losses.share)[Action.TAIL]
    assert first - learned == pytest.approx(8 * (OVERLAP * 0.015), rel=0.01), "10 blocks, then the 2 that are needed"


def test_without_a_prefix_cache_there_is_no_tail_to_come_back_to() -> None:
    forecast = forecast_s(limits(prefix_cache=False), Victim(10, 10, 10), 2, 0.0)
    assert set(forecast) == {Action.SWAP, Action.RECOMPUTE}


def test_regret_is_what_was_paid_beyond_the_cheapest_forecast() -> None:
    costs = BlockCosts(recompute_s=0.04, swap_out_s=0.01, swap_in_s=0.005)
    forecast = Forecast(best_s=0.1, spent_s=0.02, let_go=False)
    assert forecast.regret_s(costs, 0, 10) == 0.0
    assert forecast.regret_s(costs, 5, 0) == pytest.approx(0.12)
    assert forecast.regret_s(BlockCosts(inf, 0.01, 0.005), 1, 0) == 0.0


# Reserve


def test_without_experience_outputs_are_expected_to_be_as_long_as_they_may() -> None:
    assert OutputLengths().remaining(3, 100) == 97


def test_what_remains_is_learned_from_outputs_that_got_that_far() -> None:
    lengths = OutputLengths()
    for number in range(400):
        lengths.finished(20 if number % 2 else 200, at_limit=False)
    short, long = lengths.remaining(4, 1000), lengths.remaining(60, 1000)
    assert 90 < short < 190, "half end at 20, half at 200, and a little caution"
    assert 135 < long < 240, "who has 60 is one of the long ones"
    assert lengths.remaining(60, 80) <= 20
    for _ in range(400):
        lengths.finished(64, at_limit=True)
    assert lengths.remaining(4, 1000) > 900, "now almost all use up what they may"


def test_old_experience_fades_and_weights_do_not_overflow() -> None:
    lengths = OutputLengths()
    for _ in range(300):
        lengths.finished(1000, at_limit=False)
    for _ in range(6000):
        lengths.finished(10, at_limit=False)
    assert lengths.remaining(1, 5000) < 450


@pytest.mark.parametrize(
    ("sequences", "peak"),
    [
        ([(0.0, 3)], 3),
        ([(8.0, 3)], 5),
        ([(8.0, 3), (8.0, 3)], 10),
        ([(40.0, 1), (4.0, 9)], 12),  # both grow by one, then the second goes before the first is long
        ([(40.0, 9), (4.0, 1)], 19),
    ],
)
def test_the_peak_is_at_the_worst_moment_not_the_sum(sequences: list[tuple[float, int]], peak: int) -> None:
    for index, last in enumerate(sequences):
        others = [*sequences[:index], *sequences[index + 1 :]]
        assert Crowd(others, 4).peak_with(*last) == peak, "whoever comes last"


def blocks_at(sequences: list[tuple[float, int]], block_size: int, num_positions: float) -> int:
    """What those hold who are still there when each has grown by so many positions."""
    growth = ceil(num_positions / block_size)
    return sum(num_blocks + growth for to_come, num_blocks in sequences if to_come >= num_positions)


def test_the_peak_of_a_crowd_is_that_of_following_it_to_the_end() -> None:
    rng = random.Random(5)
    for _ in range(2000):
        block_size = rng.choice([1, 4, 16])
        of_each = [(rng.randint(0, 24) / rng.choice([1, 2]), rng.randint(0, 9)) for _ in range(rng.randint(1, 7))]
        expected = max(blocks_at(of_each, block_size, num_positions) for num_positions, _ in of_each)
        assert Crowd(of_each[1:], block_size).peak_with(*of_each[0]) == expected, (of_each, block_size)


BORDERS = [1, *(half for power in range(1, 40) for half in (2**power, 3 * 2 ** (power - 1)))]
"""Lengths at which a bucket begins."""


def expected_remaining(history: list[tuple[int, bool]], num_tokens: int, limit: int) -> float:
    """What `OutputLengths.remaining` should say, worked out from all outputs at once."""
    weighed = [(1.01 ** (place - len(history) + 1), *output) for place, output in enumerate(history)]
    most = max(0, limit - num_tokens)
    at_limit = sum(weight for weight, _, ran_out in weighed if ran_out)
    ran_out = (at_limit + 8) / (sum(weight for weight, _, _ in weighed) + 8)
    bucket = bisect_right(BORDERS, num_tokens)
    above = [(w, length) for w, length, limited in weighed if not limited and bisect_right(BORDERS, length) > bucket]
    if not above:
        return most
    mean = sum(weight * length for weight, length in above) / sum(weight for weight, _ in above)
    return ran_out * most + (1 - ran_out) * min(most, max(0.0, mean - num_tokens))


def test_what_remains_is_the_weighted_mean_of_longer_outputs_over_thousands_of_them() -> None:
    rng = random.Random(5)
    lengths = OutputLengths()
    history: list[tuple[int, bool]] = []
    for number in range(3200):  # the weights have begun anew by then
        output = (rng.choice([1, 2, 3, 5, 11, 12, 16, 40, 95, 96, 300]), rng.random() < 0.3)
        history.append(output)
        lengths.finished(output[0], at_limit=output[1])
        if number % 400 == 5 or number > 3195:
            for num_tokens, limit in ((0, 50), (1, 1000), (2, 9), (11, 400), (15, 400), (40, 41), (95, 200), (60, 20)):
                found = lengths.remaining(num_tokens, limit)
                assert found == pytest.approx(expected_remaining(history, num_tokens, limit), rel=1e-9, abs=1e-9)
