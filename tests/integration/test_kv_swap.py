"""Swapping, prefix hits and late copies over the wire, with the oracle that computes ids from its blocks alone."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pagemill.columns import unpack
from pagemill.engine.v1 import frontend_pb2 as fe
from scheduler_svc.core.params import PreemptionMode, SchedulerConfig
from scheduler_svc.core.preemption import Action
from tests.oracles.base import Geometry, Pace
from tests.oracles.direct import ACTIONS
from tests.oracles.expected import expected_output
from tests.oracles.gateway import FakeGateway
from tests.oracles.kv import KvExecutor
from tests.oracles.rig import LiveRig, LockstepRig

CORE = SchedulerConfig(
    max_num_batched_tokens=96, max_num_seqs=24, max_prefill_chunk=32, preemption_mode=PreemptionMode.SWAP
)
TIERS = Geometry(
    num_blocks=72,
    num_host_blocks=200,
    bytes_per_block=1 << 16,
    swap_out_bytes_per_s=1e9,
    swap_in_bytes_per_s=1e9,
    prefill_tokens_per_s=1000.0,
)
"""24 streams of up to 100 positions want 24 * 13 blocks of 8."""


def submit_many(gateway: FakeGateway, count: int, rng: random.Random) -> None:
    prefixes = [[rng.randrange(1000) for _ in range(rng.randint(8, 40))] for _ in range(4)]
    for _ in range(count):
        prompt = rng.choice(prefixes) + [rng.randrange(1000) for _ in range(rng.randint(0, 20))]
        gateway.submit(prompt, max_tokens=rng.randint(4, 40), seed=rng.randrange(2**40), choice_index=rng.randrange(3))


def assert_all_right(gateway: FakeGateway) -> None:
    for record in gateway.streams.values():
        sampling = record.message.sampling
        assert record.ids == expected_output(
            unpack(record.message.prompt_ids),
            max_tokens=record.message.max_tokens,
            vocab_size=1000,
            seed=sampling.seed,
            choice=record.message.choice_index,
        ), f"stream {record.stream}"
        assert record.ended is not None
        assert record.ended.reason == fe.END_REASON_LENGTH
        assert record.num_doubled == 0
    assert gateway.errors == []


def force(rig: LockstepRig, action: str, rng: random.Random) -> None:
    """One that runs gives way."""
    core = rig.engine.core
    running = [seq for seq in core._sequences.values() if seq.state.value == "running"]
    if running:
        core.preempt(rng.choice(running).seq_id, Action(action))


@pytest.mark.parametrize("late", [0, 5])
@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize("action", ACTIONS)
def test_streams_forced_out_every_few_steps_equal_the_oracle(action: str, prefix_cache: bool, late: int) -> None:
    rng = random.Random(late)
    rig = LockstepRig(core=replace(CORE, prefix_cache=prefix_cache))
    executor = rig.add_executor(KvExecutor, TIERS)
    executor.lateness = lambda step_id: rng.randint(0, late)
    gateway = rig.add_gateway()
    submit_many(gateway, 64, rng)
    while gateway.num_open:
        rig.turn(3)
        force(rig, action, rng)
    assert_all_right(gateway)
    rig.assert_clean()
    if action == "swap" and not prefix_cache:
        assert executor.counts.num_swapped_in > 50
    assert executor.counts.num_mismatches == 0


def kill_in_the_middle_of_a_copy(rig: LockstepRig, rng: random.Random) -> int:
    """Lets an executor work until copies are under way; how many there were when it died."""
    executor = rig.add_executor(KvExecutor, TIERS, name="first")
    executor.lateness = lambda step_id: 6
    rig.until(lambda: executor.num_steps > 20)
    for _ in range(200):
        force(rig, "swap", rng)
        rig.turn()
        if executor.copies.pending:
            break
    rig.kill_executor(executor)
    assert executor.violations == []
    rig.turn(5)
    return len(executor.copies.pending)


@pytest.mark.parametrize("seed", range(4))
def test_executor_killed_in_the_middle_of_a_copy_and_replaced(seed: int) -> None:
    rng = random.Random(seed)
    rig = LockstepRig(core=CORE)
    gateway = rig.add_gateway()
    submit_many(gateway, 48, rng)
    num_killed = kill_in_the_middle_of_a_copy(rig, rng)  # once: who is there at two deaths counts as their cause
    rig.add_executor(KvExecutor, replace(TIERS, num_blocks=90), name="second")
    rig.finish()
    assert_all_right(gateway)
    rig.assert_clean()
    assert num_killed > 0


def test_copies_that_take_time_over_ipc(socket_dir: Path) -> None:
    """The copy engine lags behind the steps: batches wait for what they need and for nothing else."""
    rig = LiveRig(socket_dir, core=CORE)
    try:
        pace = Pace(token_s=2e-5, row_s=2e-5, copy_block_s=0.001)
        executor = rig.add_executor(KvExecutor, TIERS, pace=pace)
        gateway = rig.add_gateway()
        submit_many(gateway, 48, random.Random(9))
        rig.until(lambda: gateway.num_open == 0, gateway)
        assert_all_right(gateway)
        assert executor.violations == []
        assert rig.engine.counters.faults == 0
    finally:
        rig.close()


def test_b77_two_thousand_healthy_streams_are_left_alone() -> None:
    rig = LockstepRig(core=SchedulerConfig(max_num_batched_tokens=512, max_num_seqs=256))
    rig.add_executor(KvExecutor, Geometry(num_blocks=600, max_rows=256, max_tokens=512, num_lanes=1024))
    gateways = [rig.add_gateway(f"gw{number}") for number in range(4)]
    for number in range(2000):
        gateways[number % 4].submit([number % 900, number % 7, 3], max_tokens=3)
    rig.finish()
    for gateway in gateways:
        assert_all_right(gateway)
    rig.assert_clean()


def cancelled(gateway: FakeGateway) -> int:
    ends: list[Any] = [record.ended for record in gateway.streams.values()]
    return sum(end is not None and end.reason == fe.END_REASON_CANCELLED for end in ends)


def test_b76_a_load_generator_that_is_killed_again_and_again_leaves_nothing() -> None:
    """Its gateway dies with 400 streams queued, in prefill, decoding and swapped; a probe is answered each time."""
    rng = random.Random(76)
    rig = LockstepRig(core=CORE)
    rig.add_executor(KvExecutor, TIERS)
    probe = rig.add_gateway("probe")
    for number in range(5):
        doomed = rig.add_gateway(f"doomed{number}")
        submit_many(doomed, 400, rng)
        rig.turn(60)
        for _ in range(10):
            force(rig, "swap", rng)
            rig.turn(2)
        assert doomed.num_open > 0
        rig.kill_gateway(doomed)
        probe.submit([number, 1, 2], max_tokens=5)
        begin = rig.clock.now
        rig.finish()
        assert rig.clock.now - begin < 3.0, "seconds: the lease of the dead gateway and a few steps"
    assert_all_right(probe)
    rig.until(lambda: rig.engine.core.stats().running == 0 and rig.engine.core.stats().queue_requests == 0)
    rig.assert_clean()


def test_b70_few_steps_of_work_after_a_cancel_wherever_the_stream_is() -> None:
    rng = random.Random(70)
    rig = LockstepRig(core=CORE)
    executor = rig.add_executor(KvExecutor, TIERS, step_s=0.004)
    gateway = rig.add_gateway()
    submit_many(gateway, 60, rng)
    while gateway.num_open:
        rig.turn(2)
        force(rig, "swap", rng)
        live = [record for record in gateway.streams.values() if not record.is_over and record.num_accepted]
        if not live:
            continue
        record = rng.choice(live)
        before, steps = len(record.ids), executor.num_steps
        gateway.cancel(record.stream)
        while not record.is_over:
            rig.turn()
        assert len(record.ids) - before <= 2, "the plans that were in flight"
        assert executor.num_steps - steps <= 2
    rig.assert_clean()
    assert cancelled(gateway) > 20
