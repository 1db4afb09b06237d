"""The copy engine of an oracle: copies are queued with their plan and happen later, in order, as late as told to.

A copy reads its source at the moment at which it happens, not at which it was planned, so a source that is overwritten
too early or a destination that is read too early shows in what was copied. The oracle keeps what an executor promises
(a batch waits for the copies it depends on) and nothing more.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from pagemill.columns import unpack
from pagemill.engine.v1 import executor_pb2 as pb


class CopyKind(Enum):
    """Between which tiers; within one plan in this order."""

    OUT = "swap_out"
    COPY = "copy"
    IN = "swap_in"


@dataclass(slots=True, eq=False)
class BlockCopy:
    """One block to copy."""

    step_id: int
    kind: CopyKind
    src: int
    dst: int
    due: float = 0.0
    """When it happens by itself: a step id, or a time if the executor's pace has a copy rate."""
    checksum: int = 0
    """Of the source as it is if everything planned before has happened."""

    @property
    def device_source(self) -> int | None:
        return None if self.kind is CopyKind.IN else self.src

    @property
    def device_target(self) -> int | None:
        return None if self.kind is CopyKind.OUT else self.dst


def copies_of(plan: pb.StepPlan) -> list[BlockCopy]:
    """The copies of a plan in their order. ValueError for columns of unequal length."""
    found = []
    for kind in CopyKind:
        sources, targets = unpack(getattr(plan, f"{kind.value}_src")), unpack(getattr(plan, f"{kind.value}_dst"))
        found += [BlockCopy(plan.step_id, kind, src, dst) for src, dst in zip(sources, targets, strict=True)]
    return found


class CopyQueue:
    """Copies that have not happened, oldest first, and plans whose copies all have but that were not reported."""

    def __init__(self, perform: Callable[[BlockCopy], None]) -> None:
        self.pending: deque[BlockCopy] = deque()
        self.num_done: Counter[CopyKind] = Counter()
        self._perform = perform
        self._finished: list[int] = []

    def add(self, copies: list[BlockCopy], due: float) -> None:
        """Queue the copies of one plan, all due then and not before those queued earlier."""
        due = max(due, self.pending[-1].due if self.pending else due)
        for copy in copies:
            copy.due = due
        self.pending.extend(copies)

    def finish_due(self, now: float) -> None:
        while self.pending and self.pending[0].due <= now:
            self._finish_one()

    def finish_through(self, last: BlockCopy | None) -> None:
        """Everything up to this copy happens; nothing for None or one that has happened."""
        if last is None or last not in self.pending:
            return
        while self._finish_one() is not last:
            pass

    def finish_all(self) -> None:
        while self.pending:
            self._finish_one()

    def take_finished(self) -> list[int]:
        """Plans to report, each once."""
        finished, self._finished = self._finished, []
        return finished

    def clear(self) -> None:
        """A session ends: what has not happened never will."""
        self.pending.clear()
        self._finished.clear()

    def _finish_one(self) -> BlockCopy:
        copy = self.pending.popleft()
        self._perform(copy)
        self.num_done[copy.kind] += 1
        if not self.pending or self.pending[0].step_id != copy.step_id:
            self._finished.append(copy.step_id)
        return copy
