"""A request that kills executors takes two of them at most, and nobody with it (PROMISES R18)."""

from __future__ import annotations

import random

import pytest

from pagemill.engine.v1 import executor_pb2 as ex
from pagemill.engine.v1 import frontend_pb2 as fe
from scheduler_svc.config import EngineConfig
from scheduler_svc.core.params import SchedulerConfig
from tests.integration.test_engine import assert_oracle, submit_many
from tests.oracles.base import Geometry, Lane
from tests.oracles.kv import KvExecutor
from tests.oracles.rig import LockstepRig

POISON = [666, 6, 66]
POOL = Geometry(num_blocks=400)


class MortalExecutor(KvExecutor):
    """Dies when it comes to output `dies_at` of the poisonous prompt."""

    dies_at = 0
    is_dead = False

    def next_ids(self, lane: Lane) -> list[int] | ex.RowError:
        is_poison = lane.tokens[: lane.num_prompt] == POISON
        self.is_dead |= is_poison and len(lane.tokens) - lane.num_prompt >= self.dies_at
        return super().next_ids(lane)

    def results_to_send(self, result: ex.StepResult) -> list[ex.StepResult]:
        return [] if self.is_dead else [result]


class Ward:
    """A rig in which a dead executor is replaced, and deaths are counted."""

    def __init__(self, dies_at: int, depth: int = 2) -> None:
        self.rig = LockstepRig(core=SchedulerConfig(max_num_seqs=32, pipeline_depth=depth))
        self.dies_at = dies_at
        self.num_deaths = 0
        self.replace()

    def replace(self) -> None:
        self.executor = self.rig.add_executor(MortalExecutor, POOL, name=f"e{self.num_deaths}")
        self.executor.dies_at = self.dies_at

    def run(self, gateway: object) -> None:
        for _ in range(20_000):
            if not gateway.num_open:  # type: ignore[attr-defined]
                return
            self.rig.turn()
            if self.executor.is_dead:
                self.num_deaths += 1
                self.rig.kill_executor(self.executor)
                self.rig.turn(3)
                self.replace()
        raise AssertionError("the streams do not end")


@pytest.mark.parametrize("dies_at", [0, 5])
@pytest.mark.parametrize("depth", [1, 2])
def test_poison_takes_two_executors_and_none_of_its_neighbours(dies_at: int, depth: int) -> None:
    ward = Ward(dies_at, depth)
    gateway = ward.rig.add_gateway()
    submit_many(gateway, 20, random.Random(1))
    poison = gateway.submit(POISON, max_tokens=30)
    submit_many(gateway, 20, random.Random(2))
    ward.run(gateway)
    assert poison.ended.error == fe.STREAM_ERROR_POISON
    assert poison.ended.message
    for record in gateway.streams.values():
        if record is not poison:
            assert_oracle(record)
            assert record.num_doubled == 0
    assert ward.num_deaths == 2
    again = [gateway.submit(POISON, max_tokens=30, seed=seed) for seed in range(20)]
    ward.run(gateway)
    assert {record.rejected.error for record in again} == {fe.STREAM_ERROR_POISON}
    assert not any(record.rejected.HasField("retry_after_ms") for record in again)
    assert ward.num_deaths == 2
    assert ward.rig.engine.counters.outcomes["poison"] == 21
    ward.rig.assert_clean()


def test_poisonous_prompt_is_taken_again_after_ten_minutes() -> None:
    ward = Ward(0)
    gateway = ward.rig.add_gateway()
    gateway.submit(POISON)
    ward.run(gateway)
    ward.dies_at = ward.executor.dies_at = 10**6
    ward.rig.pass_time(590, step_s=1.0)
    early = gateway.submit(POISON)
    ward.run(gateway)
    assert early.rejected is not None
    ward.rig.pass_time(20, step_s=1.0)
    late = gateway.submit(POISON)
    ward.run(gateway)
    assert_oracle(late)


def test_executors_that_die_of_something_else_cost_nobody_who_gets_on_in_between() -> None:
    ward = Ward(10**6)
    gateway = ward.rig.add_gateway()
    records = [gateway.submit([seed, 1], max_tokens=120, seed=seed) for seed in range(12)]
    for death in range(1, 6):
        ward.rig.until(lambda least=12 * death: all(len(r.ids) >= least for r in records))  # type: ignore[misc]
        ward.rig.kill_executor(ward.executor)
        ward.rig.turn(3)
        ward.num_deaths += 1
        ward.replace()
    ward.run(gateway)
    for record in records:
        assert_oracle(record)
    ward.rig.assert_clean()


def test_executors_that_leave_or_fall_silent_twice_blame_nobody_when_they_say_goodbye() -> None:
    ward = Ward(10**6)
    gateway = ward.rig.add_gateway()
    record = gateway.submit([1, 2], max_tokens=60)
    for _ in range(4):
        ward.rig.until(lambda: ward.rig.engine.core.num_inflight_plans > 0)
        ward.executor.link.send(ward.executor.channel.pack(goodbye=ex.Goodbye(reason="drained")))
        ward.rig.engine.step()
        ward.rig.kill_executor(ward.executor)
        ward.num_deaths += 1
        ward.replace()
    ward.run(gateway)
    assert_oracle(record)


def test_silence_of_this_loop_or_of_a_living_executor_is_no_death() -> None:
    rig = LockstepRig(core=SchedulerConfig(max_num_seqs=32))
    executor = rig.add_executor(KvExecutor, POOL)
    gateway = rig.add_gateway()
    records = [gateway.submit([seed, 1], max_tokens=200, seed=seed) for seed in range(12)]
    for _ in range(2):
        rig.until(lambda: rig.engine.core.num_inflight_plans > 0)
        rig.engine.step()
        rig.clock.now += 2.5  # nothing was read or sent meanwhile
        rig.engine.step()
        rig.turn(20)
        assert (executor.num_sessions, len(rig.engine.gateways.sessions)) == (1, 1)
    for lost in range(2):
        rig.until(lambda: rig.engine.core.num_inflight_plans > 0)
        executor.silent = True
        rig.pass_time(2.3)
        assert rig.engine.executors.session is None
        executor.silent = False
        rig.until(lambda least=lost + 2: executor.num_sessions >= least, limit=3_000)  # type: ignore[misc]
    rig.finish()
    for record in records:
        assert_oracle(record)
    assert not rig.engine.core._suspects._records
    rig.assert_clean()


def test_broken_connection_twice_is_no_death_when_the_same_executor_comes_back() -> None:
    rig = LockstepRig()
    executor = rig.add_executor(KvExecutor, POOL)
    gateway = rig.add_gateway()
    records = [gateway.submit([seed, 1], max_tokens=200, seed=seed) for seed in range(12)]
    for count in range(2):
        rig.until(lambda: rig.engine.core.num_inflight_plans > 0)
        executor.link.close()
        rig.clock.now += 2.5
        rig.engine.step()
        assert rig.engine.executors.session is None
        executor.link = rig.executor_hub.connect(executor.link._peer)
        rig.until(lambda least=count + 2: executor.num_sessions >= least, limit=3_000)  # type: ignore[misc]
    rig.finish()
    for record in records:
        assert_oracle(record)
    assert not rig.engine.core._suspects._records
    rig.assert_clean()


def test_step_that_never_ends_twice_is_poison_though_the_process_lives() -> None:
    rig = LockstepRig(config=EngineConfig(step_timeout_s=5.0))
    gateway = rig.add_gateway()
    executor = rig.add_executor(step_s=1e9)
    record = gateway.submit([1, 2, 3])
    rig.until(lambda: rig.engine.core.num_inflight_plans > 0)
    rig.until(lambda: executor.num_sessions == 2, limit=10_000)
    rig.until(lambda: gateway.num_open == 0, limit=12_000)
    assert record.ended.error == fe.STREAM_ERROR_POISON
