"""The copy stream of a GPU: a side stream with events, and host memory registered with the driver.

**Not run on a GPU yet**: no runner offers CUDA so far. The order of its operations is tested on a CPU against streams
made of threads; rates, registration and the driver's own behaviour are not.

Every operation waits for an event recorded on the compute stream when it was enqueued, hence for the last batch that
was *enqueued*, not the last that finished; a batch that depends on a copy waits for that copy's event on the device,
and no host thread stands still. One side stream for all directions: its order is the order of the plans, so a host
block is never read before it was written nor overwritten before it was read. The tensors live as long as the stream,
so the allocator needs no word about their use on it.
"""

from __future__ import annotations

import logging
import math
import mmap
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from executor_svc.kv.copy_engine import CopyError, CopyKind, CopyOp, DoneCopy, runs
from pagemill.logs import kv

log = logging.getLogger(__name__)

_MAX_REGISTRATION_BYTES = 64 << 30

CopyRun = Callable[[torch.Tensor, torch.Tensor], object]
"""Copies its second argument's bytes to its first's, on the current stream, without waiting."""


def _copy_on_current_stream(dst: torch.Tensor, src: torch.Tensor) -> None:
    dst.copy_(src, non_blocking=True)


@dataclass(frozen=True, slots=True)
class _Enqueued:
    op: CopyOp
    begun: Any
    ended: Any


class CudaCopyStream:
    """`CopyStream` on a side stream; `device` and `host` are (num_blocks, bytes_per_block) uint8.

    `chunk_blocks`: host blocks per registration, which no single copy may straddle; 0: one registration.
    """

    def __init__(
        self,
        device: torch.Tensor,
        host: torch.Tensor,
        *,
        chunk_blocks: int = 0,
        cuda: Any = torch.cuda,
        copy: CopyRun = _copy_on_current_stream,
    ) -> None:
        self._device = device
        self._host = host
        self._chunk_blocks = chunk_blocks
        self._cuda = cuda
        self._copy = copy
        self._stream = cuda.Stream()  # of the default priority, which is the lowest
        self._enqueued: deque[_Enqueued] = deque()
        self._done: list[DoneCopy] = []
        self._num_done = 0

    @property
    def num_done(self) -> int:
        """As `CopyStream.num_done`."""
        while self._enqueued and self._enqueued[0].ended.query():
            self._finish(self._enqueued.popleft())
        return self._num_done

    def enqueue(self, op: CopyOp) -> None:
        """As `CopyStream.enqueue`."""
        self._after_compute()
        begun, ended = self._cuda.Event(enable_timing=True), self._cuda.Event(enable_timing=True)
        begun.record(self._stream)
        src = self._host if op.kind is CopyKind.IN else self._device
        dst = self._host if op.kind is CopyKind.OUT else self._device
        with self._cuda.stream(self._stream):
            for a, b, length in runs(op.src, op.dst, self._chunk_blocks):
                self._copy(dst[b : b + length], src[a : a + length])
        ended.record(self._stream)
        self._enqueued.append(_Enqueued(op, begun, ended))

    def _after_compute(self) -> None:
        computed = self._cuda.Event()
        computed.record(self._cuda.current_stream())
        self._stream.wait_event(computed)

    def hold_compute(self, number: int) -> None:
        """As `CopyStream.hold_compute`: the device waits, the host does not."""
        for item in self._enqueued:
            if item.op.number == number:
                self._cuda.current_stream().wait_event(item.ended)

    def wait(self, number: int) -> None:
        """As `CopyStream.wait`."""
        for item in [item for item in self._enqueued if item.op.number <= number]:
            item.ended.synchronize()
        if self.num_done < number:
            raise CopyError(f"operation {number} was never enqueued")

    def take_done(self) -> list[DoneCopy]:
        """As `CopyStream.take_done`; an error of the device is raised by the driver as RuntimeError."""
        done, self._done = self._done, []
        return done

    def hurry(self) -> None:
        """As `CopyStream.hurry`: nothing is slowed down here."""

    def cancel(self) -> None:
        """As `CopyStream.cancel`: what is on the device cannot be taken back, so all of it is waited for."""
        self._stream.synchronize()
        while self._enqueued:
            self._finish(self._enqueued.popleft())

    def close(self) -> None:
        """As `CopyStream.close`."""
        self.cancel()

    def _finish(self, item: _Enqueued) -> None:
        seconds = item.begun.elapsed_time(item.ended) / 1000
        size = item.op.src.size * self._device.shape[1]
        self._done.append(DoneCopy(item.op.number, item.op.kind, size, seconds))
        self._num_done = item.op.number


class HostRegistration:
    """Page-locks the memory of a host pool while it exists, so that copies run at the speed of the bus.

    The memory is ordinary: torch's own pinned memory rounds up to a power of two. If the driver refuses, everything is
    given back, a warning says so, and copies are slower but as right.
    """

    def __init__(self, address: int, num_blocks: int, bytes_per_block: int, *, cudart: Any) -> None:
        self.chunk_blocks = _chunk_blocks(bytes_per_block)
        self._cudart = cudart
        self._registered: list[int] = []
        for first in range(0, num_blocks, self.chunk_blocks):
            start = address + first * bytes_per_block
            size = min(self.chunk_blocks, num_blocks - first) * bytes_per_block
            status = int(cudart.cudaHostRegister(start, size, 0))
            if status:
                log.warning("host memory stays pageable", extra=kv(status=status, bytes=size, registered=first))
                self.close()
                return
            self._registered.append(start)

    @property
    def is_pinned(self) -> bool:
        """Whether all of the memory is registered."""
        return bool(self._registered)

    def close(self) -> None:
        """Give the registrations back; at exit, after the last copy."""
        while self._registered:
            self._cudart.cudaHostUnregister(self._registered.pop())


def _chunk_blocks(bytes_per_block: int) -> int:
    """Most blocks per registration, so that chunks begin on borders of blocks and of memory pages."""
    step = mmap.PAGESIZE // math.gcd(mmap.PAGESIZE, bytes_per_block)
    return max(1, _MAX_REGISTRATION_BYTES // (bytes_per_block * step)) * step
