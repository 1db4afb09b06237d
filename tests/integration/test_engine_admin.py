"""Questions of operators, and the checks that the engine makes by itself."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from pagemill.engine.v1 import frontend_pb2 as fe
from scheduler_svc import audit
from scheduler_svc.config import EngineConfig
from scheduler_svc.core.scheduler import Scheduler
from tests.integration.test_engine import assert_oracle, submit_many
from tests.oracles.base import Geometry
from tests.oracles.kv import KvExecutor
from tests.oracles.rig import LockstepRig

POOL = Geometry(num_blocks=200)


def ask(rig: LockstepRig, gateway: Any, *operations: int) -> list[fe.AdminReply]:
    """The replies, in order; the gateway's other messages are handled as ever."""
    replies: list[fe.AdminReply] = []
    handle = gateway._handle

    def watch(envelope: fe.FrontendEnvelope) -> None:
        if envelope.WhichOneof("body") == "admin_reply":
            replies.append(envelope.admin_reply)
        handle(envelope)

    gateway._handle = watch
    for number, operation in enumerate(operations, start=7):
        request = fe.AdminRequest(id=number)
        request.operation = operation  # type: ignore[assignment]
        gateway.link.send(gateway.channel.pack(admin_request=request))
    rig.turn(3)
    gateway._handle = handle
    assert [reply.id for reply in replies] == list(range(7, 7 + len(operations)))
    return replies


def test_load_is_told_and_adds_up() -> None:
    rig = LockstepRig()
    rig.add_executor(KvExecutor, POOL)
    gateway = rig.add_gateway()
    submit_many(gateway, 30, random.Random(1))
    rig.until(lambda: any(record.ids for record in gateway.streams.values()))
    (reply,) = ask(rig, gateway, fe.ADMIN_OPERATION_GET_LOAD)
    load = reply.load
    assert load.running_requests > 0
    assert load.running_requests + load.queue_requests <= 30
    assert [tier.tier for tier in load.tiers][:1] == ["device"]
    for tier in load.tiers:
        assert tier.total == tier.free + tier.used + tier.cached + tier.in_flight + tier.reserved
    assert load.tiers[0].total == 200
    rig.finish()
    rig.assert_clean()


def test_prefix_cache_is_flushed_and_the_books_hold() -> None:
    rig = LockstepRig()
    rig.add_executor(KvExecutor, POOL)
    gateway = rig.add_gateway()
    record = gateway.submit(range(64), max_tokens=5)
    rig.finish()
    rig.turn(20)
    num_cached = rig.engine.core.stats().blocks_cached
    assert num_cached >= 8
    flushed, again, checked = ask(
        rig,
        gateway,
        fe.ADMIN_OPERATION_FLUSH_PREFIX_CACHE,
        fe.ADMIN_OPERATION_FLUSH_PREFIX_CACHE,
        fe.ADMIN_OPERATION_CHECK_INVARIANTS,
    )
    assert (flushed.num_flushed_blocks, again.num_flushed_blocks) == (num_cached, 0)
    assert (list(checked.violations), checked.num_violations, checked.error) == ([], 0, "")
    assert rig.engine.core.stats().blocks_free == 200
    assert_oracle(record)
    rig.assert_clean()


def test_findings_are_bounded_counted_and_not_looked_for_again_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = LockstepRig()
    gateway = rig.add_gateway()
    rig.turn(3)
    calls: list[int] = []

    def broken(core: Scheduler) -> list[str]:
        calls.append(1)
        return ["x" * 1000] * 100

    monkeypatch.setattr(Scheduler, "check_invariants", broken)
    replies = ask(rig, gateway, *[fe.ADMIN_OPERATION_CHECK_INVARIANTS] * 20)
    assert len(calls) == 1
    for reply in replies:
        assert (len(reply.violations), len(reply.violations[0]), reply.num_violations) == (64, 300, 100)
    rig.pass_time(0.3)
    ask(rig, gateway, fe.ADMIN_OPERATION_CHECK_INVARIANTS)
    assert len(calls) == 2


def test_unknown_operation_has_an_answer() -> None:
    rig = LockstepRig()
    gateway = rig.add_gateway()
    rig.turn(3)
    zero, newer = ask(rig, gateway, 0, 99)
    assert zero.error
    assert newer.error


def test_books_are_checked_every_so_many_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = LockstepRig(config=EngineConfig(check_every_plans=10))
    rig.add_executor(KvExecutor, POOL)
    calls: list[int] = []
    check = Scheduler.check_invariants

    def count(core: Scheduler) -> list[str]:
        calls.append(rig.engine.counters.plans_sent)
        return check(core)

    monkeypatch.setattr(Scheduler, "check_invariants", count)
    gateway = rig.add_gateway()
    record = gateway.submit([1, 2], max_tokens=200)
    rig.finish()
    assert len(calls) >= 200 // 10 - 2
    assert_oracle(record)
    rig.pass_time(2)
    checked = len(calls)
    rig.pass_time(5)  # nothing has happened since the check in the pause
    assert len(calls) == checked


def test_books_too_large_to_be_checked_between_steps_are_checked_in_the_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit, "FIRST_GUESS_S", 1.0)
    rig = LockstepRig(config=EngineConfig(check_every_plans=10))
    rig.add_executor(KvExecutor, POOL)
    calls: list[int] = []
    quick: list[int] = []

    def count(core: Scheduler) -> list[str]:
        calls.append(core.stats().running)
        return []

    def count_quick(core: Scheduler) -> list[str]:
        quick.append(core.stats().running)
        return []

    monkeypatch.setattr(Scheduler, "check_invariants", count)
    monkeypatch.setattr(Scheduler, "check_conservation", count_quick)
    record = rig.add_gateway().submit(range(40), max_tokens=100)
    rig.finish()
    rig.pass_time(2)
    assert calls == [0]
    assert len(quick) >= 5, "the counts are added up meanwhile"
    assert set(quick) == {1}
    assert_oracle(record)


def test_the_lanes_of_an_executor_are_what_the_plans_made_of_them() -> None:
    rig = LockstepRig(config=EngineConfig(check_every_plans=1))
    executor = rig.add_executor(KvExecutor, Geometry(num_blocks=60, num_host_blocks=60))
    gateway = rig.add_gateway()
    submit_many(gateway, 40, random.Random(4))
    rig.until(lambda: any(len(record.ids) > 5 for record in gateway.streams.values()))
    gateway.cancel(*[stream for stream, record in gateway.streams.items() if not record.is_over][:5])
    rig.finish()
    assert rig.engine.core.stats().num_preemptions_total > 0
    assert executor.num_digests >= rig.engine.counters.plans_sent - 2
    assert executor.num_sessions == 1
    rig.assert_clean()


def test_digests_are_sent_now_and_then_only() -> None:
    rig = LockstepRig(config=EngineConfig(check_every_plans=1000))
    executor = rig.add_executor(KvExecutor, POOL)
    rig.add_gateway().submit([1, 2], max_tokens=300)
    rig.finish()
    assert executor.num_digests == 1 + (rig.engine.counters.plans_sent - 2) // audit.DIGEST_EVERY


@pytest.mark.parametrize("what", ["block", "generation", "position", "lane"])
def test_lanes_that_differ_are_counted_and_healed_by_a_new_session(what: str) -> None:
    rig = LockstepRig(config=EngineConfig(check_every_plans=8))
    executor = rig.add_executor(KvExecutor, POOL)
    gateway = rig.add_gateway()
    submit_many(gateway, 40, random.Random(4))
    rig.until(lambda: executor.num_digests == 2)
    lane = next(iter(executor.lanes.values()))
    digest: Callable[[], int | None] = executor.digest

    def digest_of_others() -> int | None:
        executor.digest = digest
        wrong = {
            "block": {"blocks": [*lane.blocks[:-1], lane.blocks[-1] ^ 1]},
            "generation": {"generation": lane.generation + 1},
            "position": {"position": lane.position - 1},
            "lane": {"lane": 191},
        }[what]
        lanes, executor.lanes = executor.lanes, {**executor.lanes, lane.lane: replace(lane, **wrong)}
        try:
            return digest()
        finally:
            executor.lanes = lanes

    executor.digest = digest_of_others
    rig.until(lambda: executor.num_sessions == 2)
    assert executor.violations.pop().startswith("step ")
    rig.finish()
    assert rig.engine.counters.violations.pop("state_digest") == 1
    for record in gateway.streams.values():
        assert_oracle(record)
        assert record.num_doubled == 0
    rig.assert_clean()
