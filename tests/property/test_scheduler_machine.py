"""Anything may happen to the scheduler at any moment, in pools of a few blocks; `driver` checks everything.

Two machines: one keeps the pool under pressure, the other adds every kind of loss.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from scheduler_svc.core import pace
from scheduler_svc.core.params import ExecutorLimits, HostCache, PreemptionMode, QueuePolicy, SchedulerConfig
from scheduler_svc.core.plan import RowErrorCode
from scheduler_svc.core.preemption import Action
from tests.property.campaign import machine_settings, machine_time_limit
from tests.property.driver import Driver, prompt_of


def executor_limits(depth: int) -> st.SearchStrategy[ExecutorLimits]:
    return st.builds(
        ExecutorLimits,
        block_size=st.integers(1, 4),
        num_device_blocks=st.integers(4, 8),
        max_rows=st.integers(2, 5),
        max_tokens=st.integers(2, 12),
        num_lanes=st.integers(2, 4 * (depth + 1)),
        max_model_len=st.integers(6, 30),
        num_host_blocks=st.sampled_from([0, 0, 1, 3, 12]),
        bytes_per_block=st.just(1000),
        swap_out_bytes_per_s=st.sampled_from([0.0, 1e3, 1e6]),
        swap_in_bytes_per_s=st.sampled_from([0.0, 1e3, 1e6]),
        prefill_tokens_per_s=st.sampled_from([0.0, 20.0, 100.0]),
    )


configs = st.builds(
    SchedulerConfig,
    max_num_batched_tokens=st.integers(1, 10),
    max_num_seqs=st.integers(1, 4),
    max_prefill_chunk=st.integers(1, 6),
    max_step_ms=st.sampled_from([0, 0, 40, 250]),
    queue_policy=st.sampled_from(QueuePolicy),
    max_skip_ahead=st.integers(0, 3),
    watermark=st.sampled_from([0.0, 0.01, 0.3]),
    pipeline_depth=st.integers(1, 4),
    max_queue_requests=st.just(12),
    preemption_mode=st.sampled_from(PreemptionMode),
    prefix_cache=st.sampled_from([True, True, False]),
    prefix_cache_share=st.sampled_from([0.2, 0.5, 1.0]),
    host_cache=st.sampled_from(HostCache),
    growth_reserve=st.sampled_from([0.0, 1.0]),
)
requests = st.fixed_dictionaries(
    {
        "length": st.integers(1, 12),
        "max_tokens": st.integers(1, 16),
        "stops": st.frozensets(st.integers(0, 49), max_size=3),
        "min_tokens": st.integers(0, 3),
        "priority": st.sampled_from([0, 0, 0, 1, 2]),
        "group": st.integers(0, 2),
        "family": st.none() | st.integers(0, 1),
        "cache_salt": st.sampled_from([b"", b"", b"other tenant"]),
        "reads_prefix_cache": st.sampled_from([True, True, True, False]),
    }
)


class PressureMachine(RuleBasedStateMachine):
    """Sequences come, run, stop and are cancelled."""

    driver: Driver

    @initialize(config=configs, data=st.data(), burst=st.sampled_from([1, 1, 3]), copy_lag=st.sampled_from([0, 0, 2]))
    def start(self, config: SchedulerConfig, data: st.DataObject, burst: int, copy_lag: int) -> None:
        self.driver = Driver(config, burst=burst, copy_lag=copy_lag)
        self.least = mock.patch.object(pace, "LEAST_PROMPT_TOKENS", 1)  # these steps are smaller than a real least
        self.least.start()
        self.limits = executor_limits(config.pipeline_depth)
        self.driver.attach(data.draw(self.limits))

    def submit_one(self, request: dict[str, Any], **fields: Any) -> None:
        driver = self.driver
        request = request | fields
        family = request.pop("family")
        salt = len(driver.specs) + 2 if family is None else family  # prompts of a family are prefixes of each other
        driver.submit(prompt_of(request.pop("length"), salt), request.pop("max_tokens"), **request)

    @rule(wanted=st.lists(requests, min_size=1, max_size=4))
    def submit(self, wanted: list[dict[str, Any]]) -> None:
        for request in wanted:
            self.submit_one(request)

    @rule(index=st.integers(0, 10))
    def cancel(self, index: int) -> None:
        if live := self.driver.live:
            self.driver.cancel(live[index % len(live)])

    @rule(index=st.integers(0, 10), action=st.sampled_from(Action))
    def preempt(self, index: int, action: Action) -> None:
        if live := self.driver.live:
            self.driver.preempt(live[index % len(live)], action)

    @rule()
    def flush_the_prefix_cache(self) -> None:
        self.driver.scheduler.flush_prefix_cache()
        self.driver.check()

    @rule()
    def schedule(self) -> None:
        self.driver.schedule()

    @rule(count=st.integers(1, 4))
    def apply(self, count: int) -> None:
        for _ in range(count):
            self.driver.apply()

    @rule(count=st.integers(1, 12))
    def run_steps(self, count: int) -> None:
        for _ in range(count):
            self.driver.step()

    def teardown(self) -> None:
        driver = getattr(self, "driver", None)
        if driver is None:
            return
        self.least.stop()
        if driver.executor is None:
            driver.attach(ExecutorLimits(2, 8, 4, 8, 20, 30))
        driver.drain(2000)


class LossMachine(PressureMachine):
    """Besides, deadlines pass, rows and steps fail, results come twice or never, and executors come and go."""

    @rule(request=requests, deadline=st.none() | st.floats(0.0, 0.3), queue_deadline=st.none() | st.floats(0.0, 0.2))
    def submit_with_deadlines(
        self, request: dict[str, Any], deadline: float | None, queue_deadline: float | None
    ) -> None:
        now = self.driver.now
        self.submit_one(
            request,
            deadline=None if deadline is None else now + deadline,
            queue_deadline=None if queue_deadline is None else now + queue_deadline,
        )

    @rule(request=requests, num_emitted=st.integers(1, 6))
    def resubmit(self, request: dict[str, Any], num_emitted: int) -> None:
        self.submit_one(request, num_emitted=num_emitted)

    @rule(seq_id=st.integers(0, 1020))
    def cancel_any(self, seq_id: int) -> None:
        self.driver.cancel(seq_id)

    @rule(seconds=st.sampled_from([0.0, 0.01, 0.1]))
    def advance(self, seconds: float) -> None:
        self.driver.advance(seconds)

    @rule(row=st.integers(0, 3), code=st.sampled_from(RowErrorCode))
    def schedule_with_a_row_error(self, row: int, code: RowErrorCode) -> None:
        self.driver.schedule({row: code})

    @precondition(lambda self: self.driver.plans)
    @rule(back=st.integers(0, 3))
    def a_result_that_is_not_expected_is_ignored(self, back: int) -> None:
        driver = self.driver
        step_id = driver.plans[-1].step_id - back - driver.scheduler.num_inflight_plans
        if step_id >= 1 and not any(result.step_id == step_id for result in driver.results):
            driver.apply_unexpected(step_id)

    @rule(
        copies=st.sampled_from([0.0, 1e3, 1e6]),
        prefill=st.sampled_from([0.0, 20.0, 100.0]),
        decode_step_s=st.sampled_from([(), (0.02, 0.1), (0.3,)]),
    )
    def the_executor_turns_out_faster_or_slower(
        self, copies: float, prefill: float, decode_step_s: tuple[float, ...]
    ) -> None:
        if (executor := self.driver.executor) is not None:
            limits = replace(executor.limits, swap_out_bytes_per_s=copies, swap_in_bytes_per_s=copies)
            limits = replace(limits, prefill_tokens_per_s=prefill, decode_step_s=decode_step_s)
            self.driver.scheduler.update_rates(limits)
            self.driver.check()

    @rule(data=st.data(), kind=st.sampled_from(["fail", "detach", "attach", "detach and attach", "death"]))
    def lose_the_executor(self, data: st.DataObject, kind: str) -> None:
        if kind == "fail":
            self.driver.fail_step()
        if "detach" in kind or kind == "death":
            self.driver.detach()
        if "attach" in kind.replace("detach", "") or kind == "death":
            self.driver.attach(data.draw(self.limits), predecessor_died=kind == "death")


TestPressure = machine_time_limit(PressureMachine.TestCase)
TestPressure.settings = machine_settings(200, 30)
TestLoss = machine_time_limit(LossMachine.TestCase)
TestLoss.settings = machine_settings(300, 30)
