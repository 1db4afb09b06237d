"""`Scheduler`: decides what runs next, as values. Two verbs, `schedule` and `apply`; same calls, same answers.

What may grow here: calls to named functions. `Session.plan` is the list of the phases of a plan and `apply` that of a
result; a new feature is a module of its own, and one line there. Rules about the order of waiting sequences belong in
`queues`, who starts in `admission`, who gets blocks in `growth`, who makes room in `preemption`, what a token means in
`results`, states in `sequence`. What one executor holds is a `Session`: several executors are several of those beside
one queue, not flags in here.

The life of a sequence in numbers: `submit` makes it WAITING; `schedule` starts it (lane, blocks, Admit) and covers its
positions with rows; `apply` appends what the rows brought. A plan is made before the results of up to
`pipeline_depth - 1` earlier ones are in, so what is planned and what is known differ:

    positions   0 ........ computed ....... num_planned           (rows up to here are in plans)
    tokens      0 ................ known ........ num_planned + 1 (known, or in flight)

Invariants (`invariants.check` tests them, the property tests after each step):
* a sequence is in exactly one place: waiting queue or running set, or it has ended and is nowhere;
* running sequences have a lane and slots for every planned position, waiting ones neither;
* every block and lane is free, owned once, or held by the fence of a plan in flight;
* no plan exceeds the token budget or the seats; rows name lanes that were admitted in this or an earlier plan;
* a plan never asks for a token beyond a sequence's limit.
Progress: the strongest running sequence always gets its blocks, one sequence alone always fits (`limits`), and nobody
is preempted more than `MAX_PREEMPTIONS` times for memory or priority. So what is admitted finishes.
"""

from __future__ import annotations

from cache_svc.blocks.residency import ResidencySampler
from scheduler_svc.core.costs import block_costs
from scheduler_svc.core.deadlines import Deadlines
from scheduler_svc.core.events import Event, FinishReason, Refusal
from scheduler_svc.core.invariants import check, check_counts
from scheduler_svc.core.limits import check_config, combine, refuse_length
from scheduler_svc.core.mirror import state_digest
from scheduler_svc.core.pace import step_pace
from scheduler_svc.core.params import ExecutorLimits, QueuePolicy, SchedulerConfig, SeqId, SequenceSpec
from scheduler_svc.core.plan import StepPlan, StepResult, StepStatus
from scheduler_svc.core.preemption import Action, is_finishing
from scheduler_svc.core.queue_orders import arrival_order
from scheduler_svc.core.queues import WaitingQueue
from scheduler_svc.core.refusal import refuse
from scheduler_svc.core.results import ResultMismatchError, check_shape, finished_event, take_result
from scheduler_svc.core.running import InFlight, RunningSet
from scheduler_svc.core.sequence import Sequence, SequenceState
from scheduler_svc.core.session import Lasting, Session
from scheduler_svc.core.stats import SchedulerStats, collect
from scheduler_svc.core.suspects import Suspects

MAX_FAILED_STEPS = 3
"""Steps in which a sequence may fail together with its whole batch without a token in between, before it is given up.

Without a bound, one poisonous sequence would fail the executor for ever.
"""

_BAD_ENDS = frozenset({FinishReason.NUMERICAL, FinishReason.INTERNAL})
"""Ends that say something about the sequence's blocks: nobody else may use them."""


class Scheduler:
    """One queue and the running set of at most one executor.

    Every verb that returns events returns all that have come up since the last such call. Sequences that ended inside
    `submit` or `schedule` (a resubmission that was complete, a deadline) are among them; `next_deadline` is then in
    the past, so that a loop which sleeps until it comes back for them.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        check_config(config)
        self.config = config
        self._sequences: dict[SeqId, Sequence] = {}
        self._waiting = WaitingQueue(config.queue_policy)
        self._deadlines = Deadlines(self._sequences)
        self._suspects = Suspects(self._sequences)
        self._lasting = Lasting(config, self._waiting, self._suspects)
        self._counters = self._lasting.counters
        self._session: Session | None = None
        self._left_in_flight: list[InFlight] = []
        """Plans that were in flight when the last executor was lost."""
        self._next_step_id = 1
        self._events: list[Event] = []

    @property
    def residency(self) -> ResidencySampler:
        """How long kept blocks stay, and how soon they are used again; over all sessions."""
        return self._lasting.residency

    @property
    def _running(self) -> RunningSet | None:
        return None if self._session is None else self._session.running

    # Executors

    @property
    def next_step_id(self) -> int:
        """The id of the next plan; ids are consecutive over the life of the scheduler, sessions included."""
        return self._next_step_id

    @property
    def num_inflight_plans(self) -> int:
        """Plans whose results are not in."""
        return 0 if self._running is None else len(self._running.inflight)

    def attach_executor(self, limits: ExecutorLimits, now: float, *, predecessor_died: bool = False) -> list[Event]:
        """Starts a session on an executor with empty lanes; detaches an earlier one first.

        Sequences that can never fit there end with NO_FIT and, where the prompt alone is too long, with the refusal
        that says so. With `predecessor_died`, those who had rows in flight on the executor before are suspected, and
        end with POISON the second time (`suspects`): only who comes next shows whether that one died or was away for a
        moment. ValueError, changing nothing, for limits below one.
        """
        step_limits = combine(self.config, limits)
        if self._session is not None:
            self._lose_executor(self._session)
        poisonous = self._suspects.executor_died(self._left_in_flight, now) if predecessor_died else []
        self._left_in_flight = []
        self._session = Session(step_limits, self._next_step_id - 1, self._lasting)
        for seq in poisonous:
            self._finish(seq, FinishReason.POISON, now)
        for seq in list(self._sequences.values()):
            seq.limit_tokens(step_limits.token_limit)
            if seq.token_limit <= len(seq.token_ids):
                self._finish(seq, FinishReason.NO_FIT, now, refuse_length(step_limits, seq.prompt_len))
        return self._take_events()

    def update_rates(self, executor: ExecutorLimits) -> None:
        """Weighs swapping and computing, and cuts prompts, by these rates from now on. Nothing without an executor."""
        if self._running is not None:
            self._running.reprice(block_costs(executor), step_pace(self.config.max_step_ms, executor))

    def detach_executor(self, now: float) -> list[Event]:
        """The executor is gone: what ran waits to be recomputed, plans in flight are forgotten. Idempotent."""
        if self._session is not None:
            self._lose_executor(self._session)
        return self._take_events()

    # Sequences

    def submit(self, spec: SequenceSpec, now: float) -> Refusal | None:
        """Queues a sequence, or says why not. ValueError for a spec that should not have come here."""
        if not spec.prompt_ids or spec.max_tokens < 1 or spec.seq_id in self._sequences:
            raise ValueError(f"Got {spec.seq_id = }, {len(spec.prompt_ids)} prompt tokens, {spec.max_tokens = }")
        refusal = self._suspects.refusal(spec.prompt_ids, now) or refuse(
            self.config, self._waiting, None if self._running is None else self._running.limits, spec
        )
        if refusal is not None:
            return refusal
        self._enter(spec, now)
        return None

    def take_over(self, broken: Scheduler, now: float) -> None:
        """Queues every live sequence of a scheduler whose books are wrong, to go on behind what it has given.

        Nothing is refused for want of room, and nothing but the sequences' own records and events is read.
        """
        self._events += broken._take_events()
        for seq in sorted(broken._sequences.values(), key=arrival_order):
            if seq.state is not SequenceState.FINISHED:
                self._enter(seq.continuation(), now)

    def _enter(self, spec: SequenceSpec, now: float) -> None:
        is_fcfs = self.config.queue_policy is QueuePolicy.FCFS
        seq = Sequence(spec, priority=0 if is_fcfs else spec.priority)
        if self._session is not None:
            seq.limit_tokens(self._session.running.limits.token_limit)
            self._session.hits.submitted(seq)
        self._sequences[seq.seq_id] = seq
        self._suspects.submitted(seq, now)
        self._waiting.push(seq)
        self._counters.submitted += 1
        reason = seq.end_reason()
        if reason is not None:
            self._finish(seq, reason, now)
        else:
            self._deadlines.add(seq)

    def cancel(self, seq_id: SeqId, now: float) -> list[Event]:
        """Ends a sequence in whatever state it is; nothing happens for one that has ended or never was."""
        seq = self._sequences.get(seq_id)
        if seq is not None:
            self._finish(seq, FinishReason.CANCELLED, now)
        return self._take_events()

    def expire(self, now: float) -> list[Event]:
        """Ends all sequences whose deadline is at or before `now`. O(1) when there are none."""
        self._drop_overdue(now)
        return self._take_events()

    def next_deadline(self) -> float | None:
        """When to call `expire` next; -inf when events wait to be taken, None when nothing is due ever."""
        return float("-inf") if self._events else self._deadlines.next()

    # The two verbs

    def schedule(self, now: float) -> StepPlan | None:
        """The next plan. None: nothing to do, or `pipeline_depth` plans are in flight, or there is no executor."""
        session = self._session
        if session is None or len(session.running.inflight) >= self.config.pipeline_depth:
            return None
        self._drop_overdue(now)
        plan = session.plan(self._next_step_id, now)
        if plan is not None:
            self._next_step_id += 1
        return plan

    def apply(self, result: StepResult, now: float) -> list[Event]:
        """Takes the result of the oldest plan in flight.

        Results of plans that are not in flight are ignored and counted. Raises ResultMismatchError, changing nothing,
        for one that skips a plan or does not fit its rows: the caller must then start a new session. A FAILED step
        voids all lanes: it is as losing the executor and attaching it again, and the caller starts a new session.
        """
        running = self._running
        if running is None or not running.inflight or not self._is_in_flight(running, result.step_id):
            self._counters.stale_results += 1
            return self._take_events()
        record = running.inflight[0]
        if record.step_id != result.step_id:
            raise ResultMismatchError(f"got the result of step {result.step_id} before that of {record.step_id}")
        check_shape(record, result)
        if result.status is StepStatus.FAILED:
            self._fail_step(record, now)
            return self._take_events()
        running.memory.now = now
        running.inflight.popleft()
        running.fences.passed(record.step_id)
        outcome = take_result(record, result)
        self._counters.generated_tokens += outcome.num_tokens
        self._events.extend(outcome.tokens)
        running.settle_chunks(record, {seq.seq_id for seq, reason in outcome.ended if reason in _BAD_ENDS})
        for step_id in result.finished_copy_steps:
            if not running.memory.copies.finished(step_id):
                self._counters.stale_results += 1
        for seq, reason in outcome.ended:
            self._finish(seq, reason, now)
        return self._take_events()

    def preempt(self, seq_id: SeqId, action: Action) -> bool:
        """Makes a running sequence give up its blocks before the next plan, whatever it costs; for tests and operators.

        False, changing nothing, for one that does not run, or that has its last row in flight. Such preemptions do not
        count towards the limit of `MAX_PREEMPTIONS`. SWAP becomes RECOMPUTE where the host tier has no room.
        """
        seq = self._sequences.get(seq_id)
        if seq is None or seq.state is not SequenceState.RUNNING or is_finishing(seq):
            return False
        assert self._session is not None, "it runs"
        self._session.preempter.give_up(seq, action, None)
        return True

    def flush_prefix_cache(self) -> int:
        """Forgets all blocks that are kept for reuse, in both tiers; returns how many."""
        return 0 if self._running is None else self._running.memory.flush()

    # Reading

    def knows(self, seq_id: SeqId) -> bool:
        """Whether the sequence was submitted and has not ended."""
        return seq_id in self._sequences

    def check_invariants(self) -> list[str]:
        """What is wrong with the books, one line each; empty when nothing is. O(sequences + blocks)."""
        return check(self._sequences, self._waiting, self._running, self.config.pipeline_depth)

    def check_conservation(self) -> list[str]:
        """What is wrong with the counts of both tiers, one line each; empty when nothing is. O(1)."""
        return [] if self._running is None else check_counts(self._running.memory)

    def state_digest(self) -> int:
        """Digest of the executor's lanes before the next plan; right after `schedule` only. See `mirror`."""
        return 0 if self._running is None else state_digest(self._running)

    def stats(self) -> SchedulerStats:
        """Gauges and counters, O(1)."""
        return collect(self._waiting, self._running, self._counters)

    # Inside

    def _drop_overdue(self, now: float) -> None:
        while (due := self._deadlines.pop_due(now)) is not None:
            self._finish(*due, now)

    def _is_in_flight(self, running: RunningSet, step_id: int) -> bool:
        return running.inflight[0].step_id <= step_id < self._next_step_id

    def _lose_executor(self, session: Session) -> None:
        """Everything that ran waits again; nothing is expected from the executor any more."""
        self._left_in_flight = list(session.running.inflight)
        self._counters.end_session(session.running.memory)
        self.residency.flush_samples()
        lost = [seq for seq in self._sequences.values() if seq.state in (SequenceState.RUNNING, SequenceState.SWAPPED)]
        for seq in sorted(lost, key=arrival_order):
            session.preempter.lose(seq)
        for seq in self._sequences.values():
            seq.last_step_id = 0
            seq.forecast = None  # what it costs from here on is the loss's doing
        self._session = None
        self._counters.executor_losses += 1

    def _fail_step(self, record: InFlight, now: float) -> None:
        """Voids all lanes and starts anew on the same executor, without whom every step of a sequence fails."""
        session = self._session
        assert session is not None
        self._lose_executor(session)
        for seq in record.rows:
            if seq.state is SequenceState.FINISHED:
                continue
            if len(seq.token_ids) > seq.num_known_at_failure:
                seq.num_failed_steps = 0
                seq.num_known_at_failure = len(seq.token_ids)
            seq.num_failed_steps += 1
            if seq.num_failed_steps >= MAX_FAILED_STEPS:
                self._finish(seq, FinishReason.INTERNAL, now)
        self._session = Session(session.running.limits, self._next_step_id - 1, self._lasting)

    def _finish(self, seq: Sequence, reason: FinishReason, now: float, refusal: Refusal | None = None) -> None:
        """Ends a sequence from any state and says so; its blocks and lane go to their fences."""
        running = self._running
        if seq.state is SequenceState.RUNNING:
            assert running is not None
            running.take_away(seq, is_sound=reason not in _BAD_ENDS)
        else:
            self._waiting.remove(seq)
            if seq.stash is not None:
                assert running is not None
                running.memory.drop_stash(seq.stash)
        if reason in _BAD_ENDS and running is not None:
            running.memory.distrust(seq.prefix.keys)
        seq.finish(reason)
        if reason in (FinishReason.STOP, FinishReason.LENGTH):
            self._lasting.lengths.finished(seq.num_output_tokens, at_limit=reason is FinishReason.LENGTH)
        self._suspects.ended(seq, reason, now)
        del self._sequences[seq.seq_id]
        self._counters.finished += 1
        self._events.append(finished_event(seq, reason, now, refusal))

    def _take_events(self) -> list[Event]:
        events, self._events = self._events, []
        return events
