"""A scheduler with a model executor behind it, and a history checker that knows what every sequence must get.

The state machine, the seeded runs and the starvation tests all drive this, so that all of them check everything:
books after every call, the contract on every plan, and for each sequence: gapless output, equal to the oracle's chain,
exactly one end, for a reason that was true.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace

from scheduler_svc.core.events import Event, FinishedEvent, FinishReason, TokensEvent
from scheduler_svc.core.params import ExecutorLimits, SamplingSpec, SchedulerConfig, SeqId, SequenceSpec
from scheduler_svc.core.plan import NO_TOKEN, RowErrorCode, StepPlan, StepResult, StepStatus
from scheduler_svc.core.preemption import MAX_PREEMPTIONS, Action
from scheduler_svc.core.scheduler import Scheduler
from tests.property.model_executor import VOCABULARY, ModelExecutor, oracle

GOOD_ENDS = {FinishReason.STOP, FinishReason.LENGTH}


class Driver:
    """Every call checks; `results` are what the executor has answered and the scheduler has not seen yet."""

    def __init__(self, config: SchedulerConfig, *, burst: int = 1, copy_lag: int = 0) -> None:
        self.config = config
        self.copy_lag = copy_lag
        self.scheduler = Scheduler(config)
        self.executor: ModelExecutor | None = None
        self.results: deque[StepResult] = deque()
        self.now = 0.0
        self.burst = burst
        self.specs: dict[int, SequenceSpec] = {}
        self.outputs: dict[int, list[int]] = {}
        self.ends: dict[int, FinishedEvent] = {}
        self.allowed_ends: dict[int, set[FinishReason]] = {}
        self.tolerates_failures = False
        self.capacity = 1 << 30
        """Most tokens of one sequence on the last executor."""
        self.plans: list[StepPlan] = []
        self.first_token_step: dict[int, int] = {}

    @property
    def live(self) -> list[int]:
        return [seq_id for seq_id in self.specs if seq_id not in self.ends]

    def attach(self, limits: ExecutorLimits, *, predecessor_died: bool = False) -> None:
        self.results.clear()
        if predecessor_died:
            for seq_id in self.live:
                self.allowed_ends[seq_id].add(FinishReason.POISON)
        events = self.scheduler.attach_executor(limits, self.now, predecessor_died=predecessor_died)
        for seq_id in self.live:
            self.allowed_ends[seq_id].add(FinishReason.NO_FIT)
        self._take(events)
        self.capacity = min(limits.max_model_len, limits.block_size * limits.num_device_blocks)
        self.executor = ModelExecutor(
            limits,
            max_tokens=min(self.config.max_num_batched_tokens, limits.max_tokens),
            max_rows=min(self.config.max_num_seqs, limits.max_rows),
            next_step_id=self.scheduler.next_step_id,
            burst=self.burst,
            slack=self.config.pipeline_depth,
            copy_lag=self.copy_lag,
        )

    def detach(self) -> None:
        self.results.clear()
        self.executor = None
        self._take(self.scheduler.detach_executor(self.now))
        assert self.scheduler.stats().running == 0

    def submit(
        self,
        prompt: list[int],
        max_tokens: int,
        *,
        stops: frozenset[int] = frozenset(),
        min_tokens: int = 0,
        num_emitted: int = 0,
        **fields: object,
    ) -> int | None:
        """The id; None when refused. With `num_emitted`, a resubmission behind that much of the right output."""
        seq_id = len(self.specs) + 1000
        whole = expected_output(prompt, max_tokens, stops, min_tokens)
        spec = SequenceSpec(
            SeqId(seq_id),
            prompt,
            max_tokens,
            stops,
            SamplingSpec(min_tokens=min_tokens),
            emitted_ids=whole[:num_emitted],
            arrival=self.now,
        )
        spec = replace(spec, **fields)  # type: ignore[arg-type]
        refusal = self.scheduler.submit(spec, self.now)
        self.check()
        if refusal is not None:
            return None
        self.specs[seq_id] = spec
        self.outputs[seq_id] = list(spec.emitted_ids)
        self.allowed_ends[seq_id] = set(GOOD_ENDS)
        if spec.deadline is not None:
            self.allowed_ends[seq_id].add(FinishReason.DEADLINE)
        if spec.queue_deadline is not None:
            self.allowed_ends[seq_id].add(FinishReason.QUEUE_TIMEOUT)
        return seq_id

    def cancel(self, seq_id: int) -> None:
        if seq_id in self.allowed_ends:
            self.allowed_ends[seq_id].add(FinishReason.CANCELLED)
        self._take(self.scheduler.cancel(SeqId(seq_id), self.now))
        assert seq_id not in self.specs or seq_id in self.ends

    def preempt(self, seq_id: int, action: Action) -> bool:
        """Has a sequence give up its blocks, as nobody asked for; whether it did."""
        done = self.scheduler.preempt(SeqId(seq_id), action)
        self.check()
        return done

    def advance(self, seconds: float) -> None:
        self.now += seconds
        self._take(self.scheduler.expire(self.now))
        for seq_id in self.live:
            deadline = self.specs[seq_id].deadline
            assert deadline is None or deadline > self.now

    def schedule(self, faults: dict[int, RowErrorCode] | None = None) -> bool:
        """Makes and runs one plan; whether there was one."""
        plan = self.scheduler.schedule(self.now)
        self.check()
        if plan is None:
            return False
        assert self.executor is not None
        assert self.scheduler.num_inflight_plans <= self.config.pipeline_depth
        self.plans.append(plan)
        faults = {row: code for row, code in (faults or {}).items() if row < plan.num_rows}
        if faults:
            self.tolerates_failures = True
        self.results.append(self.executor.run(plan, faults))
        if self.burst == 1:
            self._check_that_no_token_too_many_is_asked_for()
        return True

    def apply(self) -> bool:
        """Hands the oldest result back; whether there was one."""
        if not self.results:
            return False
        result = self.results.popleft()
        assert self.executor is not None
        self.executor.confirm(result.step_id)
        self._take(self.scheduler.apply(result, self.now))
        return True

    def apply_unexpected(self, step_id: int) -> None:
        """A result of a plan that is not in flight changes nothing but a counter."""
        before = self.scheduler.stats()
        self._take(self.scheduler.apply(StepResult(step_id, [1]), self.now))
        stats = self.scheduler.stats()
        assert stats == replace(before, num_stale_results_total=before.num_stale_results_total + 1)

    def fail_step(self) -> bool:
        """The oldest step in flight comes back as FAILED: all lanes are void."""
        if not self.results or self.executor is None:
            return False
        result = self.results.popleft()
        self.results.clear()
        self.tolerates_failures = True
        self._take(self.scheduler.apply(StepResult(result.step_id, [], status=StepStatus.FAILED), self.now))
        self.executor = ModelExecutor(
            self.executor.limits,
            self.executor.max_tokens,
            self.executor.max_rows,
            self.scheduler.next_step_id,
            burst=self.burst,
            slack=self.executor.slack,
            copy_lag=self.copy_lag,
        )
        return True

    def step(self, seconds: float = 0.01) -> bool:
        """As the loop does: plan as deep as allowed, then take one result. False when there was nothing to do."""
        self.advance(seconds)
        planned = False
        while self.schedule():
            planned = True
        return self.apply() or planned

    def drain(self, max_steps: int = 5000) -> None:
        """Runs until nothing is left to do, and checks that everything ended and everything came back."""
        for _ in range(max_steps):
            if not self.step():
                break
        else:
            raise AssertionError(f"no end after {max_steps} steps: {self.scheduler.stats()}")
        assert not self.live, f"idle with {self.live} unfinished: {self.scheduler.stats()}"
        stats = self.scheduler.stats()
        assert (stats.queue_requests, stats.queue_tokens, stats.running, stats.preempted) == (0, 0, 0, 0)
        assert stats.swapped == stats.host_blocks_used == 0
        assert stats.blocks_free + stats.blocks_cached == stats.blocks_total
        if not self.config.prefix_cache:
            assert stats.blocks_cached == 0
        running = self.scheduler._running
        if running is not None:
            assert not running.memory.num_behind, "write-through has not caught up"
        if self.executor is not None:
            assert stats.lanes_free == self.executor.limits.num_lanes
            assert not self.executor.lanes
        assert self.scheduler.next_deadline() is None

    def check(self) -> None:
        problems = self.scheduler.check_invariants()
        assert not problems, "\n".join(problems)

    def _check_that_no_token_too_many_is_asked_for(self) -> None:
        """The row at position p brings token p + 1, counted from 0. Only runs of tokens may overshoot."""
        for seq in self.scheduler._sequences.values():
            most = min(len(seq.spec.prompt_ids) + seq.spec.max_tokens, self.capacity)
            assert seq.num_planned < most, "a row that cannot bring a token"

    def _take(self, events: list[Event]) -> None:
        for event in events:
            if isinstance(event, TokensEvent):
                self._take_tokens(event)
            else:
                self._take_end(event)
        self.check()

    def _take_tokens(self, event: TokensEvent) -> None:
        counts = event.counts or [1] * len(event.seq_ids)
        assert len(event.seq_ids) == len(event.first_index) == len(counts)
        assert len(set(event.seq_ids)) == len(event.seq_ids)
        assert min(counts) >= 1
        tokens = iter(event.token_ids)
        for seq_id, first_index, count in zip(event.seq_ids, event.first_index, counts, strict=True):
            assert self.specs[seq_id].group == event.group
            assert seq_id not in self.ends, "a token after the end"
            output = self.outputs[seq_id]
            assert first_index == len(output), "a gap or a repeated token"
            output.extend(next(tokens) for _ in range(count))
            assert NO_TOKEN not in output
            self.first_token_step.setdefault(seq_id, len(self.plans))
        assert next(tokens, None) is None

    def _take_end(self, event: FinishedEvent) -> None:
        seq_id = event.seq_id
        assert seq_id not in self.ends, "two ends"
        self.ends[seq_id] = event
        spec, output = self.specs[seq_id], self.outputs[seq_id]
        assert event.group == spec.group
        assert event.num_output_tokens == len(output)
        assert event.num_preemptions <= MAX_PREEMPTIONS
        assert 0 <= event.num_cached_tokens < len(spec.prompt_ids) + len(spec.emitted_ids)
        assert output == oracle(spec.prompt_ids, len(output)), "the output is not the oracle's"
        failures = {FinishReason.NUMERICAL, FinishReason.INTERNAL} if self.tolerates_failures else set()
        assert event.reason in self.allowed_ends[seq_id] | failures
        expected = expected_output(spec.prompt_ids, spec.max_tokens, spec.stop_token_ids, spec.sampling.min_tokens)
        assert output == expected[: len(output)]
        if event.reason is FinishReason.STOP:
            assert output == expected
            assert output[-1] in spec.stop_token_ids
        elif event.reason is FinishReason.LENGTH:
            room = min(spec.max_tokens, self.capacity - len(spec.prompt_ids))
            assert len(output) == max(room, len(spec.emitted_ids))


def expected_output(prompt: list[int], max_tokens: int, stops: frozenset[int], min_tokens: int) -> list[int]:
    """What an executor without limits gives."""
    output = oracle(prompt, max_tokens)
    for index, token in enumerate(output):
        if token in stops and index >= min_tokens:
            return output[: index + 1]
    return output


def prompt_of(length: int, salt: int = 0) -> list[int]:
    """A prompt unlike those of other salts."""
    return [(salt * 7 + index * 3) % VOCABULARY for index in range(length)]
