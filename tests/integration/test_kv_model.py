"""The KV campaign on the demo model: float32, the sdpa backend, copies that are late, every block's checksum verified.

The books are checked, and the executor's lanes compared, with every plan.

Scheduler, wire and executor as in production, in one process. Every fifth plan two running sequences are forced out,
and one stream in eight is cancelled at some token. Ids must equal those of a run with a large pool in which nothing of
the kind happens. `PAGEMILL_KV_MODEL_STREAMS=200` makes it the whole campaign, `PAGEMILL_KV_MODEL_SEEDS` repeats it.
"""

from __future__ import annotations

import os
import random
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from executor_svc.config import ExecutorSettings
from executor_svc.metrics import ExecutorMetrics
from executor_svc.runner import PagedRunner, load
from executor_svc.startup import prepare
from executor_svc.worker import Exit, Worker
from pagemill.engine.v1 import frontend_pb2 as fe
from pagemill.zmq_links import new_identity
from scheduler_svc.config import EngineConfig
from scheduler_svc.core.params import HostCache, SchedulerConfig
from scheduler_svc.core.plan import StepPlan
from scheduler_svc.core.preemption import Action
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.sequence import SequenceState
from scheduler_svc.core.stats import SchedulerStats
from tests.oracles.gateway import StreamRecord
from tests.oracles.rig import LiveRig

NUM_STREAMS = int(os.environ.get("PAGEMILL_KV_MODEL_STREAMS", "12"))
NUM_SEEDS = int(os.environ.get("PAGEMILL_KV_MODEL_SEEDS", "1"))
NUM_OUTPUTS = 16
NUM_SEATS = 8
NEED = NUM_SEATS * 6
"""Blocks that as many streams as have seats use when they are at their longest."""
pytestmark = [pytest.mark.model, pytest.mark.timeout(1800 if NUM_STREAMS > 50 else 300)]
CONFIG = SchedulerConfig(max_num_seqs=NUM_SEATS, watermark=0.0, growth_reserve=0.0)


@pytest.fixture(scope="module")
def runner(demo_model: Path) -> PagedRunner:
    return load(demo_model, dtype="float32", attention="sdpa")


def make_prompts() -> list[list[int]]:
    rng = random.Random(4)
    prefixes = [[rng.randrange(3, 2000) for _ in range(length)] for length in (33, 48, 20)]
    return [
        rng.choice(prefixes) + [rng.randrange(3, 2000) for _ in range(rng.randint(1, 12))] for _ in range(NUM_STREAMS)
    ]


def force_out(core: Scheduler, rng: random.Random) -> None:
    """From now on every fifth plan finds two sequences gone, in the thread that plans."""
    schedule, num_plans = core.schedule, 0

    def schedule_after_forcing(now: float) -> StepPlan | None:
        nonlocal num_plans
        running = [seq.seq_id for seq in core._sequences.values() if seq.state is SequenceState.RUNNING]
        if num_plans % 5 == 4:
            for seq_id in rng.sample(running, min(2, len(running))):
                core.preempt(seq_id, rng.choice([Action.SWAP, Action.SWAP, Action.TAIL]))
        plan = schedule(now)
        num_plans += plan is not None
        return plan

    core.schedule = schedule_after_forcing  # type: ignore[method-assign]


def run(
    runner: PagedRunner, settings: ExecutorSettings, config: SchedulerConfig, rng: random.Random | None
) -> tuple[list[StreamRecord], SchedulerStats]:
    """All streams to their ends, forced out if there is an `rng`."""
    ready = prepare(runner, settings)
    rig = LiveRig(core=config, config=EngineConfig(check_every_plans=1))
    if rng is not None:
        force_out(rig.engine.core, rng)
    link = rig.executor_hub.connect(new_identity("executor", "model"))
    worker = Worker(link, ready.hello, ready.executor, ready.limits, metrics=ExecutorMetrics())
    ends: list[Any] = []
    thread = threading.Thread(target=lambda: ends.append(worker.run()), daemon=True)
    thread.start()
    try:
        gateway = rig.add_gateway(fingerprint=ready.hello.model_fingerprint)
        records = [gateway.submit(prompt, max_tokens=NUM_OUTPUTS, temperature=0.0) for prompt in make_prompts()]
        doomed = [] if rng is None else [(record, rng.randrange(NUM_OUTPUTS - 6)) for record in records[::8]]

        def are_over() -> bool:
            for record, num_tokens in list(doomed):
                if len(record.ids) >= num_tokens:
                    doomed.remove((record, num_tokens))
                    if not record.is_over:
                        gateway.cancel(record.stream)
            return all(record.is_over for record in records)

        rig.until(are_over, gateway, limit_s=1500.0)
        stats = rig.engine.core.stats()
    finally:
        worker.stop()
        thread.join(60)
        rig.close()
    assert ends == [Exit.STOPPED]
    assert rig.engine.counters.faults == 0
    assert rig.engine.counters.invariant_violations == 0
    assert rig.engine.counters.executor_sessions == 1
    return records, stats


@pytest.fixture(scope="module")
def undisturbed(demo_model: Path, runner: PagedRunner) -> list[list[int]]:
    settings = ExecutorSettings(model=demo_model, num_device_blocks=NEED * 4, max_num_seqs=NUM_SEATS)
    records, stats = run(runner, settings, replace(CONFIG, prefix_cache=False), None)
    assert stats.num_preemptions_total == 0
    return [record.ids for record in records]


@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize("seed", range(7, 7 + NUM_SEEDS))
def test_forced_swaps_and_aborts_change_no_id_of_the_demo_model(
    demo_model: Path, runner: PagedRunner, seed: int, prefix_cache: bool, undisturbed: list[list[int]]
) -> None:
    settings = ExecutorSettings(
        model=demo_model,
        num_device_blocks=NEED * 3 // 10,
        host_kv_memory_bytes=NEED * runner.bytes_per_block,
        max_num_seqs=NUM_SEATS,
        copy_delay_ms=20.0,
        verify_copies=True,
    )
    config = replace(CONFIG, prefix_cache=prefix_cache, host_cache=HostCache.WRITE_THROUGH)
    records, stats = run(runner, settings, config, random.Random(seed))
    num_aborted = 0
    for record, expected in zip(records, undisturbed, strict=True):
        assert record.ended is not None
        if record.ended.reason == fe.END_REASON_CANCELLED:
            num_aborted += 1
            assert record.ids == expected[: len(record.ids)]
        else:
            assert record.ids == expected
    assert 1 <= num_aborted <= -(-NUM_STREAMS // 8)
    assert stats.swapped_out_blocks_total > 20
    if not prefix_cache:
        assert stats.swapped_in_blocks_total > 20
