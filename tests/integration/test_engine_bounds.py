"""Bounds and fences of the scheduler's ports: each number here is a promise, so each has a test that counts."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from pagemill.columns import pack
from pagemill.engine.v1 import executor_pb2 as ex
from pagemill.engine.v1 import frontend_pb2 as fe
from scheduler_svc import gateway_port, plan_flow
from scheduler_svc.config import EngineConfig
from scheduler_svc.core.params import SchedulerConfig
from scheduler_svc.engine import LARGE_FRAME
from tests.integration.test_engine import assert_oracle
from tests.oracles.base import Geometry
from tests.oracles.chain import ChainExecutor
from tests.oracles.rig import LockstepRig
from tests.oracles.scripted import ScriptedExecutor


def test_plans_of_a_lost_result_are_sent_again_twice_and_no_more() -> None:
    rig = LockstepRig(core=SchedulerConfig(pipeline_depth=1))
    executor = rig.add_executor(ScriptedExecutor)
    asked: list[int] = []

    def change(result: ex.StepResult) -> list[ex.StepResult]:
        if result.step_id == 5:
            asked.append(result.step_id)
            return []
        return [result]

    executor.change_result = change
    record = rig.add_gateway().submit([1], max_tokens=20)
    rig.pass_time(20)
    rig.finish()
    assert (len(asked), executor.num_sessions) == (1 + 2, 2)
    assert rig.engine.counters.plans_resent == plan_flow.MAX_RESENDS == 2
    assert record.ids == [7] * 20
    rig.assert_clean()


def test_pauses_between_failing_sessions_grow_and_a_good_result_ends_them() -> None:
    rig = LockstepRig(core=SchedulerConfig(pipeline_depth=1), turn_s=0.01)
    executor = rig.add_executor(ScriptedExecutor)
    gateway = rig.add_gateway()
    fail_until = 7
    executor.fail_steps = {*range(1, fail_until), fail_until + 1}
    started: list[float] = []
    step = executor.step

    def watch(envelope: ex.ExecutorEnvelope) -> ex.StepResult:
        started.append(rig.clock.now)
        return step(envelope)  # type: ignore[no-any-return]

    executor.step = watch
    while len(started) < fail_until + 2:  # a stream whose steps always fail is given up, so there is always a next one
        if gateway.num_open == 0:
            gateway.submit([1], max_tokens=4)
        rig.turn()
    gaps = [later - earlier for earlier, later in pairwise(started)]
    for gap, pause in zip(gaps, (0.0, 0.1, 0.5, 2.0, 5.0, 5.0, 0.0, 0.0), strict=False):
        assert pause <= gap < pause + 0.3
    assert rig.engine.executors.due() <= rig.clock.now + 0.3


def test_messages_of_an_epoch_that_was_never_issued_do_nothing() -> None:
    rig = LockstepRig()
    executor = rig.add_executor()
    gateway = rig.add_gateway()
    record = gateway.submit([1, 2], max_tokens=30)
    rig.until(lambda: len(record.ids) > 3)
    session = rig.engine.executors.session
    for peer, goodbye in ((executor, ex.Goodbye(reason="future")), (gateway, fe.FrontendGoodbye(reason="future"))):
        epoch = peer.channel.epoch
        peer.channel.epoch = epoch + 1000
        peer.link.send(peer.channel.pack(goodbye=goodbye))
        peer.channel.epoch = epoch
        peer.channel.sent_seq -= 1
        rig.turn()
    assert rig.engine.counters.stale["future_epoch"] == 2
    assert rig.engine.executors.session is session
    rig.finish()
    assert_oracle(record)
    assert (executor.num_sessions, gateway.num_sessions) == (1, 1)
    rig.assert_clean()


def stalled_gateway(rig: LockstepRig) -> Any:
    """A gateway that says it lives and reads nothing, so that its link is full."""
    gateway = rig.add_gateway("slow")
    rig.turn(5)
    rig.gateways.remove(gateway)
    return gateway


def stall(rig: LockstepRig, gateway: Any, turns: int) -> None:
    for _ in range(turns):
        gateway.link.send(gateway.channel.pack(heartbeat=fe.FrontendHeartbeat()))
        rig.turn()


def test_gateway_is_dropped_beyond_its_tokens_and_not_before() -> None:
    rig = LockstepRig(bound=4, config=EngineConfig(max_pending_tokens=60))
    rig.add_executor(ChainExecutor)
    other = rig.add_gateway("other")
    gateway = stalled_gateway(rig)
    for seed in range(2):
        gateway.submit([seed], max_tokens=400, seed=seed)
    (session,) = (s for s in rig.engine.gateways.sessions.values() if s.peer.startswith(b"gateway/slow"))
    while len(session.token_ids) < 60:
        assert rig.engine.counters.gateways_dropped["too_slow"] == 0
        stall(rig, gateway, 1)
    stall(rig, gateway, 3)
    assert rig.engine.counters.gateways_dropped["too_slow"] == 1
    assert rig.engine.gateways.num_streams == 0
    record = other.submit([9])
    rig.finish()
    assert_oracle(record)


def test_gateway_is_dropped_beyond_its_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway_port, "MAX_PENDING_MESSAGES", 20)
    rig = LockstepRig(bound=4)
    rig.add_executor(ChainExecutor)
    gateway = stalled_gateway(rig)
    (session,) = rig.engine.gateways.sessions.values()
    for _ in range(40):
        assert rig.engine.counters.gateways_dropped["too_slow"] == (len(session.replies) > 20)
        gateway.submit([1], max_tokens=0)  # refused at once: a reply and nothing else
        stall(rig, gateway, 1)
    assert rig.engine.counters.gateways_dropped["too_slow"] == 1
    assert rig.engine.gateways.sessions == {}


@pytest.mark.parametrize("number", [1, 0, -1])
def test_stream_number_that_is_taken_or_impossible_is_refused_and_the_first_goes_on(number: int) -> None:
    rig = LockstepRig()
    rig.add_executor(ChainExecutor)
    gateway = rig.add_gateway()
    record = gateway.submit([1, 2], max_tokens=30)
    rig.until(lambda: len(record.ids) > 3)
    again = fe.Submit()
    again.CopyFrom(record.message)
    again.stream = number
    again.prompt_ids = pack([5, 6, 7])
    gateway.link.send(gateway.channel.pack(submit=again))
    rig.turn(2)
    assert rig.engine.counters.stale["bad_stream"] == 1
    assert rig.engine.gateways.num_streams == 1
    rig.finish()
    assert_oracle(record)
    assert record.num_accepted == 1
    rig.assert_clean()


def test_a_large_message_leaves_the_plans_to_the_next_round_but_never_twice_in_a_row() -> None:
    """So taking a long prompt in and admitting it are two pauses for others, and a flood of them is no standstill."""
    rig = LockstepRig()
    executor = rig.add_executor(ChainExecutor, Geometry(num_blocks=4_000, max_model_len=20_000))
    gateway = rig.add_gateway()
    first = gateway.submit([1], max_tokens=1_000)
    rig.until(lambda: len(first.ids) > 3)
    gateway.submit([5] * (LARGE_FRAME // 4))
    stats = rig.engine.core.stats
    rig.engine.step()
    assert (stats().queue_requests, stats().running) == (1, 1)
    rig.engine.step()
    assert (stats().queue_requests, stats().running) == (0, 2)

    plans_of_rounds = []
    for number in range(12):
        gateway.submit([number + 6] * (LARGE_FRAME // 4))
    while stats().queue_requests + stats().running < 14:
        before = rig.engine.counters.plans_sent
        rig.engine.step()
        plans_of_rounds.append(rig.engine.counters.plans_sent - before)
        executor.poll()
        gateway.poll()
    assert len(plans_of_rounds) == 12
    assert plans_of_rounds.count(0) <= 6
    rig.finish()
    rig.assert_clean()
