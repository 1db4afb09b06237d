"""How many prompt tokens a step has time for, and that plans keep to it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from scheduler_svc.core.limits import check_config, combine
from scheduler_svc.core.pace import LEAST_PROMPT_TOKENS, NUM_MIXED, StepPace, step_pace
from scheduler_svc.core.params import ExecutorLimits, SchedulerConfig, SeqId, SequenceSpec
from scheduler_svc.core.plan import StepPlan, StepResult
from scheduler_svc.core.scheduler import Scheduler

EXECUTOR = ExecutorLimits(
    16, 512, max_rows=64, max_tokens=512, num_lanes=192, max_model_len=1024, prefill_tokens_per_s=400.0
)
DECODES = (0.02, 0.0, 0.1)
"""Seconds of a step of 1 row and of 4 to 7; of 2 or 3 nothing is known."""


def test_a_step_of_decode_rows_takes_what_one_of_that_size_has_taken() -> None:
    pace = StepPace(0.25, 1 / 400, DECODES)
    seconds = [pace.decode_s(num_rows) for num_rows in (0, 1, 2, 3, 4, 7, 8, 1000)]
    assert seconds == [0.02, 0.02, 0.02, 0.02, 0.1, 0.1, 0.1, 0.1]
    assert StepPace(0.25, 1 / 400, ()).decode_s(5) == StepPace(0.25, 1 / 400, (0.0, 0.1)).decode_s(1) == 0.0


@pytest.mark.parametrize(
    ("num_decodes", "most", "expected"),
    [(0, 512, 92), (3, 512, 92), (4, 512, 60), (4, 59, 59), (4, 0, 0), (1000, 512, 60)],
)
def test_prompts_have_the_time_that_decode_rows_leave(num_decodes: int, most: int, expected: int) -> None:
    assert StepPace(0.25, 1 / 400, DECODES).num_prompt_tokens(num_decodes, most) == expected


def test_prompts_have_as_much_time_as_slow_decode_rows() -> None:
    pace = StepPace(0.25, 1 / 400, (0.1, 0.15, 0.2, 0.3))
    assert [pace.num_prompt_tokens(num_decodes, 512) for num_decodes in (1, 2, 4, 8)] == [60, 60, 80, 120]


def test_a_step_still_takes_the_least_where_each_token_is_slow() -> None:
    pace = StepPace(0.25, 1.0, (0.3,))
    assert pace.num_prompt_tokens(1, 512) == LEAST_PROMPT_TOKENS
    assert pace.num_prompt_tokens(1, 7) == 7


def test_a_step_stays_large_enough_to_learn_from_while_nothing_is_known_of_decode_rows() -> None:
    pace = StepPace(0.25, 1 / 200, ())
    assert [pace.num_prompt_tokens(num_decodes, 512) for num_decodes in (0, 3)] == [128, 128]
    assert [pace.num_prompt_tokens(0, most) for most in (7, 20, 253)] == [7, 20, 64]
    assert StepPace(0.25, 1 / 100, ()).num_prompt_tokens(0, 512) == 100  # four times the limit
    assert StepPace(0.25, 1.0, ()).num_prompt_tokens(0, 512) == LEAST_PROMPT_TOKENS
    assert StepPace(0.25, 1.0, (0.01,)).num_prompt_tokens(0, 512) == LEAST_PROMPT_TOKENS


def test_without_a_limit_or_a_rate_the_budget_decides() -> None:
    assert StepPace(0.0, 1.0, DECODES).num_prompt_tokens(4, 512) == 512
    unknown = replace(EXECUTOR, prefill_tokens_per_s=0.0, decode_step_s=(9.0,))
    assert step_pace(250, unknown).num_prompt_tokens(4, 512) == 512
    assert step_pace(250, EXECUTOR) == StepPace(0.25, 1 / 400, ())


def test_a_negative_limit_is_a_mistake() -> None:
    with pytest.raises(ValueError, match="max_step_ms = -1"):
        check_config(SchedulerConfig(max_step_ms=-1))


def attached(executor: ExecutorLimits = EXECUTOR, **settings: object) -> Scheduler:
    config = SchedulerConfig(max_num_batched_tokens=400, max_prefill_chunk=400, pipeline_depth=1, prefix_cache=False)
    scheduler = Scheduler(replace(config, **settings))  # type: ignore[arg-type]
    scheduler.attach_executor(executor, 0.0)
    return scheduler


def submit(scheduler: Scheduler, number: int, prompt: int) -> None:
    assert scheduler.submit(SequenceSpec(SeqId(number), [number] * prompt, 100), 0.0) is None


def counts(scheduler: Scheduler) -> list[int]:
    """Tokens of each row of the next plan, whose result is then in."""
    plan = scheduler.schedule(0.0)
    assert plan is not None
    assert scheduler.check_invariants() == []
    result = plan.row_num_tokens or [1] * plan.num_rows
    assert sum(result) == plan.num_tokens
    answer(scheduler, plan)
    return result


def answer(scheduler: Scheduler, plan: StepPlan) -> None:
    silent = scheduler._running.inflight[0].silent  # type: ignore[union-attr]
    tokens = [-1 if row in silent else 5 for row in range(plan.num_rows)]
    scheduler.apply(StepResult(plan.step_id, tokens), 0.0)


def test_a_long_prompt_is_cut_into_steps_that_end_in_time() -> None:
    scheduler = attached()
    submit(scheduler, 1, 250)
    assert [counts(scheduler) for _ in range(4)] == [[100], [100], [50], [1]]


def test_prompts_share_what_a_step_has_time_for() -> None:
    scheduler = attached()
    submit(scheduler, 1, 70)
    submit(scheduler, 2, 70)
    submit(scheduler, 3, 70)
    assert [counts(scheduler) for _ in range(3)] == [[70, 30], [1, 40, 60], [1, 1, 10]]


def test_decode_rows_are_never_held_back() -> None:
    scheduler = attached()
    for number in range(1, 41):
        submit(scheduler, number, 2)
    assert counts(scheduler) == [2] * 40
    scheduler.update_rates(replace(EXECUTOR, prefill_tokens_per_s=2.0, decode_step_s=(0.02, 0.03, 0.06, 0.1, 0.2, 0.3)))
    submit(scheduler, 41, 100)
    assert counts(scheduler) == [1] * 40 + [LEAST_PROMPT_TOKENS]


def test_now_and_then_decode_rows_have_a_step_of_their_own_while_prompts_are_cut() -> None:
    scheduler = attached(replace(EXECUTOR, decode_step_s=(0.2,), max_model_len=4096))
    submit(scheduler, 1, 2)
    assert counts(scheduler) == [2]
    submit(scheduler, 2, 3000)
    for _ in range(2):
        assert [counts(scheduler) for _ in range(NUM_MIXED + 1)] == [[1, 80]] * NUM_MIXED + [[1]]


def test_prompts_that_are_not_cut_are_not_held_back() -> None:
    scheduler = attached(max_num_batched_tokens=64)
    submit(scheduler, 1, 2)
    submit(scheduler, 2, 1000)
    assert [sum(counts(scheduler)) for _ in range(15)] == [64] * 15
    scheduler = attached()
    submit(scheduler, 1, 900)  # without decode rows there is nothing to learn from a step without prompts
    assert [counts(scheduler) for _ in range(9)] == [[100]] * 9


def test_steps_grow_and_shrink_with_what_the_executor_shows() -> None:
    scheduler = attached()
    submit(scheduler, 1, 1000)
    assert counts(scheduler) == [100]
    scheduler.update_rates(replace(EXECUTOR, prefill_tokens_per_s=1000.0))
    assert counts(scheduler) == [250]
    scheduler.update_rates(replace(EXECUTOR, prefill_tokens_per_s=1000.0, decode_step_s=(0.05,)))
    assert counts(scheduler) == [200]
    scheduler.update_rates(replace(EXECUTOR, prefill_tokens_per_s=0.0))
    assert counts(scheduler) == [400]


def test_no_limit_is_a_choice() -> None:
    scheduler = attached(max_step_ms=0)
    submit(scheduler, 1, 900)
    assert counts(scheduler) == [400]


def test_copies_of_kept_blocks_are_counted_by_what_a_step_has_time_for() -> None:
    """A share of a full step's time would be most of the time of one that is cut."""
    executor = replace(EXECUTOR, num_host_blocks=64, bytes_per_block=1000, swap_out_bytes_per_s=16_000.0)
    executor = replace(executor, swap_in_bytes_per_s=1e9, decode_step_s=(0.05,))
    config = SchedulerConfig(max_num_batched_tokens=400)
    whole, cut = (combine(replace(config, max_step_ms=limit), executor) for limit in (0, 250))
    assert whole.num_blocks_in(0.5) == 8  # half of a second, at 16 blocks a second
    assert cut.num_blocks_in(0.5) == 1  # half of the 0.2 s that 80 tokens take
