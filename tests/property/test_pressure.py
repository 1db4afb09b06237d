"""Many sequences on few blocks, to the end, over many seeds: preemption never changes output and nobody starves."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from scheduler_svc.core.params import ExecutorLimits, HostCache, PreemptionMode, QueuePolicy, SchedulerConfig
from scheduler_svc.core.preemption import MAX_PREEMPTIONS, Action
from tests.property.driver import Driver, prompt_of


def random_driver(rng: random.Random, *, burst: int = 1, depth: int | None = None) -> Driver:
    depth = depth or rng.randint(1, 4)
    driver = Driver(
        SchedulerConfig(
            max_num_batched_tokens=rng.choice([4, 8, 32]),
            max_num_seqs=rng.choice([2, 4, 8]),
            max_prefill_chunk=rng.choice([2, 5, 16]),
            queue_policy=rng.choice(list(QueuePolicy)),
            max_skip_ahead=rng.choice([0, 2]),
            pipeline_depth=depth,
            preemption_mode=rng.choice(list(PreemptionMode)),
            prefix_cache=rng.random() < 0.7,
            host_cache=rng.choice(list(HostCache)),
            growth_reserve=rng.choice([0.0, 1.0]),
        ),
        burst=burst,
        copy_lag=rng.choice([0, 0, 1, 3]),
    )
    driver.attach(
        ExecutorLimits(
            block_size=rng.choice([1, 2, 4]),
            num_device_blocks=rng.choice([4, 6, 12]),
            max_rows=8,
            max_tokens=16,
            num_lanes=8 * (depth + 1),
            max_model_len=40,
            num_host_blocks=rng.choice([0, 2, 8, 40]),
            bytes_per_block=1000,
            swap_out_bytes_per_s=rng.choice([1e3, 1e5]),
            swap_in_bytes_per_s=rng.choice([1e3, 1e5]),
            prefill_tokens_per_s=100.0,
        )
    )
    return driver


@pytest.mark.parametrize("seed", range(0, 120, 20))
def test_every_sequence_gets_its_whole_output_with_at_most_two_preemptions(seed: int) -> None:
    num_preemptions = 0
    for offset in range(20):
        rng = random.Random(seed + offset)
        driver = random_driver(rng)
        for number in range(30):
            driver.submit(
                prompt_of(rng.randint(1, 20), number), rng.randint(1, 20), priority=rng.choice([0, 0, 0, 1, 2])
            )
            for _ in range(rng.choice([0, 0, 1, 3])):
                driver.step()
        driver.drain()
        num_preemptions += driver.scheduler.stats().num_preemptions_total
        for end in driver.ends.values():
            assert end.reason.value == "length"
            total = len(driver.specs[end.seq_id].prompt_ids) + end.num_output_tokens
            assert end.num_computed_tokens <= (MAX_PREEMPTIONS + 1) * total, "prefill work is bounded"
    assert num_preemptions > 10, "no pressure, nothing tested"


@pytest.mark.parametrize("seed", range(30))
def test_runs_of_several_tokens_a_row_give_the_same_output(seed: int) -> None:
    rng = random.Random(seed)
    driver = random_driver(rng, burst=rng.randint(2, 4))
    for number in range(20):
        stops = frozenset(rng.sample(range(50), 2))
        driver.submit(prompt_of(rng.randint(1, 20), number), rng.randint(1, 20), stops=stops)
        driver.step()
    driver.drain()


def test_a_pool_of_any_size_gives_the_same_output() -> None:
    outputs = []
    for num_blocks in (5, 6, 8, 12, 20, 200):
        driver = Driver(SchedulerConfig(max_num_batched_tokens=16, max_num_seqs=8, max_prefill_chunk=4))
        driver.attach(ExecutorLimits(2, num_blocks, 8, 16, 40, 100))
        for number in range(12):
            driver.submit(prompt_of(1 + number % 5, number), 5)
        driver.drain()
        outputs.append(driver.outputs)
        if num_blocks == 5:
            assert driver.scheduler.stats().num_preemptions_total > 0
    assert all(output == outputs[-1] for output in outputs)


def test_a_sequence_that_outgrows_the_pool_alone_ends_with_length() -> None:
    driver = Driver(SchedulerConfig())
    driver.attach(ExecutorLimits(4, 5, 8, 64, 40, 1000))
    seq_id = driver.submit(prompt_of(7), 500)
    assert seq_id is not None
    driver.drain()
    assert len(driver.outputs[seq_id]) == 4 * 5 - 7
    assert driver.ends[seq_id].reason.value == "length"


SMALL = SchedulerConfig(max_num_batched_tokens=32, max_num_seqs=4, max_prefill_chunk=8, max_skip_ahead=4)


@pytest.mark.parametrize("policy", QueuePolicy)
@pytest.mark.parametrize("shorts_per_step", [1, 2, 4])
def test_a_long_prompt_is_served_under_a_steady_flow_of_short_ones(policy: QueuePolicy, shorts_per_step: int) -> None:
    """Also when the short ones alone are more than the executor can do, so that their own waits grow for ever."""
    driver = Driver(replace(SMALL, queue_policy=policy))
    driver.attach(ExecutorLimits(4, 24, 8, 32, 40, 200))
    for number in range(20):
        driver.submit(prompt_of(3, number), 4)
    long_id = driver.submit(prompt_of(80), 4)
    assert long_id is not None
    for step in range(400):
        for number in range(shorts_per_step):
            driver.submit(prompt_of(3, step * 5 + number), 4)
        driver.step()
        if long_id in driver.ends:
            break
    assert driver.ends[long_id].num_output_tokens == 4
    driver.drain(20_000)


def test_a_giant_that_does_not_fit_is_passed_a_bounded_number_of_times() -> None:
    driver = Driver(replace(SMALL, queue_policy=QueuePolicy.FCFS, max_skip_ahead=3))
    driver.attach(ExecutorLimits(4, 12, 8, 32, 40, 200))
    first = driver.submit(prompt_of(8), 20)
    driver.step()
    giant = driver.submit(prompt_of(40), 2)
    others = [driver.submit(prompt_of(3, number), 2) for number in range(1, 12)]
    driver.drain()
    assert None not in [first, giant, *others]
    assert giant is not None
    passed = [seq_id for seq_id in others if driver.first_token_step[seq_id or 0] < driver.first_token_step[giant]]
    assert len(passed) == 3


def test_equal_priorities_never_preempt_each_other_for_a_seat() -> None:
    driver = Driver(replace(SMALL, queue_policy=QueuePolicy.PRIORITY))
    driver.attach(ExecutorLimits(4, 400, 8, 32, 40, 200))
    for number in range(40):
        driver.submit(prompt_of(6, number), 10, priority=3)
        driver.step()
    driver.drain()
    assert driver.scheduler.stats().num_preemptions_total == 0


@pytest.mark.parametrize("policy", [QueuePolicy.PRIORITY, QueuePolicy.LENGTH_AWARE])
@pytest.mark.parametrize("num_blocks", [12, 400])
@pytest.mark.parametrize("depth", [1, 2])
def test_a_high_priority_gets_its_first_token_within_three_steps(
    policy: QueuePolicy, num_blocks: int, depth: int
) -> None:
    """Whether seats or blocks are what the low ones hold; three plans from its arrival to the one that samples."""
    driver = Driver(replace(SMALL, queue_policy=policy, pipeline_depth=depth))
    driver.attach(ExecutorLimits(4, num_blocks, 8, 32, 40, 200))
    for number in range(8):
        driver.submit(prompt_of(6, number), 30)
    for _ in range(6):
        driver.step()
    high = driver.submit(prompt_of(7, 99), 5, priority=9)
    assert high is not None
    num_plans = len(driver.plans)
    while high not in driver.first_token_step:
        assert driver.step()
    sampled_by = len(driver.plans) - len(driver.results)
    assert sampled_by - num_plans <= 3
    driver.drain()
    assert all(end.num_preemptions <= MAX_PREEMPTIONS for end in driver.ends.values())


@pytest.mark.parametrize("num_blocks", [12, 400])
def test_several_high_priorities_at_once_each_get_their_first_token_within_three_steps(num_blocks: int) -> None:
    driver = Driver(replace(SMALL, queue_policy=QueuePolicy.PRIORITY))
    driver.attach(ExecutorLimits(4, num_blocks, 8, 32, 40, 200))
    for number in range(8):
        driver.submit(prompt_of(6, number), 30)
    for _ in range(6):
        driver.step()
    high = [driver.submit(prompt_of(5, 90 + number), 5, priority=9) for number in range(4)]
    num_plans = len(driver.plans)
    while not all(seq_id in driver.first_token_step for seq_id in high):
        assert driver.step()
    assert len(driver.plans) - len(driver.results) - num_plans <= 3
    driver.drain()


def test_a_preempted_sequence_goes_before_newer_ones() -> None:
    driver = Driver(replace(SMALL, queue_policy=QueuePolicy.LENGTH_AWARE))
    driver.attach(ExecutorLimits(4, 8, 8, 32, 40, 200))
    old = [driver.submit(prompt_of(10, number), 12) for number in range(2)]
    for step in range(200):
        driver.submit(prompt_of(2, step), 3)
        driver.step()
        if step == 4:
            assert old[0] is not None
            assert driver.preempt(old[0], Action.RECOMPUTE)
        if all(seq_id in driver.ends for seq_id in old):
            break
    assert driver.scheduler.stats().recomputed_tokens_total > 0
    assert all(seq_id in driver.ends for seq_id in old)
    driver.drain()
