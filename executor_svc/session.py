"""A session with a scheduler, and which of its plans are new, known or missing. Pure: no link, no clock.

Plans carry consecutive step ids. A duplicate gets its stored result again (the last `NUM_STORED` are kept), a gap is
answered with a Nack, and whatever is older than that is dropped.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import numpy as np

from executor_svc.plans import DecodedPlan
from pagemill.engine.v1 import executor_pb2 as pb

NUM_STORED = 4
"""Results kept for duplicates: more than any sensible pipeline depth (docs/wire.md)."""


class Verdict(Enum):
    """What to do with a plan that came in."""

    RUN = "run"
    RUNNING = "running"
    """A duplicate of one whose result is not there yet: nothing to do, the result will come."""
    REPEAT = "repeat"
    """A duplicate whose result is stored."""
    FORGOTTEN = "forgotten"
    """A duplicate older than the stored results."""
    GAP = "gap"


class PlanWindow:
    """The step ids of one session."""

    def __init__(self, first_step_id: int) -> None:
        self._next = first_step_id
        self._stored: dict[int, pb.StepResult] = {}
        self._num_running = 0

    @property
    def last_step_id(self) -> int:
        """The last plan that was received in order."""
        return self._next - 1

    @property
    def num_running(self) -> int:
        """Plans received whose results are not in."""
        return self._num_running

    def judge(self, step_id: int) -> Verdict:
        """What a plan of this id is; changes nothing."""
        if step_id == self._next:
            return Verdict.RUN
        if step_id > self._next:
            return Verdict.GAP
        if step_id in self._stored:
            return Verdict.REPEAT
        return Verdict.RUNNING if step_id >= self._next - self._num_running else Verdict.FORGOTTEN

    def accept(self) -> None:
        """The next plan was received and will be run."""
        self._next += 1
        self._num_running += 1

    def store(self, result: pb.StepResult) -> None:
        """Keep a result; results come in the order of the plans."""
        self._num_running -= 1
        self._stored[result.step_id] = result
        while len(self._stored) > NUM_STORED:
            del self._stored[next(iter(self._stored))]

    def stored(self, step_id: int) -> pb.StepResult:
        """The stored result. KeyError unless `judge` says REPEAT."""
        return self._stored[step_id]


@dataclass(slots=True)
class Session:
    """One accepted hello."""

    epoch: int
    lease_s: float
    window: PlanWindow
    max_queued: int
    """Plans that may wait for the compute thread."""
    _last_num_rows: int = 0

    def size_of(self, plan: DecodedPlan) -> tuple[int, int]:
        """Rows and tokens of the next plan; a repeated batch has the rows of the one before."""
        num_rows = self._last_num_rows if plan.repeat_decode else plan.row_lanes.size
        self._last_num_rows = num_rows
        counts = plan.row_num_tokens
        return num_rows, num_rows if counts is None else int(counts.sum(dtype=np.int64))
