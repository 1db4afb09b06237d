"""What sessions with executors and with gateways have in common: epochs, and the answer to a hello."""

from __future__ import annotations

from collections.abc import Callable

from pagemill.engine.v1.executor_pb2 import ExecutorHello
from pagemill.engine.v1.frontend_pb2 import FrontendHello
from pagemill.framing import PROTOCOL
from pagemill.links import PeerId

Clock = Callable[[], float]
"""Monotonic seconds."""

MAX_EPOCH = 2**62
"""A hello above this is refused: epochs must stay below 2^64 however often they are raised."""

MAX_FINGERPRINT_CHARS = 256


class EpochSource:
    """Epochs for sessions of all kinds, strictly increasing over the life of the process.

    They start at the wall clock's milliseconds, so they go up over restarts too; a clock that went back is overtaken
    because each epoch is also above the one in the hello.
    """

    def __init__(self, start: int) -> None:
        self._last = start

    def next(self, above: int = 0) -> int:
        """A new epoch, above all issued before and above `above`."""
        self._last = max(self._last, above) + 1
        return self._last

    def for_reject(self, heard: int) -> int:
        """An epoch for the answer to a hello that is refused: the peer would drop one it knows as stale or doubled."""
        return self.next(heard if heard <= MAX_EPOCH else 0)


class PauseMeter:
    """How long a loop that comes round every `usual_s` stood still: stopped, swapped out, or busy with a long round."""

    def __init__(self, usual_s: float, now: float) -> None:
        self._usual_s, self._last = usual_s, now

    def since_last(self, now: float) -> float:
        """Seconds beyond the usual since the last call."""
        paused_s = max(0.0, now - self._last - self._usual_s)
        self._last = now
        return paused_s


def refuse_hello(hello: ExecutorHello | FrontendHello, epoch: int) -> str | None:
    """One line why a hello cannot be accepted whatever the state; None if it can."""
    if not hello.protocol_min <= PROTOCOL <= hello.protocol_max:
        return f"this scheduler speaks protocol {PROTOCOL}, the peer {hello.protocol_min} to {hello.protocol_max}"
    if epoch > MAX_EPOCH:
        return f"epoch {epoch} was never issued"
    if not 0 < len(hello.model_fingerprint) <= MAX_FINGERPRINT_CHARS:
        return f"the hello needs a model fingerprint of at most {MAX_FINGERPRINT_CHARS} characters"
    return None


def peer_name(peer: PeerId) -> str:
    """`role/name` for logs; the incarnation is left out."""
    return peer.rpartition(b"/")[0].decode("ascii", "replace")


def plain(text: str, limit: int = 200) -> str:
    """A peer's own words, fit for a log line."""
    return "".join(c if c.isprintable() else "?" for c in text[:limit])
