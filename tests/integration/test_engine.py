"""Engine, links, codec and core together, against oracles that know what every stream must be."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from pagemill.columns import unpack
from pagemill.engine.v1 import frontend_pb2 as fe
from scheduler_svc.core.params import SchedulerConfig
from tests.oracles.base import Geometry, OracleExecutor
from tests.oracles.chain import ChainExecutor
from tests.oracles.expected import expected_output
from tests.oracles.gateway import FakeGateway, StreamRecord
from tests.oracles.kv import KvExecutor
from tests.oracles.rig import LiveRig, LockstepRig

VOCAB = 1000


def assert_oracle(record: StreamRecord) -> None:
    sampling = record.message.sampling
    expected = expected_output(
        unpack(record.message.prompt_ids),
        max_tokens=record.message.max_tokens,
        vocab_size=VOCAB,
        seed=sampling.seed,
        choice=record.message.choice_index,
        stop_token_ids=unpack(sampling.stop_token_ids),
        min_tokens=sampling.min_tokens,
    )
    assert record.ids == expected, f"stream {record.stream}"
    assert record.ended is not None
    stopped = expected[-1] in unpack(sampling.stop_token_ids) and len(expected) > sampling.min_tokens
    assert record.ended.reason == (fe.END_REASON_STOP if stopped else fe.END_REASON_LENGTH)


def submit_many(gateway: FakeGateway, count: int, rng: random.Random, longest: int = 90) -> None:
    for _ in range(count):
        prompt = [rng.randrange(VOCAB) for _ in range(rng.randint(1, longest))]
        gateway.submit(
            prompt,
            max_tokens=rng.randint(1, 40),
            seed=rng.randrange(2**40),
            choice_index=rng.randrange(3),
            stop_token_ids=[rng.randrange(VOCAB) for _ in range(rng.choice([0, 1, 30]))],
            min_tokens=rng.choice([0, 0, 3]),
        )


@pytest.mark.parametrize("chunk", [7, 128, 1000])
@pytest.mark.parametrize("length", [127, 128, 129])
def test_b26_prompts_of_about_the_budget(length: int, chunk: int) -> None:
    """Alone and beside others; in pieces, and where a piece may be larger than a step."""
    core = SchedulerConfig(max_num_batched_tokens=128, max_num_seqs=8, max_prefill_chunk=chunk)
    rig = LockstepRig(core=core)
    rig.add_executor(KvExecutor, Geometry(num_blocks=100))
    gateway = rig.add_gateway()
    for num_beside in (0, 2):
        for _ in range(num_beside):
            gateway.submit([5] * 20, max_tokens=30)
        rig.turn(5)
        gateway.submit([token % VOCAB for token in range(length)], max_tokens=4)
        rig.finish()
    for record in gateway.streams.values():
        assert_oracle(record)
    rig.assert_clean()


# 64 streams of up to 130 positions want up to 64 * 17 blocks of 8; the pool has less than a third of that.
SMALL_POOL = Geometry(num_blocks=300)
CORE = SchedulerConfig(max_num_batched_tokens=128, max_num_seqs=48, max_prefill_chunk=32)


@pytest.mark.parametrize("kind", [ChainExecutor, KvExecutor])
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_preempted_streams_equal_the_oracle(kind: type[OracleExecutor], depth: int) -> None:
    core = SchedulerConfig(
        max_num_batched_tokens=128, max_num_seqs=48, max_prefill_chunk=32, pipeline_depth=depth, watermark=0.0
    )
    rig = LockstepRig(core=core)
    rig.add_executor(kind, Geometry(num_blocks=60))
    gateway = rig.add_gateway()
    submit_many(gateway, 64, random.Random(depth))
    rig.finish()
    assert rig.engine.core.stats().num_preemptions_total > 0
    for record in gateway.streams.values():
        assert_oracle(record)
    rig.assert_clean()
    ahead = rig.engine.counters.plans_sent_ahead
    assert (ahead > 0) == (depth > 1)


def test_plan_leaves_before_the_result_of_the_one_before_it() -> None:
    rig = LockstepRig()
    executor = rig.add_executor(step_s=0.05)
    gateway = rig.add_gateway()
    gateway.submit([1, 2, 3], max_tokens=30)
    rig.until(lambda: executor.max_plans_waiting == 2, "two plans at the executor")
    assert executor.num_steps < 5
    rig.finish()
    rig.assert_clean()
    assert rig.engine.counters.plans_sent_ahead >= 25


@pytest.mark.parametrize("link", ["ipc", "loopback"])
def test_streams_over_live_links(link: str, socket_dir: Path) -> None:
    rig = LiveRig(socket_dir if link == "ipc" else None, core=CORE)
    try:
        executor = rig.add_executor(KvExecutor, SMALL_POOL)
        gateway = rig.add_gateway()
        submit_many(gateway, 64, random.Random(5))
        rig.until(lambda: gateway.num_open == 0, gateway)
        for record in gateway.streams.values():
            assert_oracle(record)
        assert gateway.errors == []
        assert executor.violations == []
        assert rig.engine.counters.faults == 0
    finally:
        rig.close()


def test_links_that_are_slow_each_way_change_nothing(socket_dir: Path) -> None:
    rig = LiveRig(socket_dir, core=CORE)
    try:
        executor = rig.add_executor(KvExecutor, SMALL_POOL, delay_in_s=0.005, delay_out_s=0.005)
        gateway = rig.add_gateway()
        submit_many(gateway, 32, random.Random(6))
        rig.until(lambda: gateway.num_open == 0, gateway)
        for record in gateway.streams.values():
            assert_oracle(record)
        assert executor.violations == []
        assert executor.max_plans_waiting <= 2
    finally:
        rig.close()


def test_executor_killed_and_replaced_over_ipc(socket_dir: Path) -> None:
    rig = LiveRig(socket_dir, core=CORE)
    try:
        first = rig.add_executor(KvExecutor, SMALL_POOL, step_s=0.002)
        gateway = rig.add_gateway()
        submit_many(gateway, 32, random.Random(7))
        rig.until(lambda: sum(len(record.ids) for record in gateway.streams.values()) > 100, gateway)
        rig.kill_executor(first)
        second = rig.add_executor(KvExecutor, Geometry(num_blocks=200, block_size=16))
        rig.until(lambda: gateway.num_open == 0, gateway)
        for record in gateway.streams.values():
            assert_oracle(record)
            assert record.num_doubled == 0
        assert (gateway.errors, second.violations) == ([], [])
    finally:
        rig.close()


def test_thousand_cancelled_at_random_moments_leave_nothing() -> None:
    rng = random.Random(11)
    rig = LockstepRig(core=SchedulerConfig(max_num_batched_tokens=96, max_num_seqs=32, max_prefill_chunk=24))
    rig.add_executor(KvExecutor, Geometry(num_blocks=80))
    gateway = rig.add_gateway()
    doomed: set[int] = set()

    def cancelled() -> int:
        ends = [record.ended for record in gateway.streams.values()]
        return sum(end is not None and end.reason == fe.END_REASON_CANCELLED for end in ends)

    while cancelled() < 1000:
        submit_many(gateway, rng.randint(1, 12), rng)
        rig.turn(rng.randint(0, 6))
        alive = [record.stream for record in gateway.streams.values() if not record.is_over]
        victims = rng.sample(alive, min(len(alive), rng.randint(0, 14)))
        if victims:
            gateway.cancel(*victims, 999_999, *victims[:1])  # unknown and doubled ones are ignored
            doomed.update(victims)
    rig.finish()
    for record in gateway.streams.values():
        assert record.ended is not None
        if record.ended.reason == fe.END_REASON_CANCELLED:
            assert record.stream in doomed
        else:
            assert_oracle(record)
    rig.assert_clean()


def test_steps_after_a_cancel_are_few() -> None:
    rig = LockstepRig()
    executor = rig.add_executor(KvExecutor)
    gateway = rig.add_gateway()
    record = gateway.submit([1, 2, 3], max_tokens=400)
    rig.until(lambda: len(record.ids) > 5)
    steps = executor.num_steps
    gateway.cancel(record.stream)
    rig.finish()
    rig.assert_clean()
    assert executor.num_steps <= steps + 4


def test_one_gateway_dying_costs_only_its_own_streams() -> None:
    rig = LockstepRig()
    rig.add_executor(KvExecutor, SMALL_POOL)
    dying, living = rig.add_gateway("dying"), rig.add_gateway("living")
    submit_many(dying, 20, random.Random(1))
    submit_many(living, 20, random.Random(2))
    rig.until(lambda: any(record.ids for record in dying.streams.values()))
    rig.kill_gateway(dying)
    rig.finish()
    for record in living.streams.values():
        assert_oracle(record)
    assert rig.engine.counters.gateways_dropped["gone"] == 1
    rig.assert_clean()


def test_b16_streams_of_two_gateways_may_have_one_name_and_one_number() -> None:
    rig = LockstepRig()
    rig.add_executor(KvExecutor, SMALL_POOL)
    records = []
    for i, gateway in enumerate([rig.add_gateway("one"), rig.add_gateway("two")]):
        for prompt in ([i, 1, 2], [i, 3, 4]):
            name = {"client_request_id": "everybody's"}
            records.append(gateway.submit(prompt, max_tokens=20, overrides=name))
    rig.until(lambda: all(record.ids for record in records))
    rig.gateways[0].cancel(1)
    rig.finish()
    cancelled, *others = records
    assert cancelled.ended is not None
    assert cancelled.ended.reason == fe.END_REASON_CANCELLED
    for record in others:
        assert_oracle(record)
    rig.assert_clean()


def test_silent_gateway_loses_its_streams_and_may_resubmit() -> None:
    rig = LockstepRig()
    rig.add_executor(KvExecutor)
    gateway = rig.add_gateway()
    records = [gateway.submit([5, seed], max_tokens=300, seed=seed) for seed in range(4)]
    rig.until(lambda: all(len(record.ids) > 3 for record in records))
    rig.gateways.remove(gateway)  # stopped, its connection stays
    rig.pass_time(2.6)
    assert rig.engine.counters.gateways_dropped["silent"] == 1
    assert rig.engine.gateways.num_streams == 0
    rig.gateways.append(gateway)  # continued: finds its old session dead, says hello and resubmits
    rig.pass_time(2.6)
    rig.finish()
    for record in records:
        assert_oracle(record)
    assert gateway.num_sessions == 2
    rig.assert_clean()


def test_slow_gateway_gets_coalesced_tokens() -> None:
    rig = LockstepRig(bound=4)
    rig.add_executor(KvExecutor)
    slow, fast = rig.add_gateway("slow"), rig.add_gateway("fast")
    rig.turn(5)
    records = [slow.submit([seed], max_tokens=60, seed=seed) for seed in range(3)]
    others = [fast.submit([seed], max_tokens=60, seed=seed) for seed in range(3)]
    for _ in range(30):
        rig.gateways.remove(slow)
        rig.turn(20)
        rig.gateways.append(slow)
        rig.turn(1)
    rig.finish()
    for record in records + others:
        assert_oracle(record)
    assert slow.num_batches < fast.num_batches / 2
    rig.assert_clean()
