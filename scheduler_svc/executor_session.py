"""What the scheduler remembers of the executor in use, and of peers that may become one."""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass, field
from enum import Enum

from pagemill.engine.v1 import executor_pb2 as pb
from pagemill.framing import Channel
from pagemill.links import PeerId
from pagemill.logs import kv
from scheduler_svc.core.params import ExecutorLimits
from scheduler_svc.counters import EngineCounters
from scheduler_svc.rates import CopiedBytes, ExecutorRates
from scheduler_svc.sessions import peer_name

log = logging.getLogger(__name__)

MAX_STRANGERS = 64
_STARTING = ("LOADING", "WARMING")


@dataclass(slots=True)
class SentPlan:
    """A plan whose result is not in; kept to be sent again."""

    step_id: int
    message: pb.StepPlan
    num_tokens: int
    num_rows: int
    sent_at: float
    row_num_tokens: list[int] | None = None
    """As in the plan; None: 1 each."""


class Loss(Enum):
    """How an executor went."""

    LEFT = "left"
    """On purpose, or for a fault on this side: nobody died."""
    LOST = "lost"
    """Without a word. It died unless the next one to say hello is the same process."""
    STUCK = "stuck"
    """In a step that did not end: as good as dead."""


@dataclass(slots=True)
class ExecutorSession:
    """One accepted executor. `channel.epoch` changes with each new session on it."""

    peer: PeerId
    hello: pb.ExecutorHello
    rates: ExecutorRates
    last_heard: float
    channel: Channel[pb.ExecutorEnvelope] = field(default_factory=lambda: Channel(pb.ExecutorEnvelope))
    state: pb.ExecutorState = pb.EXECUTOR_STATE_IDLE
    applied_step_id: int = 0
    sent: deque[SentPlan] = field(default_factory=deque)
    """Plans in flight, oldest first; step ids are consecutive behind `applied_step_id`."""
    outbox: deque[bytes] = field(default_factory=deque)
    """Frames the link has not taken. While there are any, nothing is planned."""
    copies: dict[int, CopiedBytes] = field(default_factory=dict)
    """Copies of plans that were sent, by step, until the executor reports them finished."""
    progress_at: float = 0.0
    """When the oldest plan in flight was sent (again), or the last result came."""
    num_resends: int = 0
    is_stuck: bool = False
    """It was given up because a step did not end: whoever comes next, it counts as dead."""
    state_digest: int | None = None
    """Goes with the next plan; None: none does."""
    next_heartbeat: float = 0.0
    hold_until: float = 0.0

    def is_of(self, peer: PeerId, hello: pb.ExecutorHello) -> bool:
        """Whether this hello is one more of the same process."""
        return (peer, hello.incarnation) == (self.peer, self.hello.incarnation)

    @property
    def limits(self) -> ExecutorLimits:
        """What it said in its hello, with the rates that it has shown since."""
        return self.rates.limits

    @property
    def name(self) -> str:
        """Name of the executor, for logs and labels."""
        return peer_name(self.peer).partition("/")[2]


@dataclass(slots=True)
class _Stranger:
    first_seen: float
    last_seen: float
    state: str = "unknown"
    percent: int = 0
    warned: bool = False


class Strangers:
    """Peers that send but have no session, such as executors that are loading. Bounded; only for the log."""

    def __init__(self, *, lease_s: float, hello_timeout_s: float, counters: EngineCounters) -> None:
        self._lease_s, self._hello_timeout_s, self._counters = lease_s, hello_timeout_s, counters
        self._peers: dict[PeerId, _Stranger] = {}

    def note(self, peer: PeerId, envelope: pb.ExecutorEnvelope, now: float) -> None:
        """Remember what one says that is not a hello."""
        if envelope.epoch > 0:  # from a session that is over; it will say hello when its lease runs out
            self._counters.stale["no_session"] += 1
            return
        stranger = self._peers.get(peer)
        if stranger is None:
            if len(self._peers) >= MAX_STRANGERS:
                self._counters.stale["stranger"] += 1
                return
            stranger = self._peers[peer] = _Stranger(now, now)
        stranger.last_seen = now
        if envelope.WhichOneof("body") == "heartbeat":
            stranger.state, stranger.percent = state_name(envelope.heartbeat.state), envelope.heartbeat.percent

    def is_one_starting(self, now: float) -> bool:
        """Whether an executor says that it is loading: heard within its lease, and not overdue with its hello."""
        return any(
            stranger.state in _STARTING
            and now - stranger.last_seen <= self._lease_s
            and now - stranger.first_seen <= self._hello_timeout_s
            for stranger in self._peers.values()
        )

    def forget(self, peer: PeerId) -> None:
        """It has a session now."""
        self._peers.pop(peer, None)

    def check(self, now: float) -> None:
        """Forget those that fell silent; name, once each, those that take too long to say hello."""
        for peer, stranger in list(self._peers.items()):
            waited_s = now - stranger.first_seen
            if now - stranger.last_seen > self._lease_s:
                del self._peers[peer]
            elif waited_s > self._hello_timeout_s and not stranger.warned:
                stranger.warned = True
                log.warning(
                    "executor has not said hello",
                    extra=kv(
                        executor=peer_name(peer),
                        waited_s=round(waited_s),
                        state=stranger.state,
                        percent=stranger.percent,
                    ),
                )


def state_name(state: int) -> str:
    """Name of an executor's state for the log; states of newer executors have none here."""
    if state not in pb.ExecutorState.values():
        return "unknown"
    return pb.ExecutorState.Name(pb.ExecutorState.ValueType(state)).removeprefix("EXECUTOR_STATE_")
