"""Messages of a Generate stream, and the clock that observes them."""

from __future__ import annotations

import time

from pagemill.v1 import inference_pb2 as pb
from scheduler_svc.gateway.metrics import GatewayMetrics
from scheduler_svc.gateway.output import EndKind, Piece
from scheduler_svc.gateway.streams import LiveStream
from scheduler_svc.gateway.validation import Generation

_FINISH = {
    EndKind.STOP: pb.FINISH_REASON_STOP,
    EndKind.LENGTH: pb.FINISH_REASON_LENGTH,
    EndKind.CANCELLED: pb.FINISH_REASON_CANCELLED,
}


class OutputClock:
    """Observes when output leaves, per token, whether the client asked for ids or not."""

    def __init__(self, metrics: GatewayMetrics, arrival: float) -> None:
        self._metrics = metrics
        self._arrival = arrival
        self._last: float | None = None
        self._num_tokens = 0

    def took(self, num_tokens: int) -> None:
        """That many tokens go with the next message."""
        self._num_tokens += num_tokens

    def delta(self) -> None:
        """A delta is being written."""
        now = time.monotonic()
        if self._last is None:
            self._metrics.ttft.observe(now - self._arrival)
        else:
            self._observe(now - self._last)
        self._last, self._num_tokens = now, 0

    def ended(self) -> None:
        """The output has ended; its last tokens may have shown nothing."""
        if self._last is not None:
            self._observe(time.monotonic() - self._last)

    def finished(self) -> None:
        """The last message has been written."""
        self._metrics.e2e.observe(time.monotonic() - self._arrival)

    def _observe(self, elapsed_s: float) -> None:
        for _ in range(self._num_tokens):
            self._metrics.inter_token.observe(elapsed_s / self._num_tokens)


def delta(piece: Piece, generation: Generation) -> pb.GenerateResponse | None:
    """A piece of output as a message; None if there is nothing in it that the client wants to see."""
    text = piece.text if generation.return_text else ""
    ids = piece.token_ids if generation.return_token_ids else []
    if not text and not ids:
        return None
    return pb.GenerateResponse(delta=pb.OutputDelta(first_index=piece.first_index, token_ids=ids, text=text))


def finished(stream: LiveStream) -> pb.Finished:
    """The last message of a stream that ended well."""
    ending, bill = stream.output.ending, stream.bill
    assert ending is not None
    message = pb.Finished(
        reason=_FINISH[ending.kind],
        usage=pb.Usage(
            prompt_tokens=stream.replay.num_prompt_tokens,
            completion_tokens=len(stream.output.token_ids),
            cached_tokens=num_cached(stream),
        ),
    )
    if ending.stop_string is not None:
        message.stop_string = ending.stop_string
    elif ending.stop_token_id is not None:
        message.stop_token_id = ending.stop_token_id
    if bill is not None:
        message.bill.queue_ms = bill.queue_ms
        message.bill.computed_tokens = bill.computed_tokens
        message.bill.num_preemptions = bill.num_preemptions
        message.bill.swapped_bytes = bill.swapped_bytes
    return message


def num_cached(stream: LiveStream) -> int:
    """Prompt tokens from the prefix cache: below the prompt's length, whatever a resubmission found besides."""
    return min(stream.bill.cached_tokens, stream.replay.num_prompt_tokens - 1) if stream.bill is not None else 0
