from __future__ import annotations

import pytest

from cache_svc.blocks.histogram import Histogram
from cache_svc.blocks.residency import BOUNDS_S, ResidencySampler


def filled(histogram: Histogram) -> dict[float, int]:
    """Upper bound of each bucket that holds something, and how much."""
    return {
        bound: count for bound, count in zip((*BOUNDS_S, float("inf")), histogram.buckets, strict=True) if count > 0
    }


def test_a_stay_is_measured_from_publication_over_its_uses_to_eviction() -> None:
    sampler = ResidencySampler(1)
    sampler.published(7, 100.0)
    sampler.hit(7, 102.0)
    sampler.hit(7, 122.0)
    assert (sampler.num_followed, sampler.lifetime.count) == (1, 0)
    sampler.evicted(7, 222.0)
    assert filled(sampler.reuse_gap) == {3.0: 1, 30.0: 1}
    assert filled(sampler.idle) == {100.0: 1}, "a bound belongs to its bucket"
    assert filled(sampler.lifetime) == {300.0: 1}
    assert (sampler.reuse_gap.sum, sampler.idle.sum, sampler.lifetime.sum) == (22.0, 100.0, 122.0)
    assert sampler.num_followed == 0


def test_what_is_longer_than_the_last_bound_is_counted_too() -> None:
    sampler = ResidencySampler(1)
    sampler.published(0, 0.0)
    sampler.evicted(0, 1e9)
    assert filled(sampler.lifetime) == filled(sampler.idle) == {float("inf"): 1}


def test_only_blocks_that_are_followed_count() -> None:
    sampler = ResidencySampler(1)
    sampler.hit(3, 1.0)
    sampler.evicted(3, 2.0)
    sampler.published(3, 3.0)
    sampler.evicted(3, 4.0)
    sampler.hit(3, 5.0)
    sampler.evicted(3, 6.0)
    assert (sampler.lifetime.count, sampler.idle.count, sampler.reuse_gap.count) == (1, 1, 0)


def test_a_stay_whose_end_was_not_told_ends_with_the_next_one() -> None:
    sampler = ResidencySampler(1)
    sampler.published(3, 0.0)
    sampler.hit(3, 1.0)
    sampler.published(3, 10.0)
    sampler.evicted(3, 12.0)
    assert (sampler.lifetime.sum, sampler.idle.sum, sampler.lifetime.count) == (2.0, 2.0, 1)
    sampler = ResidencySampler(2)
    while not sampler.num_followed:
        sampler.published(3, 0.0)
    while sampler.num_followed:
        sampler.published(3, 5.0)
    sampler.evicted(3, 6.0)
    assert sampler.lifetime.count == 0, "the stay that is not followed is not measured by the one before"


@pytest.mark.parametrize("every", [1, 2, 3, 7, 16, 1000])
def test_one_stay_in_so_many_is_followed_and_the_same_ones_each_time(every: int) -> None:
    def followed() -> list[int]:
        sampler = ResidencySampler(every)
        return [number for number in range(20_000) if _is_followed(sampler, number)]

    assert followed() == followed()
    assert abs(len(followed()) - 20_000 / every) <= 3


@pytest.mark.parametrize("period", [2, 4, 8, 64, 100])
def test_no_place_in_a_prompt_is_followed_always_or_never(period: int) -> None:
    sampler = ResidencySampler(period)
    places = {number % period for number in range(period * 400) if _is_followed(sampler, number)}
    assert places == set(range(period))


def test_a_flush_forgets_what_is_followed_and_keeps_what_was_measured() -> None:
    sampler = ResidencySampler(1)
    for block_id in range(3):
        sampler.published(block_id, 0.0)
    sampler.evicted(0, 1.0)
    assert sampler.flush_samples() == 2
    assert sampler.flush_samples() == 0
    sampler.hit(1, 2.0)
    sampler.evicted(1, 2.0)
    assert (sampler.lifetime.count, sampler.reuse_gap.count) == (1, 0)


def test_one_in_none_is_refused() -> None:
    with pytest.raises(ValueError, match="every"):
        ResidencySampler(0)


def _is_followed(sampler: ResidencySampler, block_id: int) -> bool:
    before = sampler.num_followed
    sampler.published(block_id, 0.0)
    return sampler.num_followed > before
