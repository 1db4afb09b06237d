"""One live stream: what must be known to resubmit it, its output, and how its writer learns of news.

A stream's number is made here, never by a client, and is not used again while a late message about it may come.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from dataclasses import dataclass

from pagemill import columns
from pagemill.engine.v1.frontend_pb2 import StreamEnded, Submit
from pagemill.engine.v1.sampling_pb2 import Sampling
from pagemill.errors import PagemillError
from scheduler_svc.gateway.output import Ending, EndKind, Output
from scheduler_svc.gateway.status import hide


def cache_salt(tenant: str, salt: str) -> bytes:
    """Salt of prefix-cache keys: a digest that no other pair of tenant and client's salt has; empty when both are.

    The tenant's length stands before it, so that no client can move the border and reach another tenant's blocks.
    """
    if not tenant and not salt:
        return b""
    name = tenant.encode()
    return hashlib.sha256(len(name).to_bytes(4, "little") + name + salt.encode()).digest()


@dataclass(frozen=True, slots=True)
class Replay:
    """Everything a scheduler needs to know to run, or to go on with, a stream. Times are of `time.monotonic`."""

    request_id: str
    tenant: str
    priority: int
    prompt_ids: bytes
    """Column."""
    num_prompt_tokens: int
    sampling: Sampling
    max_tokens: int
    arrival: float
    deadline: float | None
    max_queue_ms: int | None
    cache_salt: bytes

    def submit(self, stream_id: int, emitted_ids: list[int]) -> Submit:
        """The message, with durations as of now."""
        now = time.monotonic()
        age_ms = min(int((now - self.arrival) * 1000), 0xFFFFFFFF)
        submit = Submit(
            stream=stream_id,
            client_request_id=self.request_id,
            tenant=self.tenant,
            priority=self.priority,
            prompt_ids=self.prompt_ids,
            emitted_ids=columns.pack(emitted_ids) if emitted_ids else b"",
            sampling=self.sampling,
            max_tokens=self.max_tokens,
            cache_salt=self.cache_salt,
            age_ms=age_ms,
        )
        if self.max_queue_ms is not None and not emitted_ids:  # a stream with tokens has had its turn
            submit.max_queue_ms = max(1, self.max_queue_ms - age_ms)
        if self.deadline is not None:
            submit.deadline_ms = max(1, min(int((self.deadline - now) * 1000), 0xFFFFFFFF))
        return submit


class LiveStream:
    """A stream between admission control and its last message. Used from the event loop only."""

    __slots__ = (
        "_news",
        "admitted",
        "bill",
        "cancel_requested",
        "error",
        "num_tries",
        "output",
        "replay",
        "retry_until",
        "stream_id",
        "submitted_at",
    )

    def __init__(self, stream_id: int, replay: Replay, output: Output) -> None:
        self.stream_id = stream_id
        self.replay = replay
        self.output = output
        self.admitted = False
        self.submitted_at = 0.0
        self.bill: StreamEnded | None = None
        """The scheduler's last word; None until it came."""
        self.error: PagemillError | None = None
        self.cancel_requested = False
        self.retry_until: float | None = None
        """While an admitted stream is refused, or not answered, after a resubmission: when to give up."""
        self.num_tries = 0
        """Sessions that ended with this stream submitted and not answered, since it was last accepted."""
        self._news = asyncio.Event()

    @property
    def is_over(self) -> bool:
        """Whether nothing more will come out of the stream but its end."""
        return self.error is not None or self.output.ending is not None

    @property
    def ends_early(self) -> bool:
        """Whether it is over by what only the gateway knows: the scheduler would go on."""
        ending = self.output.ending
        return self.error is not None or (ending is not None and ending.stop_string is not None)

    def accept(self) -> None:
        """The scheduler has queued it."""
        self.admitted = True
        self.retry_until = None
        self.num_tries = 0
        self._news.set()

    def fail(self, error: PagemillError) -> None:
        """It ends with an error, unless it has ended already."""
        if not self.is_over:
            self.error = error
        self._news.set()

    def _break(self, error: Exception) -> None:
        """A fault in handling this stream's own output is the end of this stream, and of nothing else."""
        self.error = hide(error)
        self._news.set()

    def add_tokens(self, first_index: int, token_ids: list[int]) -> bool:
        """Take tokens of one step, each index exactly once; False if some before them are missing. Never raises."""
        output = self.output
        have = len(output.token_ids)
        if output.ending is not None or self.error is not None:
            return True
        if first_index > have:
            return False
        try:
            for token_id in token_ids[have - first_index :]:
                output.push(token_id)
        except Exception as error:
            self._break(error)
        self._news.set()
        return True

    def end(self, ended: StreamEnded) -> None:
        """The scheduler's last word came; a stop rule that matched here first stands. Never raises."""
        self.bill = ended
        if not self.is_over:
            try:
                self._end_output(ended.reason)
            except Exception as error:
                self._break(error)
        self._news.set()

    def _end_output(self, reason: int) -> None:
        if reason == 1:  # END_REASON_STOP
            self.output.end_by_last_token()
        else:
            self.output.end(Ending(EndKind.LENGTH if reason == 2 else EndKind.CANCELLED))

    def cancel(self) -> None:
        """Another call asked to end it."""
        self.cancel_requested = True
        self._news.set()

    async def wait(self) -> None:
        """Until something has happened since the last call. Callers look before they wait."""
        await self._news.wait()

    def seen(self) -> None:
        """Forget news; call before looking at the state."""
        self._news.clear()
