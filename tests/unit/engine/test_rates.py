"""Rates learned from results: what counts as a sample, what moves a figure, and that the core weighs by it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pagemill.engine.v1 import executor_pb2 as pb
from scheduler_svc.core.costs import block_costs
from scheduler_svc.core.pace import step_pace
from scheduler_svc.core.params import ExecutorLimits, SchedulerConfig
from scheduler_svc.core.preemption import Action
from scheduler_svc.rates import (
    LEAST_COPY_S,
    LEAST_PROMPT_SHARE,
    NUM_FIRST,
    NUM_SAMPLES,
    CopiedBytes,
    ExecutorRates,
    LearnedRate,
)
from tests.oracles.base import Geometry
from tests.oracles.kv import KvExecutor
from tests.oracles.rig import LockstepRig
from tests.unit.engine.engine_samples import samples_of

LIMITS = ExecutorLimits(
    block_size=16,
    num_device_blocks=64,
    max_rows=8,
    max_tokens=512,
    num_lanes=64,
    max_model_len=1024,
    num_host_blocks=64,
    bytes_per_block=1000,
    swap_out_bytes_per_s=1e9,
    swap_in_bytes_per_s=2e9,
    prefill_tokens_per_s=1000.0,
)


def learned(rates: ExecutorRates) -> ExecutorLimits:
    """The figures after the last samples, however little they have moved."""
    return rates.take_news() or rates.limits


def test_a_figure_moves_when_most_samples_say_so() -> None:
    rate = LearnedRate(100.0)
    for _ in range(NUM_FIRST - 1):
        rate.add(10.0, 1.0)
        assert rate.value == 100.0
    for _ in range(2):
        rate.add(10.0, 1.0)
    assert rate.value == 10.0
    for _ in range(NUM_SAMPLES):
        rate.add(10.0, 1.0)
    for _ in range(NUM_SAMPLES // 2):
        rate.add(1e9, 1.0)
        assert rate.value == 10.0  # a burst of odd steps
    rate.add(40.0, 1.0)
    assert rate.value == 40.0


def test_an_unknown_figure_needs_a_few_samples_and_nothing_is_no_sample() -> None:
    rate = LearnedRate(0.0)
    for amount, seconds in ((0.0, 1.0), (5.0, 0.0), (-5.0, 1.0), (5.0, -1.0)):
        for _ in range(NUM_SAMPLES):
            rate.add(amount, seconds)
    assert rate.value == 0.0
    for _ in range(NUM_FIRST - 1):
        rate.add(5.0, 1.0)
    assert rate.value == 0.0
    rate.add(5.0, 1.0)
    assert rate.value == 5.0


@pytest.mark.parametrize(
    ("row_num_tokens", "counts"),
    [
        ([192, 8], True),
        ([192] + [1] * 64, True),
        ([48] + [1] * 16, True),
        ([47] + [1] * 17, False),  # too much of it decodes
        ([63], False),  # too small
        ([1] * 64, False),
        (None, False),
    ],
)
def test_steps_of_mostly_prompts_count_while_nothing_is_known_of_decode_rows(
    row_num_tokens: list[int] | None, counts: bool
) -> None:
    rates = ExecutorRates(LIMITS, 256)
    num_tokens = 64 if row_num_tokens is None else sum(row_num_tokens)
    for _ in range(NUM_SAMPLES):
        rates.step(len(row_num_tokens or [1] * 64), row_num_tokens, num_tokens / 200.0)
    assert learned(rates).prefill_tokens_per_s == pytest.approx(200.0 if counts else 1000.0)


def test_copies_count_by_direction_and_not_when_mixed_or_short() -> None:
    rates = ExecutorRates(LIMITS, 256)
    for _ in range(NUM_SAMPLES):
        rates.copies(CopiedBytes(out=1 << 20, back=1 << 20), 1.0)
        rates.copies(CopiedBytes(out=1 << 20), LEAST_COPY_S / 2)
        rates.copies(CopiedBytes(), 1.0)
    assert rates.take_news() is None
    for _ in range(NUM_SAMPLES):
        rates.copies(CopiedBytes(out=1 << 20), 1.0)
        rates.copies(CopiedBytes(back=1 << 22), 1.0)
    assert rates.take_news() == replace(LIMITS, swap_out_bytes_per_s=1 << 20, swap_in_bytes_per_s=1 << 22)


def test_news_are_told_once_and_only_when_they_matter() -> None:
    rates = ExecutorRates(LIMITS, 256)
    for _ in range(NUM_SAMPLES):
        rates.step(1, [950], 1.0)
    assert rates.take_news() is None
    for _ in range(NUM_SAMPLES):
        rates.step(1, [890], 1.0)
    assert rates.take_news() == rates.limits == replace(LIMITS, prefill_tokens_per_s=890)
    assert rates.take_news() is None
    for _ in range(NUM_FIRST):
        rates.step(3, None, 0.5)
    assert rates.take_news() == rates.limits == replace(LIMITS, prefill_tokens_per_s=890, decode_step_s=(0.0, 0.5))
    assert rates.take_news() is None


def test_decode_steps_are_learned_by_the_size_of_their_batch() -> None:
    rates = ExecutorRates(LIMITS, 256)
    for num_rows, seconds in ((1, 0.1), (2, 0.2), (3, 0.2), (8, 0.8), (15, 0.8), (64, 3.0), (5, 0.5)):
        for _ in range(NUM_FIRST - (num_rows == 5)):
            rates.step(num_rows, None, seconds)
    assert learned(rates).decode_step_s == pytest.approx((0.1, 0.2, 0.0, 0.8, 0.0, 0.0, 3.0))
    rates.step(0, None, 9.0)  # only copies or releases
    assert rates.take_news() is None


@pytest.mark.parametrize("num_decodes", [0, 1, 8, 20])
@pytest.mark.parametrize("num_prompt", [16, 40, 192])
def test_prompts_have_what_decode_rows_leave_of_a_step(num_decodes: int, num_prompt: int) -> None:
    rates = ExecutorRates(LIMITS, 256)
    for num_rows in (1, 8):
        for _ in range(NUM_FIRST):
            rates.step(num_rows, None, 0.02 + 0.01 * num_rows)
    fixed_s = {0: 0.03, 1: 0.03, 8: 0.1, 20: 0.1}[num_decodes]
    for _ in range(NUM_SAMPLES):
        rates.step(num_decodes + 1, [1] * num_decodes + [num_prompt], fixed_s + num_prompt / 400)
        rates.step(num_decodes + 1, [1] * num_decodes + [15], 9.0)  # too few to tell
    assert learned(rates).prefill_tokens_per_s == pytest.approx(400)


def test_a_step_with_prompts_shows_when_decode_rows_have_become_faster() -> None:
    """Prompts may never be cut, and then no step comes without them."""
    rates = ExecutorRates(LIMITS, 256)
    for _ in range(NUM_FIRST):
        rates.step(4, None, 0.9)
    for _ in range(3 * NUM_SAMPLES):
        rates.step(5, [1, 1, 1, 1, 100], 0.02 + 100 / 1000)
    limits = learned(rates)
    assert limits.decode_step_s[2] == pytest.approx(0.06)
    assert limits.prefill_tokens_per_s == pytest.approx(100 / 0.06)


def test_a_budget_of_few_tokens_is_no_reason_not_to_learn() -> None:
    rates = ExecutorRates(LIMITS, 16)
    for _ in range(NUM_SAMPLES):
        rates.step(8, None, 0.1)
        rates.step(9, [1] * 8 + [8], 0.2)
    assert learned(rates).prefill_tokens_per_s == pytest.approx(80)


def test_prompts_that_seem_to_cost_nothing_have_a_small_share() -> None:
    rates = ExecutorRates(LIMITS, 256)
    for _ in range(NUM_SAMPLES):
        rates.step(4, None, 1.0)
        rates.step(5, [1, 1, 1, 1, 50], 0.8)
    assert learned(rates).prefill_tokens_per_s == pytest.approx(50 / (LEAST_PROMPT_SHARE * 0.8))


class Slow(KvExecutor):
    """Takes a hundredth of a second for a step and for each of its tokens, and a tenth of one for the copies that a
    result reports, whatever its hello says."""

    def _step_time(self, plan: pb.StepPlan) -> float:
        return 0.01 * (1 + sum(self._rows(plan)[1]))

    def results_to_send(self, result: pb.StepResult) -> list[pb.StepResult]:
        result.copy_us = 100_000 if result.finished_copy_steps else 0
        return [result]


GEOMETRY = Geometry(
    num_blocks=24,
    num_host_blocks=64,
    bytes_per_block=1 << 16,
    swap_out_bytes_per_s=1e9,
    swap_in_bytes_per_s=1e9,
    prefill_tokens_per_s=1e6,
)
"""A hello by which computing again is far cheaper than copying."""
CORE = SchedulerConfig(max_num_batched_tokens=64, max_prefill_chunk=64, pipeline_depth=1, max_step_ms=0)


def in_use(rig: LockstepRig) -> ExecutorLimits:
    session = rig.engine.executors.session
    assert session is not None
    return session.limits


def test_the_core_weighs_by_what_results_show() -> None:
    rig = LockstepRig(core=CORE)
    rig.add_executor(Slow, GEOMETRY)
    gateway = rig.add_gateway()
    rig.turn(3)
    assert samples_of(rig)["pagemill_prefill_tokens_per_second",] == 1e6
    for seed in range(NUM_SAMPLES):
        gateway.submit([seed] * 60, max_tokens=2)
        rig.finish()
    learned_rate = in_use(rig).prefill_tokens_per_s
    assert learned_rate == pytest.approx(60 / 0.59)  # all but the fixed cost and that of one row
    assert in_use(rig).decode_step_s == pytest.approx((0.02,))
    core = rig.engine.core
    assert core._running is not None
    assert core._running.limits.costs == block_costs(in_use(rig))
    assert core._running.limits.pace == step_pace(0, in_use(rig))
    assert core._running.limits.costs.recompute_s == pytest.approx(8 / learned_rate)
    samples = samples_of(rig)
    assert samples["pagemill_prefill_tokens_per_second",] == learned_rate
    out = samples["pagemill_copy_bytes_per_second", ("direction", "out")]  # of blocks that were kept when evicted
    assert out == in_use(rig).swap_out_bytes_per_s < 1e9
    # What has been learned outlives a session, and not the executor.
    rig.engine.executors.restart(rig.clock.now, "test")
    assert in_use(rig).prefill_tokens_per_s == learned_rate
    assert core._running.limits.costs.recompute_s == pytest.approx(8 / learned_rate)
    rig.kill_executor(rig.executors[0])
    rig.pass_time(5)
    assert samples_of(rig)["pagemill_prefill_tokens_per_second",] == 0
    rig.add_executor(Slow, GEOMETRY, name="second")
    rig.turn(3)
    assert samples_of(rig)["pagemill_prefill_tokens_per_second",] == 1e6


@pytest.mark.parametrize("kind", [Slow, KvExecutor])
def test_copies_are_learned_and_change_what_becomes_of_a_victim(kind: type[KvExecutor]) -> None:
    rig = LockstepRig(core=CORE)
    rig.turn_s = 0.02
    rig.add_executor(kind, GEOMETRY)
    gateway = rig.add_gateway()
    for seed in range(24):
        gateway.submit([seed] * 60, max_tokens=60)
    rig.finish()
    counted = rig.engine.core.stats().preemptions_total
    swaps = sum(count for (action, _), count in counted.items() if action is Action.SWAP)
    assert (swaps > 0) is (kind is Slow)
    rig.assert_clean()
