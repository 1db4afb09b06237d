"""What the engine does when a peer, a message or the core itself goes wrong."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pagemill.columns import pack
from pagemill.engine.v1 import executor_pb2 as ex
from pagemill.engine.v1 import frontend_pb2 as fe
from pagemill.framing import PROTOCOL, Channel
from pagemill.zmq_links import new_identity
from scheduler_svc.config import EngineConfig
from scheduler_svc.core.params import SchedulerConfig
from scheduler_svc.core.preemption import Action
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.sequence import SequenceState
from scheduler_svc.engine import MAX_REPLACED, Phase
from tests.integration.test_engine import assert_oracle, submit_many
from tests.oracles.base import Geometry
from tests.oracles.chain import ChainExecutor
from tests.oracles.kv import KvExecutor
from tests.oracles.rig import LockstepRig
from tests.oracles.scripted import Script, ScriptedExecutor

POOL = Geometry(num_blocks=120)


def busy_rig(kind: Any = KvExecutor, count: int = 24, **kwargs: Any) -> tuple[LockstepRig, Any, Any]:
    """A rig in the middle of running streams."""
    rig = LockstepRig()
    executor = rig.add_executor(kind, POOL, **kwargs)
    gateway = rig.add_gateway()
    submit_many(gateway, count, random.Random(3))
    rig.until(lambda: sum(len(record.ids) for record in gateway.streams.values()) > 60)
    return rig, executor, gateway


def assert_all(rig: LockstepRig, gateway: Any) -> None:
    rig.finish()
    for record in gateway.streams.values():
        assert_oracle(record)
        assert record.num_doubled == 0
    rig.assert_clean()


# Executors


def test_streams_go_on_at_the_next_executor_after_a_kill() -> None:
    rig, executor, gateway = busy_rig()
    rig.kill_executor(executor)
    rig.pass_time(0.5)
    assert rig.engine.executors.session is None
    assert not gateway.status.ready
    rig.add_executor(KvExecutor, Geometry(num_blocks=90, block_size=16), name="second")
    assert_all(rig, gateway)
    assert gateway.status.kv_capacity_tokens == 90 * 16


def test_frozen_executor_is_given_up_after_its_lease_and_its_late_results_are_dropped() -> None:
    rig, executor, gateway = busy_rig()
    executor.silent = True
    rig.pass_time(2.5)
    assert rig.engine.executors.session is None
    rig.add_executor(KvExecutor, POOL, name="second")
    rig.turn(5)
    executor.silent = False  # it sends what it had, of an epoch that is over
    stale = rig.engine.counters.stale["no_session"]
    rig.until(lambda: executor.rejected is not None, limit=3_000)  # at its own lease it says hello, too late
    assert rig.engine.counters.stale["no_session"] > stale
    assert "has an executor already" in executor.rejected
    rig.executors.remove(executor)
    assert_all(rig, gateway)


def test_step_that_never_ends_is_given_up_though_heartbeats_come() -> None:
    rig = LockstepRig(config=EngineConfig(step_timeout_s=5.0))
    executor = rig.add_executor(step_s=1e9)
    gateway = rig.add_gateway()
    record = gateway.submit([1, 2, 3])
    rig.pass_time(4.5)
    assert rig.engine.executors.session is not None
    rig.pass_time(1.5)
    assert rig.engine.executors.session is None
    rig.kill_executor(executor)
    rig.add_executor()
    rig.finish()
    assert_oracle(record)


def test_failed_step_begins_a_new_session() -> None:
    rig = LockstepRig()
    executor = rig.add_executor(ScriptedExecutor)
    executor.fail_steps = {4, 9}
    gateway = rig.add_gateway()
    record = gateway.submit([1], max_tokens=20)
    rig.finish()
    assert record.ids == [7] * 20
    assert executor.num_sessions == 3
    rig.assert_clean()


def test_sequence_that_always_fails_its_step_ends() -> None:
    rig = LockstepRig()
    executor = rig.add_executor(ScriptedExecutor)
    executor.fail_steps = set(range(1, 1000))
    gateway = rig.add_gateway()
    record = gateway.submit([1])
    rig.turn_s = 0.05
    rig.finish()
    assert record.ended.error == fe.STREAM_ERROR_INTERNAL
    rig.assert_clean()


def lose_once(results: list[int]) -> Callable[[ex.StepResult], list[ex.StepResult]]:
    def change(result: ex.StepResult) -> list[ex.StepResult]:
        if result.step_id in results:
            results.remove(result.step_id)
            return []
        return [result]

    return change


def test_lost_doubled_and_overtaken_results_change_nothing() -> None:
    rig = LockstepRig()
    executor = rig.add_executor(ScriptedExecutor)
    gateway = rig.add_gateway()
    executor.change_result = lambda result: [result, result] if result.step_id % 3 == 0 else [result]
    first = gateway.submit([1], max_tokens=20)
    rig.finish()
    assert rig.engine.counters.stale["duplicate_result"] > 3
    executor.change_result = lose_once([rig.engine.core.next_step_id + 4])
    second = gateway.submit([2], max_tokens=20)
    rig.finish()
    assert rig.engine.counters.stale["result_gap"] == 1
    assert first.ids == second.ids == [7] * 20
    assert executor.num_sessions == 1
    rig.assert_clean()


def test_last_result_that_is_lost_is_asked_for_again() -> None:
    rig = LockstepRig(core=SchedulerConfig(pipeline_depth=1))
    executor = rig.add_executor(ScriptedExecutor)
    executor.change_result = lose_once([3])
    gateway = rig.add_gateway()
    record = gateway.submit([1], max_tokens=20)
    rig.turn(50)
    rig.pass_time(2.5)
    rig.finish()
    assert record.ids == [7] * 20
    assert (executor.num_sessions, rig.engine.counters.plans_resent) == (1, 1)
    rig.assert_clean()


def test_result_that_is_gone_for_good_costs_a_session() -> None:
    rig = LockstepRig()
    executor = rig.add_executor(ScriptedExecutor)
    executor.change_result = lambda result: [] if result.step_id == 5 else [result]
    gateway = rig.add_gateway()
    record = gateway.submit([1], max_tokens=20)
    rig.turn(50)
    rig.pass_time(10)
    rig.finish()
    assert record.ids == [7] * 20
    assert executor.num_sessions == 2
    rig.assert_clean()


def test_lost_plan_is_sent_again_after_the_nack() -> None:
    rig = LockstepRig()
    executor = rig.add_executor(ScriptedExecutor)
    executor.drop_plans = {4}
    gateway = rig.add_gateway()
    record = gateway.submit([1], max_tokens=20)
    rig.finish()
    assert record.ids == [7] * 20
    assert executor.num_sessions == 1
    assert rig.engine.counters.plans_resent >= 1
    rig.assert_clean()


@pytest.mark.parametrize(
    "spoil",
    [
        lambda r: ex.StepResult(step_id=r.step_id, status=ex.STEP_STATUS_OK, token_ids=b"123"),
        lambda r: ex.StepResult(step_id=r.step_id, status=ex.STEP_STATUS_OK, token_ids=pack([1000])),
        lambda r: ex.StepResult(step_id=r.step_id, status=ex.STEP_STATUS_OK, token_ids=pack([-2])),
        lambda r: ex.StepResult(step_id=r.step_id, status=ex.STEP_STATUS_OK, token_ids=pack([1, 2, 3])),
        lambda r: ex.StepResult(step_id=r.step_id, status=ex.STEP_STATUS_OK),
        lambda r: ex.StepResult(step_id=r.step_id, token_ids=r.token_ids),
        lambda r: ex.StepResult(step_id=r.step_id + 50, status=ex.STEP_STATUS_OK, token_ids=r.token_ids),
        lambda r: ex.StepResult(
            step_id=r.step_id, status=ex.STEP_STATUS_OK, token_ids=r.token_ids, num_tokens=pack([0])
        ),
    ],
)
def test_result_that_cannot_be_costs_a_session_and_no_token(spoil: Callable[[ex.StepResult], ex.StepResult]) -> None:
    rig = LockstepRig()
    executor = rig.add_executor(ScriptedExecutor)
    executor.change_result = lambda result: [spoil(result)] if executor.num_steps == 4 else [result]
    gateway = rig.add_gateway()
    record = gateway.submit([1], max_tokens=20)
    rig.finish()
    assert record.ids == [7] * 20
    assert executor.num_sessions == 2
    rig.assert_clean()


def test_failed_row_ends_its_stream_only() -> None:
    rig = LockstepRig()
    executor = rig.add_executor(ScriptedExecutor)
    executor.scripts[(1,)] = Script(errors={3: ex.ROW_ERROR_CODE_NUMERICAL})
    executor.scripts[(2,)] = Script(errors={0: ex.ROW_ERROR_CODE_INTERNAL})
    gateway = rig.add_gateway()
    numerical, internal, good = (gateway.submit([prompt]) for prompt in (1, 2, 3))
    rig.finish()
    assert (numerical.ended.error, len(numerical.ids)) == (fe.STREAM_ERROR_NUMERICAL, 3)
    assert (internal.ended.error, len(internal.ids)) == (fe.STREAM_ERROR_INTERNAL, 0)
    assert good.ids == [7] * 16
    rig.assert_clean()


def test_several_tokens_per_row_are_cut_at_the_stop_and_at_the_limit() -> None:
    rig = LockstepRig()
    executor = rig.add_executor(ScriptedExecutor)
    executor.scripts[(1,)] = Script(ids=list(range(100, 140)), run=3)
    gateway = rig.add_gateway()
    stopped = gateway.submit([1], max_tokens=30, stop_token_ids=[110])
    limited = gateway.submit([1], max_tokens=14)
    rig.finish()
    assert stopped.ids == list(range(100, 111))
    assert stopped.ended.reason == fe.END_REASON_STOP
    assert limited.ids == list(range(100, 114))
    assert limited.ended.reason == fe.END_REASON_LENGTH


# Hellos


def test_second_executor_is_rejected_with_the_reason() -> None:
    rig, _, gateway = busy_rig()
    second = rig.add_executor(name="second")
    rig.turn(3)
    assert "has an executor already (executor/oracle)" in second.rejected
    rig.executors.remove(second)
    assert_all(rig, gateway)


def test_models_must_match_whoever_comes_first() -> None:
    rig = LockstepRig()
    rig.add_gateway()
    rig.turn(3)
    wrong = rig.add_executor(ChainExecutor, Geometry(fingerprint="other"))
    rig.turn(3)
    assert "other" in wrong.rejected
    rig.executors.remove(wrong)
    gateway = rig.add_gateway("second", fingerprint="other")
    rig.turn(3)
    assert "is not the other gateways'" in gateway.rejected
    rig.add_executor()
    rig.turn(3)
    gateway = rig.add_gateway("third", fingerprint="other")
    rig.turn(3)
    assert "is not the executor's" in gateway.rejected


@pytest.mark.parametrize("field", ["block_size", "num_blocks", "max_rows", "max_tokens", "num_lanes", "max_model_len"])
def test_executor_that_offers_nothing_is_rejected(field: Any) -> None:
    rig = LockstepRig()
    executor = rig.add_executor(ChainExecutor, replace(Geometry(), **dict.fromkeys([field], cast(Any, 0))))
    rig.turn(3)
    assert "expected 1 to" in executor.rejected


@pytest.mark.parametrize(
    ("error", "text"), [(ValueError("no such block size"), "no such block size"), (OverflowError("secret"), "Overflow")]
)
def test_executor_that_cannot_be_attached_hears_why(
    monkeypatch: pytest.MonkeyPatch, error: Exception, text: str
) -> None:
    rig = LockstepRig()

    def attach(*args: Any, **kwargs: Any) -> Any:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(rig.engine.core, "attach_executor", attach)
        executor = rig.add_executor()
        rig.turn(3)
    assert text in executor.rejected
    assert "secret" not in executor.rejected
    assert rig.engine.executors.session is None
    rig.kill_executor(executor)
    rig.add_executor(name="second")
    record = rig.add_gateway().submit([1])
    rig.finish()
    assert_oracle(record)


def test_hello_with_an_impossible_epoch_or_protocol_is_rejected() -> None:
    rig = LockstepRig()
    executor = rig.add_executor()
    executor.channel.epoch = 2**63
    rig.turn(2)
    assert rig.engine.executors.session is None
    link = rig.executor_hub.connect(new_identity("executor", "future"))
    channel: Channel[ex.ExecutorEnvelope] = Channel(ex.ExecutorEnvelope)
    link.send(channel.pack(hello=ex.ExecutorHello(protocol_min=PROTOCOL + 1, protocol_max=PROTOCOL + 2)))
    rig.turn(2)
    frame = link.recv()
    assert frame is not None
    envelope = channel.unpack(frame)
    assert envelope is not None
    assert f"speaks protocol {PROTOCOL}" in envelope.reject.reason


def test_epochs_rise_above_what_a_peer_has_seen() -> None:
    rig = LockstepRig()
    executor = rig.add_executor()
    executor.channel.epoch = 5_000
    gateway = rig.add_gateway()
    rig.turn(5)
    assert executor.channel.epoch > 5_000
    assert gateway.channel.epoch != executor.channel.epoch
    record = gateway.submit([1])
    rig.finish()
    assert_oracle(record)


def test_executor_that_loads_long_is_named(caplog: pytest.LogCaptureFixture) -> None:
    rig = LockstepRig(config=EngineConfig(hello_timeout_s=3.0))
    link = rig.executor_hub.connect(new_identity("executor", "gpu-1"))
    channel: Channel[ex.ExecutorEnvelope] = Channel(ex.ExecutorEnvelope)
    for _ in range(40):
        beat = ex.Heartbeat(state=ex.EXECUTOR_STATE_LOADING, percent=43)
        link.send(channel.pack(heartbeat=beat))
        rig.pass_time(0.1)
    facts = [record.kv for record in caplog.records if record.message == "executor has not said hello"]  # type: ignore[attr-defined]
    assert [(fact["executor"], fact["state"], fact["percent"]) for fact in facts] == [("executor/gpu-1", "LOADING", 43)]


# Admission


def test_work_queues_for_as_long_as_an_executor_is_loading() -> None:
    """Not when it is overdue, nor when it has fallen silent."""
    rig = LockstepRig(config=EngineConfig(no_executor_grace_s=2.0, hello_timeout_s=6.0, lease_s=1.0))
    link = rig.executor_hub.connect(new_identity("executor", "gpu-1"))
    channel: Channel[ex.ExecutorEnvelope] = Channel(ex.ExecutorEnvelope)
    gateway = rig.add_gateway()
    queued = gateway.submit([1])

    def load(seconds: float) -> None:
        for _ in range(round(seconds / 0.1)):
            link.send(channel.pack(heartbeat=ex.Heartbeat(state=ex.EXECUTOR_STATE_LOADING)))
            rig.pass_time(0.1)

    load(5)
    late = gateway.submit([2])
    load(0.5)
    assert not queued.is_over
    assert late.num_accepted == 1
    load(1.5)  # overdue
    assert queued.ended.error == late.ended.error == fe.STREAM_ERROR_NO_EXECUTOR
    rig.add_executor()
    rig.turn(3)
    rig.kill_executor(rig.executors[0])
    rig.pass_time(2)  # forgotten
    load(1.5)
    again = gateway.submit([3])
    rig.pass_time(0.5)
    assert not again.is_over
    rig.pass_time(3)  # silent
    assert again.is_over


def test_work_does_not_wait_for_ever_for_executors_that_die_while_they_load() -> None:
    """Each is a new process with a time of its own to load."""
    rig = LockstepRig(config=EngineConfig(no_executor_grace_s=2.0, hello_timeout_s=6.0, lease_s=1.0))
    queued = rig.add_gateway().submit([1])
    for number in range(3):
        link = rig.executor_hub.connect(new_identity("executor", f"gpu-{number}"))
        channel: Channel[ex.ExecutorEnvelope] = Channel(ex.ExecutorEnvelope)
        for _ in range(25):
            link.send(channel.pack(heartbeat=ex.Heartbeat(state=ex.EXECUTOR_STATE_LOADING)))
            rig.pass_time(0.1)
    assert queued.ended.error == fe.STREAM_ERROR_NO_EXECUTOR


def test_work_queues_during_the_grace_and_is_refused_after_it() -> None:
    rig = LockstepRig(config=EngineConfig(no_executor_grace_s=5.0))
    gateway = rig.add_gateway()
    early = gateway.submit([1])
    rig.pass_time(3)
    assert early.num_accepted == 1
    assert not early.is_over
    rig.pass_time(3)
    assert (early.ended.error, early.ended.retry_after_ms) == (fe.STREAM_ERROR_NO_EXECUTOR, 1000)
    late = gateway.submit([2])
    rig.turn(3)
    assert late.rejected.error == fe.STREAM_ERROR_NO_EXECUTOR
    assert late.rejected.retry_after_ms > 0
    rig.add_executor()
    rig.turn(3)  # its hello
    good = gateway.submit([3])
    rig.finish()
    assert good.rejected is None
    assert_oracle(good)
    rig.assert_clean()


def test_streams_that_had_tokens_outlive_the_grace() -> None:
    rig, executor, gateway = busy_rig()
    rig.kill_executor(executor)
    started = [record for record in gateway.streams.values() if record.ids]
    rig.pass_time(15)
    assert all(record.ended is None or record.ended.reason for record in started)
    rig.add_executor(KvExecutor, POOL, name="second")
    rig.finish()
    for record in started:
        assert_oracle(record)
    rig.assert_clean()


def test_full_queue_says_when_to_come_again() -> None:
    rig = LockstepRig(core=SchedulerConfig(max_queue_requests=5, max_num_seqs=1))
    rig.add_executor(step_s=0.1)
    gateway = rig.add_gateway()
    rig.turn(3)
    first = gateway.submit([1] * 50, max_tokens=300)
    rig.until(lambda: len(first.ids) > 10)
    rest = [gateway.submit([1] * 100, max_tokens=100) for _ in range(10)]
    rig.turn(5)
    refused = [record.rejected for record in rest if record.rejected]
    assert len(refused) == 5
    assert all(answer.error == fe.STREAM_ERROR_QUEUE_FULL for answer in refused)
    # 500 tokens wait; ten steps a second, the first one with fifty tokens, came to about fifty a second so far.
    assert all(5_000 < answer.retry_after_ms <= 60_000 for answer in refused)


def test_a_queue_timeout_says_when_to_come_again() -> None:
    rig = LockstepRig(core=SchedulerConfig(max_num_seqs=1))
    rig.add_executor(step_s=0.1)
    gateway = rig.add_gateway()
    rig.turn(3)
    first = gateway.submit([1] * 50, max_tokens=300)
    rig.until(lambda: len(first.ids) > 10)
    others = [gateway.submit([1] * 100, max_tokens=100) for _ in range(5)]
    impatient = gateway.submit([1] * 100, max_queue_ms=50)
    rig.until(lambda: impatient.is_over)
    assert impatient.ended.error == fe.STREAM_ERROR_QUEUE_TIMEOUT
    # As above: the 500 tokens of the others still wait.
    assert 5_000 < impatient.ended.retry_after_ms <= 60_000
    assert not any(record.is_over for record in others)


def test_deadlines_and_queue_limits() -> None:
    rig = LockstepRig(core=SchedulerConfig(max_num_seqs=1))
    executor = rig.add_executor(step_s=0.01)
    gateway = rig.add_gateway()
    rig.turn(3)
    past = gateway.submit([1], deadline_ms=0)
    running = gateway.submit([2], max_tokens=400, deadline_ms=300)
    rig.until(lambda: len(running.ids) > 2)
    queued = gateway.submit([3], max_queue_ms=50)
    waiting = gateway.submit([4], deadline_ms=50)
    rig.until(lambda: queued.is_over and waiting.is_over)
    steps = executor.num_steps
    rig.finish()
    assert past.rejected.error == fe.STREAM_ERROR_DEADLINE
    assert queued.ended.error == fe.STREAM_ERROR_QUEUE_TIMEOUT
    assert waiting.ended.error == fe.STREAM_ERROR_DEADLINE
    assert not waiting.ended.HasField("retry_after_ms")
    assert running.ended.error == fe.STREAM_ERROR_DEADLINE
    assert 20 <= len(running.ids) <= 31
    assert executor.num_steps - steps < 31
    rig.assert_clean()


def test_prompts_that_can_never_fit_are_refused_with_the_numbers() -> None:
    rig = LockstepRig()
    rig.add_executor(ChainExecutor, Geometry(num_blocks=10, block_size=8, max_model_len=100))
    gateway = rig.add_gateway()
    rig.turn(3)
    too_big, too_long = gateway.submit([1] * 80), gateway.submit([1] * 100)
    fits = gateway.submit([1] * 70, max_tokens=50)
    rig.finish()
    assert too_big.rejected.error == fe.STREAM_ERROR_PROMPT_EXCEEDS_KV_CAPACITY
    assert "80 tokens" in too_big.rejected.message
    assert too_long.rejected.error == fe.STREAM_ERROR_CONTEXT_LENGTH
    assert (len(fits.ids), fits.ended.reason) == (10, fe.END_REASON_LENGTH)
    rig.assert_clean()


def test_prompts_queued_before_an_executor_that_has_no_room_end_as_if_refused_by_it() -> None:
    rig = LockstepRig()
    gateway = rig.add_gateway()
    rig.turn(3)
    early = [gateway.submit([1] * 80), gateway.submit([1] * 100)]
    rig.turn(3)
    assert all(record.num_accepted for record in early)
    rig.add_executor(ChainExecutor, Geometry(num_blocks=10, block_size=8, max_model_len=100))
    rig.until(lambda: all(record.is_over for record in early))
    late = [gateway.submit([1] * 80), gateway.submit([1] * 100)]
    rig.finish()
    assert [(r.ended.error, r.ended.message) for r in early] == [(r.rejected.error, r.rejected.message) for r in late]
    assert early[1].ended.error == fe.STREAM_ERROR_CONTEXT_LENGTH
    rig.assert_clean()


@pytest.mark.parametrize(
    "change",
    [
        {"prompt_ids": b""},
        {"prompt_ids": b"123"},
        {"prompt_ids": pack([-1])},
        {"prompt_ids": pack([1000])},
        {"emitted_ids": pack([5000])},
        {"max_tokens": 0},
        {"priority": 2**30},
    ],
)
def test_submits_that_cannot_be_are_refused(change: dict[str, Any]) -> None:
    rig = LockstepRig()
    rig.add_executor()
    gateway = rig.add_gateway()
    rig.turn(3)
    record = gateway.submit([1], overrides=change)
    rig.turn(2)
    good = gateway.submit([2])
    rig.finish()
    assert record.rejected.error == fe.STREAM_ERROR_INTERNAL
    assert_oracle(good)
    assert rig.engine.counters.faults == 0


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0])
def test_sampling_numbers_are_checked(value: float) -> None:
    rig = LockstepRig()
    rig.add_executor()
    gateway = rig.add_gateway()
    rig.turn(3)
    record = gateway.submit([1], temperature=value)
    rig.finish()
    assert record.rejected.error == fe.STREAM_ERROR_INTERNAL


def test_resubmission_of_a_finished_stream_is_answered_with_its_end() -> None:
    rig = LockstepRig()
    rig.add_executor()
    gateway = rig.add_gateway()
    rig.turn(3)
    record = gateway.submit([1], max_tokens=3, emitted_ids=pack([5, 6, 7]))
    record.ids = [5, 6, 7]
    rig.finish()
    assert record.ended.reason == fe.END_REASON_LENGTH
    assert record.ids == [5, 6, 7]


# Draining


def test_drain_lets_streams_finish_and_takes_no_new_ones() -> None:
    rig, executor, gateway = busy_rig()
    rig.engine.request_stop()
    rig.turn(2)
    late = gateway.submit([1])
    rig.until(lambda: rig.engine.phase is Phase.DONE)
    rig.turn(3)
    assert late.rejected.error == fe.STREAM_ERROR_DRAINING
    for record in gateway.streams.values():
        if record is not late:
            assert_oracle(record)
    assert gateway.status.draining
    assert gateway.goodbye is not None
    assert executor.left
    assert rig.engine.run() == 0


def test_drain_ends_the_rest_at_its_limit_and_at_once_when_hurried() -> None:
    for stops, limit_s, status in ((1, 2.0, 0), (2, 1e9, 1)):
        rig = LockstepRig(config=EngineConfig(drain_timeout_s=limit_s))
        rig.add_executor(step_s=0.1)
        gateway = rig.add_gateway()
        records = [gateway.submit([seed], max_tokens=400) for seed in range(5)]
        rig.until(lambda records=records: all(record.ids for record in records))  # type: ignore[misc]
        for _ in range(stops):
            rig.engine.request_stop()
        rig.pass_time(2.5)
        assert rig.engine.phase is Phase.DONE
        ends = {(record.ended.error, record.ended.retry_after_ms) for record in records}
        assert ends == {(fe.STREAM_ERROR_DRAINING, 1000)}
        assert gateway.errors == []
        assert rig.engine.run() == status


# Faults of our own


def test_exception_in_the_core_costs_a_session_then_the_core_but_never_the_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rig, executor, gateway = busy_rig()
    schedule, faults = Scheduler.schedule, [True]

    def broken(core: Scheduler, now: float) -> Any:
        if faults:
            faults.pop()
            raise RuntimeError("made up")
        return schedule(core, now)

    monkeypatch.setattr(Scheduler, "schedule", broken)
    rig.finish()
    for record in gateway.streams.values():
        assert_oracle(record)
    assert (rig.engine.counters.faults, executor.num_sessions) == (1, 2)

    cores = {id(rig.engine.core): rig.engine.core}
    for times in range(1, MAX_REPLACED + 2):
        records = [gateway.submit([seed], max_tokens=300) for seed in range(4)]
        rig.until(lambda records=records: all(record.ids for record in records))  # type: ignore[misc]
        faults += [True, True]
        rig.finish()
        cores[id(rig.engine.core)] = rig.engine.core
        assert len(cores) == 1 + times
        for record in records:
            if times <= MAX_REPLACED:
                assert_oracle(record)
                assert record.num_doubled == 0
            else:  # too often within a minute
                assert record.ended.error == fe.STREAM_ERROR_INTERNAL
    after = gateway.submit([9])
    rig.finish()
    assert_oracle(after)


def test_exception_outside_the_step_does_not_end_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gateway falls silent, and dropping its streams raises: the next gateway is served all the same."""
    rig = LockstepRig(config=EngineConfig(lease_s=0.5))
    rig.add_executor(ChainExecutor)
    gateway = rig.add_gateway()
    records = [gateway.submit([seed], max_tokens=2000) for seed in range(3)]
    rig.until(lambda: all(record.ids for record in records))
    cancel, faults = Scheduler.cancel, [True]

    def broken(core: Scheduler, seq_id: Any, now: float) -> Any:
        if faults:
            faults.pop()
            raise RuntimeError("made up")
        return cancel(core, seq_id, now)

    monkeypatch.setattr(Scheduler, "cancel", broken)
    gateway.heartbeats = False
    rig.gateways.remove(gateway)
    rig.until(lambda: rig.engine.counters.faults == 1)
    other = rig.add_gateway()
    after = other.submit([9])
    rig.finish()
    assert_oracle(after)


def test_violated_invariants_are_counted_and_healed(monkeypatch: pytest.MonkeyPatch) -> None:
    rig, _, gateway = busy_rig()
    rig.finish()
    broken = rig.engine.core
    monkeypatch.setattr(broken, "check_invariants", lambda: ["made up"])
    rig.pass_time(2)
    assert rig.engine.counters.invariant_violations == 1
    assert rig.engine.core is not broken
    after = gateway.submit([9])
    rig.finish()
    assert_oracle(after)


def test_no_stream_is_lost_when_the_books_are_wrong() -> None:
    """A reference leaks while streams are queued, running and swapped."""
    rig = LockstepRig(config=EngineConfig(check_every_plans=16), core=SchedulerConfig(max_num_seqs=8))
    executor = rig.add_executor(KvExecutor, replace(POOL, num_blocks=40, num_host_blocks=40))
    gateway = rig.add_gateway()
    submit_many(gateway, 40, random.Random(5))
    records = list(gateway.streams.values())
    rig.until(lambda: sum(bool(record.ids) for record in records) > 10)
    core = rig.engine.core
    running = core._running
    assert running is not None
    leaked, preempted = (seq for seq, _ in zip(running, range(2), strict=False))
    assert leaked.table is not None
    running.pool.retain(leaked.table.block_ids[:1])
    core.preempt(preempted.seq_id, Action.SWAP)
    assert core.stats().swapped > 0
    assert core.stats().queue_requests > 1
    rig.until(lambda: rig.engine.core is not core)
    rig.finish()
    assert rig.engine.counters.violations.pop("books") > 0
    assert executor.num_sessions == 2
    for record in records:
        assert_oracle(record)
        assert record.num_doubled == 0
    rig.assert_clean()


def test_a_stream_that_the_core_has_forgotten_ends() -> None:
    rig, _, gateway = busy_rig()
    core = rig.engine.core
    running = next(seq for seq in core._sequences.values() if seq.state is SequenceState.RUNNING)
    core.cancel(running.seq_id, rig.clock.now)  # and its ending goes nowhere
    rig.until(lambda: all(record.is_over for record in gateway.streams.values()), limit=2_000)
    errors = Counter(record.ended.error for record in gateway.streams.values())
    assert errors == {0: len(gateway.streams) - 1, fe.STREAM_ERROR_INTERNAL: 1}
    assert rig.engine.counters.violations["streams"] == 1


# Poison


ENVELOPES: dict[str, list[dict[str, Any]]] = {
    "executor": [
        {"heartbeat": ex.Heartbeat(state=ex.EXECUTOR_STATE_IDLE)},
        {"nack": ex.Nack(last_step_id=3)},
        {"result": ex.StepResult(step_id=2, status=ex.STEP_STATUS_OK, token_ids=pack([1, 2]))},
        {"plan": ex.StepPlan(step_id=1)},
        {"session_start": ex.SessionStart(first_step_id=9)},
        {"hello": ex.ExecutorHello(protocol_min=1, protocol_max=1, model_fingerprint="x", block_size=8)},
    ],
    "gateway": [
        {"submit": fe.Submit(stream=900_000, prompt_ids=pack([1, 2, 3]), max_tokens=4)},
        {"cancel": fe.CancelStreams(streams=pack([1, 2]))},
        {"heartbeat": fe.FrontendHeartbeat(num_streams=3)},
        {"tokens": fe.TokenBatch(streams=pack([1]))},
        {"hello": fe.FrontendHello(protocol_min=1, protocol_max=1, model_fingerprint="oracle-model")},
    ],
}


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_mutated_frames_from_strangers_and_peers_hurt_nobody_else(data: st.DataObject) -> None:
    rig = LockstepRig()
    rig.add_executor(KvExecutor, POOL)
    good, bad = rig.add_gateway("good"), rig.add_gateway("bad")
    records = [good.submit([seed], max_tokens=25, seed=seed) for seed in range(4)]
    rig.until(lambda: any(record.ids for record in records))
    strangers = {
        "executor": rig.executor_hub.connect(new_identity("executor", "stranger")),
        "gateway": rig.gateway_hub.connect(new_identity("gateway", "stranger")),
    }
    for _ in range(data.draw(st.integers(1, 8))):
        side = data.draw(st.sampled_from(["executor", "gateway", "peer"]))
        bodies = ENVELOPES["executor" if side == "executor" else "gateway"]
        channel: Any = bad.channel
        if side != "peer":
            channel = Channel(ex.ExecutorEnvelope) if side == "executor" else Channel(fe.FrontendEnvelope)
            channel.epoch = data.draw(st.sampled_from([0, 1, bad.channel.epoch, 2**64 - 1]))
        frame = bytearray(channel.pack(**data.draw(st.sampled_from(bodies))))
        for _ in range(data.draw(st.integers(0, 4))):
            frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
        frame = frame[: data.draw(st.integers(0, len(frame)))] + data.draw(st.binary(max_size=6))
        (bad.link if side == "peer" else strangers[side]).send(bytes(frame))
        rig.turn(2)
    rig.until(lambda: all(record.is_over for record in records))
    for record in records:
        assert_oracle(record)
    assert rig.engine.counters.faults == 0
    assert rig.engine.counters.executor_sessions == 1


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_mutated_frames_of_the_executor_itself_cost_sessions_at_most(data: st.DataObject) -> None:
    rig = LockstepRig()
    executor = rig.add_executor(ChainExecutor, POOL)
    gateway = rig.add_gateway()
    records = [gateway.submit([seed], max_tokens=25, seed=seed) for seed in range(4)]
    rig.until(lambda: any(record.ids for record in records))
    for _ in range(data.draw(st.integers(1, 6))):
        body = data.draw(st.sampled_from(ENVELOPES["executor"][:5]))
        frame = bytearray(executor.channel.pack(**body))
        for _ in range(data.draw(st.integers(0, 3))):
            frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
        executor.link.send(bytes(frame))
        rig.turn(2)
    if rig.engine.executors.session is None:  # it may have said goodbye
        executor.link.close()
        rig.executors.remove(executor)
        rig.add_executor(ChainExecutor, POOL, name="next")
    rig.turn_s = 0.02
    rig.until(lambda: all(record.is_over for record in records), limit=3000)
    assert rig.engine.counters.faults == 0
    assert rig.engine.core.check_invariants() == []
