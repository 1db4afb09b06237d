"""Plans of copies and batches, run through a copy engine and through a model that does one thing after the other.

Batches are stand-ins: each compares the blocks that it reads with the model's and writes new bytes. `wrong` counts
blocks that were not what they must be, so an engine without one of its fences shows as a number above zero.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from executor_svc.kv.copy_cuda import CudaCopyStream
from executor_svc.kv.copy_engine import CopyEngine, CopyOp, CopyStream
from executor_svc.kv.copy_thread import CopyThread

Bytes = NDArray[np.uint8]
Pairs = list[tuple[int, int]]
BLOCK_BYTES = 64
DEADLINE_S = 60.0


class NoWriteFence(CopyEngine):
    """Control: batches do not wait for copies that write what they read or write."""

    def _last_that_wrote(self, blocks: NDArray[np.int32]) -> int:
        return 0


class NoReadFence(CopyEngine):
    """Control: batches do not wait for copies that read what they write."""

    def _last_that_read(self, blocks: NDArray[np.int32]) -> int:
        return 0


class AnyOrder(CopyThread):
    """Control: the newest operation first."""

    def _next(self) -> CopyOp:
        return self._queue.pop()


class NoComputeFence(CudaCopyStream):
    """Control: copies do not wait for batches enqueued before them."""

    def _after_compute(self) -> None:
        return


@dataclass
class Step:
    """One plan and its batch. `read` is widened by `write`."""

    out: Pairs
    within: Pairs
    back: Pairs
    read: list[int]
    write: list[int]


def step(
    *,
    out: Sequence[tuple[int, int]] = (),
    within: Sequence[tuple[int, int]] = (),
    back: Sequence[tuple[int, int]] = (),
    read: Sequence[int] = (),
    write: Sequence[int] = (),
) -> Step:
    return Step(list(out), list(within), list(back), list(read), list(write))


def columns(pairs: Pairs) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    array = np.array(pairs, np.int32).reshape(-1, 2)
    return array[:, 0].copy(), array[:, 1].copy()


class World:
    """Both tiers twice: as the engine has them, and as they must be."""

    def __init__(
        self, num_device: int, num_host: int, make: Callable[[Bytes, Bytes], CopyStream], engine: type[CopyEngine]
    ) -> None:
        self._rng = np.random.default_rng(3)
        self.device = self._noise(num_device)
        self.host = self._noise(num_host)
        self.model_device = self.device.copy()
        self.model_host = self.host.copy()
        self.stream = make(self.device, self.host)
        self.engine = engine(self.stream, num_device_blocks=num_device, num_host_blocks=num_host)
        self.compute: Callable[[Callable[[], None]], None] = lambda batch: batch()
        self.wrong = 0
        self.num_steps = 0
        self.num_pairs = 0
        self.reported: list[int] = []
        self.with_copies: list[int] = []

    def _noise(self, count: int) -> Bytes:
        return self._rng.integers(0, 256, (count, BLOCK_BYTES), np.uint8)

    def run(self, it: Step) -> None:
        self.num_steps += 1
        if it.out or it.within or it.back:
            self.engine.submit(self.num_steps, columns(it.out), columns(it.within), columns(it.back))
            self.with_copies.append(self.num_steps)
        for a, b in it.out:
            self.model_host[b] = self.model_device[a]
        for a, b in it.within:
            self.model_device[b] = self.model_device[a]
        for a, b in it.back:
            self.model_device[b] = self.model_host[a]
        self.num_pairs += len(it.out) + len(it.within) + len(it.back)
        self._batch(sorted({*it.read, *it.write}), it.write)
        self.reported += self.engine.report().steps

    def _batch(self, read: list[int], write: list[int]) -> None:
        expected, new = self.model_device[read].copy(), self._noise(len(write))

        def batch() -> None:
            self.wrong += int((self.device[read] != expected).any(axis=1).sum())
            self.device[write] = new

        if self.engine.busy:
            self.engine.before_batch(np.array(read, np.int32), np.array(write, np.int32))
        self.compute(batch)
        self.model_device[write] = new

    def finish(self) -> int:
        """Blocks that were wrong in batches or are wrong now."""
        done = threading.Event()
        self.engine.drain()
        self.compute(done.set)
        assert done.wait(DEADLINE_S)
        self.reported += self.engine.report().steps
        self.engine.close()
        for mine, model in ((self.device, self.model_device), (self.host, self.model_host)):
            self.wrong += int((mine != model).any(axis=1).sum())
        return self.wrong


class RandomSteps:
    """Steps in which everything meets everything; the scheduler's own rules about reuse are not kept."""

    def __init__(self, num_device: int, num_host: int, seed: int) -> None:
        self._rng = random.Random(seed)
        self._device, self._host = range(num_device), range(num_host)
        self._written: set[int] = set()

    def __iter__(self) -> Iterator[Step]:
        rng = self._rng
        while True:
            hosts = self._few(self._host)
            out = list(zip(rng.choices(self._device, k=len(hosts)), hosts, strict=True))
            if rng.random() < 0.5:  # neighbours, so that runs are joined
                first = rng.randrange(min(len(self._device), len(self._host)) - 4)
                out = [(first + i, first + i) for i in range(4)]
            self._written.update(b for _, b in out)
            touched = self._few(self._device)
            within = list(zip(touched[::2], touched[1::2], strict=False))
            sources = self._few(sorted(self._written))
            back = list(zip(sources, rng.sample(self._device, len(sources)), strict=True))
            yield Step(out, within, back, self._few(self._device), self._few(self._device))

    def _few(self, items: Any) -> list[int]:
        return self._rng.sample(items, min(len(items), self._rng.choice([0, 1, 1, 2, 4])))


class FakeStream:
    """A CUDA stream as far as the copy stream uses it: a thread that does what was enqueued, in order."""

    def __init__(self) -> None:
        self._work: SimpleQueue[Callable[[], Any] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._loop, daemon=True)
        self._thread.start()

    def enqueue(self, work: Callable[[], Any] | None) -> None:
        self._work.put(work)

    def wait_event(self, event: FakeEvent) -> None:
        flag = event.flag  # the record that counts is the last one before this call
        self.enqueue(lambda: flag.wait(DEADLINE_S))

    def synchronize(self) -> None:
        done = threading.Event()
        self.enqueue(done.set)
        assert done.wait(DEADLINE_S)

    def _loop(self) -> None:
        while (work := self._work.get()) is not None:
            work()


class FakeEvent:
    def __init__(self, enable_timing: bool = False) -> None:
        self.flag = threading.Event()
        self.at = 0.0

    def record(self, stream: FakeStream) -> None:
        flag = self.flag = threading.Event()

        def reached() -> None:
            self.at = time.perf_counter()
            flag.set()

        stream.enqueue(reached)

    def query(self) -> bool:
        return self.flag.is_set()

    def synchronize(self) -> None:
        assert self.flag.wait(DEADLINE_S)

    def elapsed_time(self, end: FakeEvent) -> float:
        return (end.at - self.at) * 1000


class FakeCuda:
    """The few names of `torch.cuda` in use, with a compute stream and copies that take `delay()` seconds."""

    Event = FakeEvent

    def __init__(self, delay: Callable[[], float]) -> None:
        self._delay = delay
        self.compute = self._current = FakeStream()
        self.streams = [self.compute]

    def Stream(self) -> FakeStream:
        self.streams.append(FakeStream())
        return self.streams[-1]

    def current_stream(self) -> FakeStream:
        return self._current

    @contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        before, self._current = self._current, stream
        yield
        self._current = before

    def copy(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        def work() -> None:
            time.sleep(self._delay())
            dst.numpy()[:] = src.numpy()

        self._current.enqueue(work)

    def close(self) -> None:
        for stream in self.streams:
            stream.enqueue(None)


def thread_world(
    delay: Callable[[CopyOp], float],
    *,
    num_device: int = 24,
    num_host: int = 32,
    engine: type[CopyEngine] = CopyEngine,
    stream: type[CopyThread] = CopyThread,
) -> World:
    """A world whose copies run on a thread, as on a CPU."""
    return World(num_device, num_host, lambda device, host: stream(device, host, delay=delay), engine)


def cuda_world(
    cuda: FakeCuda,
    *,
    num_device: int = 24,
    num_host: int = 32,
    engine: type[CopyEngine] = CopyEngine,
    stream: type[CudaCopyStream] = CudaCopyStream,
    compute_delay: Callable[[], float] = lambda: 0.0,
) -> World:
    """A world whose copies and batches are enqueued on two streams, as on a GPU."""

    def make(device: Bytes, host: Bytes) -> CopyStream:
        return stream(torch.from_numpy(device), torch.from_numpy(host), cuda=cuda, copy=cuda.copy, chunk_blocks=5)

    def compute(batch: Callable[[], None]) -> None:
        def work() -> None:
            time.sleep(compute_delay())
            batch()

        cuda.compute.enqueue(work)

    world = World(num_device, num_host, make, engine)
    world.compute = compute
    return world
