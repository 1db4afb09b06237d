"""The copy stream of a CPU: one thread that copies while the compute thread computes.

It uses numpy only: an operator of torch on a second thread would start a second OpenMP team, and with more threads than
CPUs a step takes half as long again (measured; see `compute`). Large numpy copies release the interpreter lock.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from executor_svc.kv.checksums import BlockChecksums
from executor_svc.kv.copy_engine import CopyEngine, CopyError, CopyKind, CopyOp, DoneCopy, runs

Bytes = NDArray[np.uint8]

_CLOSE_S = 5.0


class CopyThread:
    """`CopyStream` on a thread, which starts with the first operation.

    `delay` gives seconds to wait before an operation, and `bytes_per_s` (0: no limit) stretches operations that are
    faster: they make a missing fence show, and stand for slower memory.
    """

    def __init__(
        self, device: Bytes, host: Bytes, *, delay: Callable[[CopyOp], float] | None = None, bytes_per_s: float = 0.0
    ) -> None:
        self.checksums: BlockChecksums | None = None
        self._device = device
        self._host = host
        self._delay = delay
        self._bytes_per_s = bytes_per_s
        self._changed = threading.Condition()
        self._queue: deque[CopyOp] = deque()
        self._done: deque[DoneCopy] = deque()
        self._num_enqueued = 0
        self._num_done = 0
        self._running = False
        self._hurry = False
        """Delays and throttles are not waited out: `hurry`, a cancellation or the end."""
        self._closed = False
        self._error: Exception | None = None
        self._thread: threading.Thread | None = None

    @property
    def num_done(self) -> int:
        """As `CopyStream.num_done`."""
        return self._num_done

    def enqueue(self, op: CopyOp) -> None:
        """As `CopyStream.enqueue`: computation is over when it returns, so there is none to wait for."""
        if self._closed:
            raise CopyError("the copy thread has ended")
        if self._thread is None:
            self._thread = threading.Thread(target=self._loop, name="copy", daemon=True)
            self._thread.start()
        with self._changed:
            self._queue.append(op)
            self._num_enqueued += 1
            self._changed.notify_all()

    def hold_compute(self, number: int) -> None:
        """As `CopyStream.hold_compute`."""
        self.wait(number)

    def wait(self, number: int) -> None:
        """As `CopyStream.wait`."""
        with self._changed:
            self._changed.wait_for(lambda: self._num_done >= number or self._error is not None)
            self._check()

    def take_done(self) -> list[DoneCopy]:
        """As `CopyStream.take_done`."""
        self._check()
        return [self._done.popleft() for _ in range(len(self._done))]

    def hurry(self) -> None:
        """As `CopyStream.hurry`. The lock is reentrant, so a signal may come while this thread holds it."""
        with self._changed:
            self._hurry = True
            self._changed.notify_all()

    def cancel(self) -> None:
        """As `CopyStream.cancel`."""
        with self._changed:
            self._queue.clear()
            self._hurry = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._running)
            self._hurry = self._closed
            self._error = None
            self._num_done = self._num_enqueued

    def close(self) -> None:
        """As `CopyStream.close`."""
        self._closed = True
        self.cancel()
        if self._thread is not None:
            self._thread.join(_CLOSE_S)

    def _check(self) -> None:
        if self._error is not None:
            raise CopyError(f"a copy failed: {type(self._error).__name__}: {self._error}") from self._error

    def _next(self) -> CopyOp:
        return self._queue.popleft()

    def _loop(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: (self._queue and self._error is None) or self._closed)
                if self._closed:
                    return
                op = self._next()
                self._running = True
            try:
                done = self._perform(op)
            except Exception as error:
                self._end(None, error)
            else:
                self._end(done, None)

    def _end(self, done: DoneCopy | None, error: Exception | None) -> None:
        with self._changed:
            self._running = False
            self._error = error  # nothing after it runs or counts as done, so that whatever needs it fails
            if done is not None:
                self._done.append(done)
                self._num_done += 1
            self._changed.notify_all()

    def _perform(self, op: CopyOp) -> DoneCopy:
        started, size = time.perf_counter(), op.src.size * self._device.shape[1]
        if self._delay is not None:
            self._pause(self._delay(op))
        self._copy(op)
        if self._bytes_per_s:
            self._pause(size / self._bytes_per_s - (time.perf_counter() - started))
        return DoneCopy(op.number, op.kind, size, time.perf_counter() - started)

    def _pause(self, seconds: float) -> None:
        if seconds > 0:
            with self._changed:
                self._changed.wait_for(lambda: self._hurry, seconds)

    def _copy(self, op: CopyOp) -> None:
        src = self._host if op.kind is CopyKind.IN else self._device
        dst = self._host if op.kind is CopyKind.OUT else self._device
        copy_runs(src, dst, op)
        if self.checksums is not None:
            after = {
                CopyKind.OUT: self.checksums.after_swap_out,
                CopyKind.WITHIN: self.checksums.after_copy,
                CopyKind.IN: self.checksums.after_swap_in,
            }[op.kind]
            after(op.src, op.dst)


def copy_runs(src: Bytes, dst: Bytes, op: CopyOp) -> None:
    """Copy the blocks of an operation, run by run."""
    for a, b, length in runs(op.src, op.dst):
        np.copyto(dst[b : b + length], src[a : a + length])


def cpu_copies(
    device: Bytes,
    host: Bytes,
    *,
    delay: Callable[[CopyOp], float] | None = None,
    bytes_per_s: float = 0.0,
    verify: bool = False,
) -> CopyEngine:
    """The engine between two tiers of ordinary memory, (num_blocks, bytes_per_block) each."""
    stream = CopyThread(device, host, delay=delay, bytes_per_s=bytes_per_s)
    stream.checksums = BlockChecksums(device, host) if verify else None
    return CopyEngine(
        stream,
        num_device_blocks=len(device),
        num_host_blocks=len(host),
        checksums=stream.checksums,
    )
