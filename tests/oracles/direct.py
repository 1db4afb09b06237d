"""A scheduler core and an oracle in one thread, with the codec between them and no links: thousands of steps a second.

What a live system leaves to chance is drawn from one seed here: how late copies finish, when results are taken, who is
aborted or preempted and when, and when the executor dies. `Stream` knows what it must get; every verb checks events as
they come, and `drain` checks that everything ended and every block came back.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

from pagemill.engine.v1 import executor_pb2 as pb
from pagemill.links import SendOutcome
from scheduler_svc.core.events import Event, FinishedEvent, FinishReason, TokensEvent
from scheduler_svc.core.params import SamplingSpec, SchedulerConfig, SeqId, SequenceSpec
from scheduler_svc.core.plan import StepPlan
from scheduler_svc.core.preemption import Action
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.sequence import SequenceState
from scheduler_svc.executor_codec import decode_limits, decode_result, encode_plan
from tests.oracles.base import Geometry, Lane
from tests.oracles.expected import expected_output
from tests.oracles.kv import KvExecutor

ACTIONS = tuple(action.value for action in Action)
"""What a sequence can be made to do with its blocks."""
TURN_S = 0.01
"""Seconds that pass in a turn."""
GOOD_ENDS = (FinishReason.STOP, FinishReason.LENGTH)


class _NoLink:
    """The oracle is driven by hand."""

    def send(self, frame: bytes) -> SendOutcome:
        return SendOutcome.SENT

    def recv(self, timeout_s: float = 0.0) -> bytes | None:
        return None

    def fileno(self) -> int:
        return -1

    def close(self, linger_s: float = 0.0) -> None:
        pass


@dataclass
class Stream:
    """One sequence as its client sees it."""

    spec: SequenceSpec
    tenant: Hashable
    ids: list[int] = field(default_factory=list)
    end: FinishedEvent | None = None

    @property
    def cached(self) -> int:
        assert self.end is not None
        return self.end.num_cached_tokens


class DirectRig:
    """See the head of this file. `most_late` is the largest number of steps by which copies are late."""

    def __init__(
        self,
        config: SchedulerConfig | None = None,
        geometry: Geometry | None = None,
        *,
        seed: int = 0,
        most_late: int = 0,
        reports_early: bool = False,
        check_every: int = 16,
    ) -> None:
        self.rng = random.Random(seed)
        self.config = config or SchedulerConfig()
        self.scheduler = Scheduler(self.config)
        self.executor = KvExecutor(_NoLink(), geometry, tenant_of=self._tenant_of)
        self.executor.lateness = lambda step_id: self.rng.randint(0, most_late)
        self.reports_early = reports_early
        """The scheduler hears of finished copies when they have only been queued: a control, the fence is gone."""
        self.check_every = check_every
        self.streams: dict[int, Stream] = {}
        self.now = 0.0
        self.num_steps = 0
        self.num_forced = 0
        self.on_plan: Callable[[StepPlan], None] = lambda plan: None
        self._results: deque[tuple[int, pb.StepResult]] = deque()
        self._sent_seq = self._acked = 0
        self._told: set[int] = set()
        self._digest: int | None = None
        self.attach()

    # The executor

    def attach(self) -> None:
        """A session on an executor that holds nothing; one that ran before is as killed."""
        self._results.clear()
        self._told.clear()
        self._digest = None
        self._sent_seq += 1
        self._acked = self._sent_seq
        self.executor.new_session()
        self._take(self.scheduler.attach_executor(decode_limits(self.executor.hello()), self.now))

    kill = attach

    def _run(self, plan: StepPlan) -> None:
        self.num_steps += 1
        message = encode_plan(plan, self._digest)
        self._digest = self.scheduler.state_digest()
        self.on_plan(plan)
        envelope = pb.ExecutorEnvelope(plan=message, ack=self._acked)
        self.executor.begin(envelope, self.now)
        result = self.executor.step(envelope)
        self._sent_seq += 1
        self.executor.on_result_sent(result, self._sent_seq)
        if self.reports_early:
            self._report_early(plan, result)
        self._results.append((self._sent_seq, result))

    def _report_early(self, plan: StepPlan, result: pb.StepResult) -> None:
        steps = {*result.finished_copy_steps} - self._told
        if plan.swap_out_src or plan.copy_src or plan.swap_in_src:
            steps.add(plan.step_id)
        self._told |= steps
        del result.finished_copy_steps[:]
        result.finished_copy_steps.extend(sorted(steps))

    def apply(self) -> bool:
        """Hands the oldest result back; whether there was one."""
        if not self._results:
            return False
        self._acked, message = self._results.popleft()
        geometry = self.executor.geometry
        result = decode_result(message, geometry.vocab_size, geometry.max_tokens + geometry.max_rows)
        self._take(self.scheduler.apply(result, self.now))
        return True

    def turn(self) -> bool:
        """Plan as deep as allowed, then take one result, or by chance all; False when there was nothing to do."""
        self.now += TURN_S
        self._take(self.scheduler.expire(self.now))
        planned = False
        while (plan := self.scheduler.schedule(self.now)) is not None:
            planned = True
            self._run(plan)
            if self.num_steps % self.check_every == 0:
                self.check()
        applied = self.apply()
        if applied and self.rng.random() < 0.1:
            while self.apply():
                pass
        return planned or applied

    def drain(self, each_turn: Callable[[], None] = lambda: None, max_turns: int = 50_000) -> None:
        """Runs to the end of all streams, and until nothing moves; then all must be well."""
        for _ in range(max_turns):
            if not self.turn():
                break
            each_turn()
        else:
            raise AssertionError(f"no end after {max_turns} turns: {self.scheduler.stats()}")
        self.assert_clean()

    # Sequences

    def submit(
        self,
        prompt: Sequence[int],
        max_tokens: int,
        *,
        tenant: Hashable = None,
        stops: frozenset[int] = frozenset(),
        **spec_fields: Any,
    ) -> Stream:
        """A new stream; tenants get salts of their own."""
        seq_id = len(self.streams) + 1
        spec = SequenceSpec(
            SeqId(seq_id),
            list(prompt),
            max_tokens,
            stop_token_ids=stops,
            sampling=SamplingSpec(seed=seq_id),  # the one field by which an oracle's lane names its stream
            arrival=self.now,
            cache_salt=b"" if tenant is None else repr(tenant).encode(),
            **spec_fields,
        )
        stream = self.streams[seq_id] = Stream(spec, tenant, list(spec.emitted_ids))
        refusal = self.scheduler.submit(spec, self.now)
        assert refusal is None, refusal
        return stream

    def cancel(self, stream: Stream) -> None:
        self._take(self.scheduler.cancel(stream.spec.seq_id, self.now))
        assert stream.end is not None

    def running(self) -> list[int]:
        sequences = self.scheduler._sequences.values()
        return [seq.seq_id for seq in sequences if seq.state is SequenceState.RUNNING]

    def swapped(self) -> list[int]:
        sequences = self.scheduler._sequences.values()
        return [seq.seq_id for seq in sequences if seq.state is SequenceState.SWAPPED]

    def force(self, seq_id: int, action: str) -> None:
        """Makes a running sequence give way, as if memory were short."""
        self.num_forced += self.scheduler.preempt(SeqId(seq_id), Action(action))

    def force_some(self, action: str) -> None:
        """The same for one that runs, by chance."""
        running = self.running()
        if running:
            self.force(self.rng.choice(running), action)

    def cancel_some(self) -> None:
        live = [stream for stream in self.streams.values() if stream.end is None]
        if live:
            self.cancel(self.rng.choice(live))

    # Checks

    def check(self) -> None:
        problems = self.scheduler.check_invariants()
        assert not problems, "\n".join(problems)
        assert not self.executor.violations, "\n".join(self.executor.violations)

    def assert_clean(self) -> None:
        """Nothing is left, nobody saw anything wrong, and every stream is what it must be."""
        self.check()
        left = [seq_id for seq_id, stream in self.streams.items() if stream.end is None]
        stats = self.scheduler.stats()
        assert not left, f"nothing moves, and {left} have not ended: {stats}"
        assert (stats.running, stats.queue_requests, stats.blocks_in_flight, stats.blocks_used) == (0, 0, 0, 0), stats
        assert stats.blocks_free + stats.blocks_cached == stats.blocks_total
        assert not self.executor.lanes
        assert not self.executor.copies.pending, "copies that nobody waited for"
        assert self.executor.counts.num_mismatches == 0
        for stream in self.streams.values():
            self.check_stream(stream)

    def check_stream(self, stream: Stream) -> None:
        """Its ids are the oracle's, whole when it ended by itself, and no more was cached than can be."""
        spec, end = stream.spec, stream.end
        assert end is not None
        expected = self.expected(stream)
        if end.reason in GOOD_ENDS:
            assert stream.ids == expected, f"stream {spec.seq_id}"
        else:
            assert stream.ids == expected[: len(stream.ids)], f"stream {spec.seq_id}"
        size = self.executor.geometry.block_size
        assert 0 <= end.num_cached_tokens <= (len(spec.prompt_ids) + len(spec.emitted_ids) - 1) // size * size

    def expected(self, stream: Stream) -> list[int]:
        spec, geometry = stream.spec, self.executor.geometry
        room = min(geometry.max_model_len, geometry.num_blocks * geometry.block_size) - len(spec.prompt_ids)
        return expected_output(
            spec.prompt_ids,
            max_tokens=min(spec.max_tokens, room),
            vocab_size=geometry.vocab_size,
            seed=spec.sampling.seed,
            choice=spec.choice_index,
            stop_token_ids=spec.stop_token_ids,
        )

    def outputs(self) -> dict[int, list[int]]:
        return {seq_id: stream.ids for seq_id, stream in self.streams.items()}

    def _tenant_of(self, lane: Lane) -> Hashable:
        return self.streams[lane.seed].tenant

    def _take(self, events: list[Event]) -> None:
        for event in events:
            if isinstance(event, TokensEvent):
                self._take_tokens(event)
            else:
                stream = self.streams[event.seq_id]
                assert stream.end is None, "two ends"
                stream.end = event
                assert event.num_output_tokens == len(stream.ids)

    def _take_tokens(self, event: TokensEvent) -> None:
        tokens = iter(event.token_ids)
        counts = event.counts or [1] * len(event.seq_ids)
        for seq_id, first, count in zip(event.seq_ids, event.first_index, counts, strict=True):
            stream = self.streams[seq_id]
            assert stream.end is None, "a token after the end"
            assert first == len(stream.ids), "a gap or a repeated token"
            stream.ids += [next(tokens) for _ in range(count)]
