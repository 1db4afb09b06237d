"""Copies of whole blocks between and within the tiers, beside the computation but as if one after the other.

A plan's copies are enqueued on a *copy stream* and the step goes on. What must not be seen too early or too late is
fenced:

* copies run in the order in which they were enqueued: swap_out, copy, swap_in of one plan, then those of the next. So
  a host block is read after it was written, and no tier's block is overwritten before an earlier copy has read it;
* a copy starts after the batches that were enqueued before it, since it may read what they write;
* a batch starts after the copies that write a block it reads or writes (`swap_in`, `copy`), and after those that read
  a block it writes (`swap_out`, `copy`). It waits for no others.

`CopyEngine` numbers the operations and keeps, per device block, the last one that wrote and the last one that read it;
a fence is then the largest of a few numbers. A `CopyStream` does the copying: a thread on a CPU (`kv.copy_thread`), a
side stream on a GPU (`kv.copy_cuda`).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from executor_svc.kv.checksums import BlockChecksums

Int32s = NDArray[np.int32]
Pairs = tuple[Int32s, Int32s]
"""Source and destination blocks, equally long. No destination twice, and within one tier no block on both sides."""


class CopyError(RuntimeError):
    """Copies that cannot be done or have failed; the text is one line for the log."""


class CopyKind(Enum):
    """From which tier to which; the values are labels of metrics."""

    OUT = "out"
    """Device to host."""
    WITHIN = "within"
    """Device to device."""
    IN = "in"
    """Host to device."""


@dataclass(frozen=True, slots=True)
class CopyOp:
    """One column pair of one plan."""

    number: int
    """Consecutive from 1 over all operations of an engine."""
    kind: CopyKind
    src: Int32s
    dst: Int32s


@dataclass(frozen=True, slots=True)
class DoneCopy:
    """An operation that finished. `seconds` it took the stream, waiting for its turn not included."""

    number: int
    kind: CopyKind
    num_bytes: int
    seconds: float


@dataclass(slots=True)
class CopyReport:
    """What finished since the last report."""

    steps: list[int] = field(default_factory=list)
    """Steps all of whose copies have finished, ascending; each is reported once."""
    done: list[DoneCopy] = field(default_factory=list)
    num_mismatches: int = 0
    """Blocks whose checksum was not what it had been; always 0 without checksums."""


class CopyStream(Protocol):
    """Runs operations in order. Called from the compute thread only, but for `hurry`."""

    @property
    def num_done(self) -> int:
        """Number of the last operation that finished, with all before it; cancelled ones count as finished."""
        ...

    def enqueue(self, op: CopyOp) -> None:
        """Run `op` after everything enqueued before it and after all computation enqueued so far. Does not wait."""
        ...

    def hold_compute(self, number: int) -> None:
        """Computation enqueued from now on sees what operation `number` did. Raises CopyError if it has failed."""
        ...

    def wait(self, number: int) -> None:
        """Return when operation `number` has finished. Raises CopyError if it has failed."""
        ...

    def take_done(self) -> list[DoneCopy]:
        """Operations that finished since the last call, in order. Raises CopyError if one has failed."""
        ...

    def hurry(self) -> None:
        """Run as fast as possible until the next `cancel`: somebody waits who need not. From any thread."""
        ...

    def cancel(self) -> None:
        """Forget what has not started and past failures; return when nothing runs any more."""
        ...

    def close(self) -> None:
        """As `cancel`, and give up threads and registrations. Nothing may be enqueued afterwards."""
        ...


class CopyEngine:
    """See the head of this file. One thread at a time."""

    def __init__(
        self,
        stream: CopyStream,
        *,
        num_device_blocks: int,
        num_host_blocks: int,
        checksums: BlockChecksums | None = None,
    ) -> None:
        self.num_host_blocks = num_host_blocks
        self.checksums = checksums
        self._stream = stream
        self._num_submitted = 0
        self._written_by = np.zeros(num_device_blocks, np.int64)
        self._read_by = np.zeros(num_device_blocks, np.int64)
        self._has_content = np.zeros(num_host_blocks, np.bool_)
        """Host blocks swapped out to in this session, or that will be once what is enqueued has run."""
        self._steps: deque[tuple[int, int]] = deque()
        """(last operation, step) of steps not reported yet."""

    @property
    def busy(self) -> bool:
        """Whether an operation has not finished."""
        return self._stream.num_done < self._num_submitted

    @property
    def has_news(self) -> bool:
        """Whether `report` may have something to say."""
        return bool(self._steps)

    def submit(self, step_id: int, swap_out: Pairs, copy: Pairs, swap_in: Pairs) -> None:
        """Enqueue a plan's copies. Raises CopyError, enqueuing nothing, for a host block that was never written."""
        known = self._has_content
        if swap_in[0].size and not known[(wanted := swap_in[0])].all():
            unknown = np.setdiff1d(wanted[~known[wanted]], swap_out[1])
            if unknown.size:
                raise CopyError(f"swap_in_src: host block {int(unknown[0])} has no content in this session")
        known[swap_out[1]] = True
        for kind, (src, dst) in ((CopyKind.OUT, swap_out), (CopyKind.WITHIN, copy), (CopyKind.IN, swap_in)):
            if src.size:
                self._enqueue(kind, src, dst)
        self._steps.append((self._num_submitted, step_id))

    def _enqueue(self, kind: CopyKind, src: Int32s, dst: Int32s) -> None:
        self._num_submitted += 1
        number = self._num_submitted
        if kind is not CopyKind.IN:
            self._read_by[src] = number
        if kind is not CopyKind.OUT:
            self._written_by[dst] = number
        self._stream.enqueue(CopyOp(number, kind, src, dst))

    def before_batch(self, read: Int32s, written: Int32s) -> float:
        """Fence a batch that reads and writes these device blocks; `read` has all of `written`.

        Returns the seconds that the caller stood still. Raises CopyError if a copy that it needs has failed.
        """
        number = max(self._last_that_wrote(read), self._last_that_read(written))
        started = time.perf_counter()
        if number > self._stream.num_done:
            self._stream.hold_compute(number)
        return time.perf_counter() - started

    def _last_that_wrote(self, blocks: Int32s) -> int:
        return int(self._written_by[blocks].max(initial=0))

    def _last_that_read(self, blocks: Int32s) -> int:
        return int(self._read_by[blocks].max(initial=0))

    def drain(self) -> float:
        """Return when everything has finished, with the seconds that took. Raises CopyError if something failed."""
        started = time.perf_counter()
        self._stream.wait(self._num_submitted)
        return time.perf_counter() - started

    def report(self) -> CopyReport:
        """What finished since the last call. Raises CopyError if something failed."""
        done = self._stream.num_done  # first: what is done by now has its record below
        report = CopyReport(done=self._stream.take_done())
        while self._steps and self._steps[0][0] <= done:
            report.steps.append(self._steps.popleft()[1])
        if self.checksums is not None:
            report.num_mismatches = self.checksums.take_mismatches()
        return report

    def hurry(self) -> None:
        """No copy is slowed down until the next `reset`; from any thread, signal handlers included."""
        self._stream.hurry()

    def reset(self) -> None:
        """Begin a new session: what has not started is dropped, what runs is waited for, host blocks have no content.

        Nothing of the old session is reported any more.
        """
        self._stream.cancel()
        self._stream.take_done()
        self._steps.clear()
        self._has_content[:] = False
        if self.checksums is not None:
            self.checksums.reset()

    def close(self) -> None:
        """End; copies that have not started are dropped."""
        self._stream.close()


def runs(src: Int32s, dst: Int32s, piece: int = 0) -> Iterator[tuple[int, int, int]]:
    """Pairs joined where both sides go on by one, as (first source, first destination, number of blocks).

    A copy call costs microseconds however short it is. With `piece`, a run is also cut where a multiple of `piece`
    begins on either side.
    """
    cut = (np.diff(src) != 1) | (np.diff(dst) != 1)
    if piece:
        cut |= (src[1:] % piece == 0) | (dst[1:] % piece == 0)
    starts = np.flatnonzero(np.r_[True, cut])
    lengths = np.diff(np.r_[starts, src.size])
    yield from zip(src[starts].tolist(), dst[starts].tolist(), lengths.tolist(), strict=True)
