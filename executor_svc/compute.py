"""The compute thread: the one thread that uses torch. It runs plans in order and never touches a socket.

Loading and warming up happen here too (`call`): OpenMP keeps a team of workers per calling thread, and a process with
more of them than CPUs stops spinning between operators (measured on two cores: 0.29 s instead of 0.18 s for a decode
step of 54 rows).

The main thread hands in plans with the epoch of their session, and takes outcomes out; a new epoch makes the thread
drop all lanes before the next plan and skip what is left of older epochs. Both directions are bounded by the caller:
it submits only while `num_queued` is below its limit, and every submitted plan gives at most one outcome.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, TypeVar

import torch

from executor_svc.plans import DecodedPlan, PlanError, StepOutcome
from executor_svc.step import StepExecutor

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Work:
    """One plan for the thread. `arrived` is on `time.monotonic`."""

    epoch: int
    step_id: int
    plan: DecodedPlan | PlanError
    arrived: float
    num_rows: int = 0
    num_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Done:
    """A plan that was run."""

    work: Work
    outcome: StepOutcome


@dataclass(frozen=True, slots=True)
class _Call:
    """Something to run before any plan."""

    function: Callable[[], Any]
    result: Future[Any]


class ComputeThread:
    """Starts with `start`, ends with `stop`; runs plans once `attach` has said with what."""

    def __init__(self) -> None:
        self._executor: StepExecutor | None = None
        self._wake: Callable[[], None] = lambda: None
        self._inbox: SimpleQueue[Work | _Call | None] = SimpleQueue()
        self._done: deque[Done] = deque()
        self._epoch = 0
        self._ran_epoch = 0
        self._thread = threading.Thread(target=self._loop, name="compute", daemon=True)
        self.running_step: int | None = None
        """The step that runs now."""
        self.last_step_id = 0
        """The last step that finished."""
        self.since = time.monotonic()
        """When the thread began or stopped running a step, on `time.monotonic`."""

    def start(self) -> None:
        """Begin to run what is submitted; nothing happens when it has begun already."""
        if not self._thread.is_alive():
            self._thread.start()

    def call(self, function: Callable[[], T]) -> Future[T]:
        """Runs `function` on the thread, before any plan; the future has what it returned or raised."""
        future: Future[T] = Future()
        self._inbox.put(_Call(function, future))
        return future

    def attach(self, executor: StepExecutor, wake: Callable[[], None]) -> None:
        """Plans run on `executor`; `wake` is called from the thread after each outcome and at its end."""
        self._executor, self._wake = executor, wake

    def submit(self, work: Work) -> None:
        """Queue one plan; work of an epoch other than the last `begin` is skipped."""
        self._inbox.put(work)

    def begin(self, epoch: int) -> None:
        """Only plans of this epoch run from now on; 0: none do. Does not wait for the step that runs now.

        That one is not kept by copies which a throttle holds back. The first plan of an epoch restores the throttle.
        """
        self._epoch = epoch
        if self._executor is not None:
            self._executor.hurry()

    @property
    def num_queued(self) -> int:
        """Plans that wait; the one that runs is not among them."""
        return self._inbox.qsize()

    @property
    def alive(self) -> bool:
        """Whether the thread runs; it ends only by `stop`, or by an error outside every barrier."""
        return self._thread.is_alive()

    def take(self) -> Done | None:
        """The next outcome, in the order of the plans, or None."""
        return self._done.popleft() if self._done else None

    def stop(self, timeout_s: float) -> bool:
        """Let the running step finish and end; False if it has not ended within `timeout_s` seconds."""
        self.begin(0)
        self._inbox.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _loop(self) -> None:
        try:
            with torch.inference_mode():
                while (work := self._inbox.get()) is not None:
                    if isinstance(work, _Call):
                        _answer(work)
                    elif work.epoch == self._epoch:
                        self._run(work)
        finally:
            if self._executor is not None:
                self._executor.close()
            self._wake()

    def _run(self, work: Work) -> None:
        assert self._executor is not None, "plans come after attach"
        started = time.monotonic()
        self.since, self.running_step = started, work.step_id
        if work.epoch != self._ran_epoch:
            self._executor.reset()
            self._ran_epoch = work.epoch
        outcome = self._executor.execute(_expired(work, started), work.step_id)
        outcome.wait_us = min(int((started - work.arrived) * 1e6), 0xFFFFFFFF)
        self._done.append(Done(work, outcome))
        self.last_step_id, self.running_step, self.since = work.step_id, None, time.monotonic()
        self._wake()


def _answer(call: _Call) -> None:
    try:
        call.result.set_result(call.function())
    except BaseException as error:
        call.result.set_exception(error)


def _expired(work: Work, now: float) -> DecodedPlan | PlanError:
    """The plan, or the error that the scheduler has given it up already."""
    plan = work.plan
    if isinstance(plan, DecodedPlan) and plan.deadline_ms and (now - work.arrived) * 1000 > plan.deadline_ms:
        return PlanError(f"began {(now - work.arrived) * 1000:.0f} ms after it came, deadline {plan.deadline_ms} ms")
    return plan
