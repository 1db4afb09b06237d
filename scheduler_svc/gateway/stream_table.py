"""The live streams of a gateway, and what each still waits for: to be submitted, answered, cancelled, ended.

Pure but for the clock that `LiveStream` needs: it takes messages of the scheduler and says what they mean; sockets and
sessions are `scheduler_client`'s. A method that finds that something was lost returns why, and changes nothing that a
new session would not bring again; otherwise it returns None.

What is to be sent is derived from this state, so it is bounded by the number of live streams and nothing is lost while
the link is full.
"""

from __future__ import annotations

from collections.abc import Iterator

from pagemill import columns
from pagemill.engine.v1 import frontend_pb2 as wire
from pagemill.errors import PagemillError
from scheduler_svc.gateway.metrics import GatewayMetrics
from scheduler_svc.gateway.refusals import PASSING, not_answered, public_error
from scheduler_svc.gateway.streams import LiveStream

_RETRY_S = 0.5
_MAX_TRIES = 3
"""Sessions that may end with a stream unanswered before it is refused, unless it was admitted once."""
_MAX_STREAM_ID = 2**31 - 1


class StreamTable:
    """All live streams. Used from the event loop only; times are of `time.monotonic`."""

    def __init__(self, metrics: GatewayMetrics, resume_timeout_s: float = 60.0) -> None:
        """`resume_timeout_s`: how long an admitted stream, a promise, outlasts a scheduler that does not run it."""
        self._metrics = metrics
        self._resume_timeout_s = resume_timeout_s
        self._next_id = 0
        self.streams: dict[int, LiveStream] = {}
        self.to_submit: dict[int, float] = {}
        """Stream → not before."""
        self.unanswered: dict[int, float] = {}
        """Stream → when it was submitted in this session."""
        self.to_cancel: set[int] = set()

    def __len__(self) -> int:
        return len(self.streams)

    def new_id(self) -> int:
        """A stream number that no live stream has."""
        while True:
            self._next_id = self._next_id % _MAX_STREAM_ID + 1
            if self._next_id not in self.streams:
                return self._next_id

    def add(self, stream: LiveStream, now: float) -> None:
        """A new stream, to be submitted."""
        stream.submitted_at = now
        self.streams[stream.stream_id] = stream
        self.to_submit[stream.stream_id] = 0.0

    def remove(self, stream_id: int) -> None:
        """Nobody waits for the stream any more."""
        self.streams.pop(stream_id, None)
        self.to_submit.pop(stream_id, None)
        self.unanswered.pop(stream_id, None)

    def cancel(self, stream_id: int, *, in_session: bool) -> None:
        """Have a stream ended. One that the scheduler does not know, or will not hear of, ends here."""
        if (stream := self.streams.get(stream_id)) is None:
            return
        unknown = self.to_submit.pop(stream_id, None) is not None  # to the scheduler, yet or any more
        if unknown or not in_session:  # the next session is not told of it
            end_cancelled(stream)
        else:
            self.to_cancel.add(stream_id)

    # ---- Sessions ----

    def due(self, now: float) -> Iterator[LiveStream]:
        """Streams to be submitted now; report each with `submitted` before the next is taken."""
        for stream_id, not_before in list(self.to_submit.items()):
            stream = self.streams.get(stream_id)
            if stream is None or stream.is_over:
                del self.to_submit[stream_id]
            elif not_before <= now:
                yield stream

    def submitted(self, stream: LiveStream, now: float) -> None:
        """Its Submit is on the way."""
        del self.to_submit[stream.stream_id]
        self.unanswered[stream.stream_id] = now

    def longest_wait(self, now: float) -> float:
        """Seconds since the oldest Submit that has no answer; 0 when all have one."""
        return now - min(self.unanswered.values(), default=now)

    def open_session(self) -> None:
        """A new session knows no stream: all that are to go on are to be submitted."""
        self.to_cancel.clear()
        self.unanswered.clear()
        self.to_submit = {i: 0.0 for i, s in self.streams.items() if not s.is_over and not s.cancel_requested}
        self._end_leaving()

    def lose_session(self, now: float) -> None:
        """No session: what is leaving has left, and what was never answered has used up a try."""
        for stream_id in self.unanswered:
            if (stream := self.streams.get(stream_id)) is not None:
                self._count_try(stream, now)
        self.unanswered.clear()
        self._end_leaving()

    def refuse_waiting(self, error: PagemillError, since: float) -> None:
        """Refuse streams that wait since `since` or longer and that no scheduler has taken."""
        for stream in self.streams.values():
            if not stream.admitted and stream.submitted_at <= since:
                stream.fail(error)

    def _end_leaving(self) -> None:
        """No later session knows streams that had ended or were to be cancelled: nothing more will come."""
        for stream in self.streams.values():
            if stream.bill is None and (stream.cancel_requested or stream.is_over):
                end_cancelled(stream)

    def _count_try(self, stream: LiveStream, now: float) -> None:
        """A session ended with its Submit unanswered. A scheduler that opens sessions and answers nothing must not
        hold a call until its client's deadline.
        """
        stream.num_tries += 1
        if self._is_given_up(stream, now) if stream.admitted else stream.num_tries >= _MAX_TRIES:
            stream.fail(not_answered())

    def _is_given_up(self, stream: LiveStream, now: float) -> bool:
        """Whether an admitted stream has waited for long enough; its wait begins with the first call."""
        stream.retry_until = stream.retry_until or now + self._resume_timeout_s
        return now >= stream.retry_until

    # ---- Messages of the scheduler ----

    def accepted(self, stream_id: int) -> None:
        """The scheduler has queued it."""
        self.unanswered.pop(stream_id, None)
        if (stream := self.streams.get(stream_id)) is not None:
            stream.accept()

    def tokens(self, batch: wire.TokenBatch) -> tuple[list[LiveStream], str | None]:
        """Hand each entry to its stream; those that are over by it (the scheduler does not know), and what is lost."""
        entries = _entries(batch)
        if entries is None:
            self._metrics.stale.labels("malformed").inc()
            return [], "a malformed batch of tokens"
        num_accepted, complete, ended = 0, True, []
        for stream_id, index, ids in entries:
            if (stream := self.streams.get(stream_id)) is None:
                continue
            was_over, had = stream.is_over, len(stream.output.token_ids)
            complete &= stream.add_tokens(index, ids)
            num_accepted += len(stream.output.token_ids) - had
            if not was_over and stream.ends_early:
                ended.append(stream)
        self._metrics.generated_tokens.inc(num_accepted)
        return ended, None if complete else "tokens are missing"

    def rejected(self, message: wire.StreamRejected, now: float) -> None:
        """The scheduler does not take it: the end of the stream, or a pause if it was admitted once."""
        self.unanswered.pop(message.stream, None)
        stream = self.streams.get(message.stream)
        if stream is None:
            return
        if stream.admitted and message.error in PASSING:
            if stream.cancel_requested or stream.is_over:
                end_cancelled(stream)
                return
            # It was admitted once: a promise. The client sees a pause while the new scheduler finds its feet.
            if not self._is_given_up(stream, now):
                self.to_submit[message.stream] = now + _RETRY_S
                return
        stream.fail(public_error(message.error, message.message, _retry_after_ms(message)))

    def ended(self, message: wire.StreamEnded) -> str | None:
        """The scheduler's last word; why it cannot be that, if tokens before it are missing."""
        self.unanswered.pop(message.stream, None)
        stream = self.streams.get(message.stream)
        if stream is None:
            return None
        if message.reason == wire.END_REASON_UNSPECIFIED:
            stream.bill = message
            stream.fail(public_error(message.error, message.message, _retry_after_ms(message)))
        elif message.num_output_tokens > len(stream.output.token_ids) and not stream.is_over:
            return "tokens are missing before an end"
        else:
            stream.end(message)
        return None


def end_cancelled(stream: LiveStream) -> None:
    """End a stream as the scheduler would at its cancellation."""
    stream.end(wire.StreamEnded(stream=stream.stream_id, reason=wire.END_REASON_CANCELLED))


def _retry_after_ms(message: wire.StreamRejected | wire.StreamEnded) -> int | None:
    return message.retry_after_ms if message.HasField("retry_after_ms") else None


def _entries(batch: wire.TokenBatch) -> list[tuple[int, int, list[int]]] | None:
    """(stream, first index, ids) of each entry; None if the columns do not fit together."""
    try:
        streams, first_index = columns.unpack(batch.streams), columns.unpack(batch.first_index)
        ids = columns.unpack(batch.token_ids)
        counts = columns.unpack(batch.counts) if batch.counts else [1] * len(streams)
    except ValueError:
        return None
    fit = len(streams) == len(first_index) == len(counts)
    if not fit or sum(counts) != len(ids) or min(counts, default=1) <= 0:
        return None
    entries, position = [], 0
    for stream_id, index, count in zip(streams, first_index, counts, strict=True):
        entries.append((stream_id, index, ids[position : position + count]))
        position += count
    return entries
