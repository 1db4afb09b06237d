"""`Preempter`: takes the blocks of running sequences and queues them again, and counts how and why.

`preemption` says who and how; this does it, on one executor.
"""

from __future__ import annotations

from scheduler_svc.core.costs import Forecast, TailLosses
from scheduler_svc.core.preemption import Action, Reason, choose_action, forecast_s
from scheduler_svc.core.queues import WaitingQueue
from scheduler_svc.core.running import RunningSet
from scheduler_svc.core.sequence import Sequence, SequenceState
from scheduler_svc.core.stats import Counters


class Preempter:
    """Moves sequences from one running set back to the waiting queue."""

    __slots__ = ("_counters", "_losses", "_running", "_waiting")

    def __init__(self, running: RunningSet, waiting: WaitingQueue, counters: Counters, losses: TailLosses) -> None:
        self._running = running
        self._waiting = waiting
        self._counters = counters
        self._losses = losses

    def preempt(self, seq: Sequence, num_needed: int, reason: Reason) -> None:
        """A running sequence makes room for so many blocks, by the way that costs least, and waits in front."""
        running = self._running
        seq.num_preemptions += 1
        running.last_victim = seq.seq_id
        forecast = forecast_s(running.limits, running.victim(seq), num_needed, self._losses.share)
        action = choose_action(running.limits.preemption_mode, forecast)
        self._counters.preemptions[self.give_up(seq, action, forecast), reason] += 1

    def give_up(self, seq: Sequence, action: Action, forecast: dict[Action, float] | None) -> Action:
        """Takes a running sequence's blocks; returns how it was done in the end: SWAP needs room in the host tier."""
        running = self._running
        stash = running.memory.stash(seq) if action is Action.SWAP else None
        if action is Action.SWAP and stash is None:
            action = Action.RECOMPUTE
        running.take_away(seq)
        if stash is not None:
            seq.swap_out(stash)
        else:
            seq.requeue()
        if forecast is not None:
            spent_s = stash.num_copied * running.limits.costs.swap_out_s if stash is not None else 0.0
            seq.forecast = Forecast(min(forecast.values()), spent_s, let_go=stash is None)
        self._waiting.push(seq)
        return action

    def lose(self, seq: Sequence) -> None:
        """The executor is gone, and all that the running or swapped sequence had there."""
        if seq.state is SequenceState.RUNNING:
            self._running.take_away(seq)
        else:
            self._waiting.remove(seq)
        seq.requeue()
        self._waiting.push(seq)
