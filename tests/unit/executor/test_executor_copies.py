"""Copies run late, yet all that is read is what one thing after the other would give; without a fence it is not."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from executor_svc.kv import copy_thread
from executor_svc.kv.copy_cuda import CudaCopyStream
from executor_svc.kv.copy_engine import CopyEngine, CopyError, CopyOp, runs
from executor_svc.kv.copy_thread import CopyThread, cpu_copies
from tests.unit.executor.copy_world import (
    AnyOrder,
    FakeCuda,
    NoComputeFence,
    NoReadFence,
    NoWriteFence,
    RandomSteps,
    Step,
    World,
    columns,
    cuda_world,
    step,
    thread_world,
)

NONE = columns([])
LATE_S = 0.02

BLOCKER = step(out=[(20, 20)])
"""Keeps the stream busy, so that what comes after it queues up."""
FILL = step(out=[(0, 0), (1, 1)])

# What must not happen early, and the control that lets it: (name, steps, engine, stream of the control).
FENCES: list[tuple[str, list[Step], type[CopyEngine], type[CopyThread]]] = [
    ("batch reads what is swapped in", [FILL, step(back=[(0, 5)], read=[5])], NoWriteFence, CopyThread),
    ("batch writes what is swapped in", [FILL, step(back=[(0, 5)], write=[5])], NoWriteFence, CopyThread),
    ("batch reads what is copied", [step(within=[(2, 5)], read=[5])], NoWriteFence, CopyThread),
    (
        "batch of a later plan",
        [FILL, step(back=[(0, 5)], read=[9]), step(read=[8]), step(read=[5])],
        NoWriteFence,
        CopyThread,
    ),
    ("batch writes what is swapped out", [step(out=[(3, 7)], write=[3])], NoReadFence, CopyThread),
    ("batch writes what is copied from", [step(within=[(3, 7)], write=[3])], NoReadFence, CopyThread),
    ("host block is written, then read", [BLOCKER, step(out=[(3, 7)], back=[(7, 5)])], CopyEngine, AnyOrder),
    (
        "host block is read, then written",
        [FILL, BLOCKER, step(back=[(0, 5)]), step(out=[(3, 0)])],
        CopyEngine,
        AnyOrder,
    ),
    ("block is swapped out, then in to", [FILL, BLOCKER, step(out=[(3, 7)], back=[(0, 3)])], CopyEngine, AnyOrder),
    ("block is swapped out, then copied to", [BLOCKER, step(out=[(3, 7)], within=[(4, 3)])], CopyEngine, AnyOrder),
    ("block is copied, then swapped out", [BLOCKER, step(within=[(4, 3)]), step(out=[(3, 7)])], CopyEngine, AnyOrder),
    (
        "block is copied, then swapped in to",
        [FILL, BLOCKER, step(within=[(3, 8)], back=[(0, 3)])],
        CopyEngine,
        AnyOrder,
    ),
]
ids = [name for name, *_ in FENCES]


def late(op: CopyOp) -> float:
    return LATE_S


def wrong_blocks(world: World, steps: list[Step]) -> int:
    for it in steps:
        world.run(it)
    return world.finish()


def corrupts(make: Callable[[], World], steps: list[Step]) -> bool:
    """Whether a control gives a wrong block; a busy machine may let it get away once."""
    return any(wrong_blocks(make(), steps) for _ in range(5))


@pytest.mark.parametrize(("name", "steps", "engine", "stream"), FENCES, ids=ids)
def test_each_fence_holds_and_its_control_corrupts(
    name: str, steps: list[Step], engine: type[CopyEngine], stream: type[CopyThread]
) -> None:
    assert wrong_blocks(thread_world(late), steps) == 0
    assert corrupts(lambda: thread_world(late, engine=engine, stream=stream), steps)


@pytest.mark.parametrize(("name", "steps", "engine", "stream"), FENCES[:6], ids=ids[:6])
def test_the_same_fences_hold_between_streams(
    name: str, steps: list[Step], engine: type[CopyEngine], stream: type[CopyThread]
) -> None:
    cuda = FakeCuda(lambda: LATE_S)
    assert wrong_blocks(cuda_world(cuda), steps) == 0
    assert corrupts(lambda: cuda_world(cuda, engine=engine), steps)
    cuda.close()


@pytest.mark.parametrize(
    "steps",
    [
        [step(write=[3]), step(out=[(3, 7)])],
        [step(write=[3]), step(within=[(3, 7)])],
        [FILL, step(), step(read=[5]), step(back=[(0, 5)])],
    ],
    ids=["swap out of what is being written", "copy of what is being written", "swap in to what is being read"],
)
def test_copies_wait_for_batches_that_are_only_enqueued(steps: list[Step]) -> None:
    """On a CPU a batch is over before the next plan's copies begin; on a GPU it has hardly begun."""
    cuda = FakeCuda(lambda: 0.0)
    assert wrong_blocks(cuda_world(cuda, compute_delay=lambda: LATE_S), steps) == 0
    assert corrupts(lambda: cuda_world(cuda, compute_delay=lambda: LATE_S, stream=NoComputeFence), steps)
    cuda.close()


def run_random(world: World, num_pairs: int, seed: int) -> int:
    for it in RandomSteps(len(world.device), len(world.host), seed):
        world.run(it)
        if world.num_pairs >= num_pairs:
            break
    return world.finish()


def random_delay(seed: int) -> Any:
    rng = random.Random(seed)
    return lambda *_: rng.choice([0.0, 0.0, 0.0, 0.0, 0.0005, 0.001])


def test_ten_thousand_random_copies_are_as_if_one_after_the_other() -> None:
    for seed in range(5):
        world = thread_world(random_delay(seed))
        assert run_random(world, 2000, seed) == 0
        assert world.reported == world.with_copies  # each step once, in order


def test_random_copies_between_streams_are_as_if_one_after_the_other() -> None:
    for seed in range(2):
        cuda = FakeCuda(random_delay(seed))
        world = cuda_world(cuda, compute_delay=random_delay(seed + 10))
        assert run_random(world, 1000, seed) == 0
        assert world.reported == world.with_copies
        cuda.close()


@pytest.mark.parametrize(
    ("engine", "stream"),
    [(NoWriteFence, CopyThread), (NoReadFence, CopyThread), (CopyEngine, AnyOrder)],
    ids=["no write fence", "no read fence", "any order"],
)
def test_random_copies_find_every_missing_fence(engine: type[CopyEngine], stream: type[CopyThread]) -> None:
    worlds = (thread_world(lambda op: 0.001, engine=engine, stream=stream) for _ in range(5))
    assert any(run_random(world, 300, seed) for seed, world in enumerate(worlds))


@pytest.mark.parametrize(
    ("engine", "stream", "copy_s", "compute_s"),
    [
        (NoWriteFence, CudaCopyStream, 0.001, 0.0),
        (NoReadFence, CudaCopyStream, 0.001, 0.0),
        (CopyEngine, NoComputeFence, 0.0, 0.002),
    ],
    ids=["no write fence", "no read fence", "no compute fence"],
)
def test_random_copies_between_streams_find_every_missing_fence(
    engine: type[CopyEngine], stream: type[CudaCopyStream], copy_s: float, compute_s: float
) -> None:
    cuda = FakeCuda(lambda: copy_s)

    def wrong(seed: int) -> int:
        world = cuda_world(cuda, engine=engine, stream=stream, compute_delay=lambda: compute_s)
        return run_random(world, 200, seed)

    assert any(wrong(seed) for seed in range(5))
    cuda.close()


def test_a_batch_waits_only_for_what_it_depends_on() -> None:
    gate = threading.Event()
    world = thread_world(lambda op: 0.0 * gate.wait(20))
    world.run(step(out=[(0, 0)], back=[(0, 5)]))  # the swap-in of a lane that does not run yet
    world.run(step(read=[0, 1, 2], write=[1, 2]))  # reads what is being swapped out, writes none of it
    assert world.engine.busy
    assert world.reported == []
    gate.set()
    world.run(step(read=[5]))
    assert world.finish() == 0
    assert world.reported == [1]


def test_a_host_block_without_content_is_never_read() -> None:
    device, host = np.zeros((4, 8), np.uint8), np.zeros((4, 8), np.uint8)
    engine = cpu_copies(device, host)
    with pytest.raises(CopyError, match="host block 2 has no content"):
        engine.submit(1, columns([(0, 1)]), NONE, columns([(1, 1), (2, 2)]))
    with pytest.raises(CopyError, match="host block 1"):  # nothing of the refused plan was done
        engine.submit(2, NONE, NONE, columns([(1, 1)]))
    engine.submit(3, columns([(0, 1)]), NONE, columns([(1, 1)]))
    engine.drain()
    engine.reset()
    with pytest.raises(CopyError, match="host block 1"):
        engine.submit(4, NONE, NONE, columns([(1, 1)]))
    engine.close()


def test_a_new_session_waits_for_what_runs_and_drops_the_rest() -> None:
    entered, gate = threading.Event(), threading.Event()

    def delay(op: CopyOp) -> float:
        entered.set()
        assert gate.wait(20)
        return 0.0

    device = np.arange(32, dtype=np.uint8).reshape(4, 8)
    host = np.zeros((4, 8), np.uint8)
    engine = cpu_copies(device, host, delay=delay)
    engine.submit(1, columns([(1, 1)]), NONE, NONE)
    engine.submit(2, columns([(2, 2)]), NONE, NONE)
    assert entered.wait(20)
    resetting = threading.Thread(target=engine.reset, daemon=True)
    resetting.start()
    resetting.join(0.05)
    assert resetting.is_alive()
    gate.set()
    resetting.join(20)
    assert not resetting.is_alive()
    assert not engine.busy
    assert (host[1] == device[1]).all()
    assert not host[2].any()
    engine.submit(7, columns([(3, 3)]), NONE, NONE)
    engine.drain()
    assert engine.report().steps == [7]
    engine.close()


def test_a_copy_that_fails_stops_all_that_needs_it_until_a_new_session(monkeypatch: pytest.MonkeyPatch) -> None:
    device, host = np.zeros((4, 8), np.uint8), np.zeros((4, 8), np.uint8)
    engine = cpu_copies(device, host)

    def broken(*args: object) -> None:
        raise MemoryError("none left")

    with monkeypatch.context() as patch:
        patch.setattr(copy_thread, "copy_runs", broken)
        engine.submit(1, columns([(0, 0)]), NONE, columns([(0, 3)]))
        with pytest.raises(CopyError, match="MemoryError: none left"):
            engine.before_batch(np.array([3], np.int32), np.array([], np.int32))
    with pytest.raises(CopyError):
        engine.report()
    engine.reset()
    engine.submit(2, columns([(0, 0)]), NONE, columns([(0, 3)]))
    engine.drain()
    assert engine.report().steps == [2]
    engine.close()


def test_a_throttle_stretches_copies_and_the_end_does_not_wait_for_it() -> None:
    device, host = np.zeros((4, 1000), np.uint8), np.zeros((4, 1000), np.uint8)
    engine = cpu_copies(device, host, bytes_per_s=100_000)
    engine.submit(1, columns([(0, 0), (1, 1)]), NONE, NONE)
    engine.drain()
    (copy,) = engine.report().done
    assert copy.num_bytes == 2000
    assert copy.seconds >= 0.02
    engine.close()
    with pytest.raises(CopyError, match="ended"):
        engine.submit(2, columns([(0, 0)]), NONE, NONE)
    slow = cpu_copies(device, host, bytes_per_s=0.001)
    slow.submit(1, columns([(0, 0)]), NONE, NONE)
    slow.close()


def test_who_waits_for_slow_copies_is_let_go_when_another_thread_hurries_them() -> None:
    device, host = np.arange(4000, dtype=np.uint8).reshape(4, 1000), np.zeros((4, 1000), np.uint8)
    engine = cpu_copies(device, host, bytes_per_s=0.001, delay=lambda op: 1e6)
    engine.submit(1, columns([(0, 0), (1, 1)]), NONE, NONE)
    engine.submit(2, columns([(2, 2)]), columns([(2, 3)]), NONE)
    waiting = threading.Thread(target=engine.drain, daemon=True)
    waiting.start()
    waiting.join(0.05)
    assert waiting.is_alive()
    engine.hurry()
    waiting.join(20)
    assert not waiting.is_alive()
    assert engine.report().steps == [1, 2]
    assert (host[:3] == device[:3]).all()
    assert (device[3] == device[2]).all()
    engine.reset()
    engine.submit(3, columns([(0, 0)]), NONE, NONE)
    time.sleep(0.05)
    assert engine.busy, "a new session is as slow as it was told to be"
    engine.close()


@pytest.mark.parametrize(
    ("pairs", "piece", "expected"),
    [
        ([(0, 4), (1, 5), (2, 6)], 0, [(0, 4, 3)]),
        ([(0, 4), (1, 5), (3, 6), (4, 8), (5, 9)], 0, [(0, 4, 2), (3, 6, 1), (4, 8, 2)]),
        ([(2, 1), (1, 2), (0, 3)], 0, [(2, 1, 1), (1, 2, 1), (0, 3, 1)]),
        ([(7, 7)], 0, [(7, 7, 1)]),
        ([(1, 3), (2, 4), (3, 5), (4, 6), (5, 7)], 4, [(1, 3, 1), (2, 4, 2), (4, 6, 2)]),
    ],
)
def test_pairs_are_joined_where_both_sides_go_on(
    pairs: list[tuple[int, int]], piece: int, expected: list[tuple[int, int, int]]
) -> None:
    src, dst = columns(pairs)
    assert list(runs(src, dst, piece)) == expected


def covered(src: NDArray[np.int32], dst: NDArray[np.int32]) -> list[tuple[int, int]]:
    return [(a + i, b + i) for a, b, n in runs(src, dst, 3) for i in range(n)]


def test_runs_cover_each_pair_once_in_order() -> None:
    rng = random.Random(2)
    for _ in range(200):
        pairs = [(rng.randrange(9), rng.randrange(9)) for _ in range(rng.randint(1, 12))]
        assert covered(*columns(pairs)) == pairs
