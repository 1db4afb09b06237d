"""Result folding: from `pagemill.v1` messages to events and whole generations. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from pagemill.v1 import inference_pb2 as pb
from pagemill.v1 import model_pb2
from pagemill_client.errors import ProtocolError
from pagemill_client.types import (
    Accepted,
    Bill,
    Delta,
    Event,
    Finished,
    FinishReason,
    Generation,
    ModelInfo,
    Output,
    TokenLogprobs,
    Usage,
)

_REASONS: dict[int, FinishReason] = {
    pb.FINISH_REASON_STOP: FinishReason.STOP,
    pb.FINISH_REASON_LENGTH: FinishReason.LENGTH,
    pb.FINISH_REASON_CANCELLED: FinishReason.CANCELLED,
}


@dataclass(slots=True)
class _Parts:
    """Pieces of one output."""

    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finished: Finished | None = None


class StreamFolder:
    """Turns responses of one Generate call into events and holds the stream to its contract.

    The contract: Accepted first and once; indices gapless per output; exactly one Finished per output and nothing
    after it. Anything else raises ProtocolError.
    """

    def __init__(self, request: pb.GenerateRequest) -> None:
        output = request.output
        self._num_outputs = max(1, output.n)
        self._outputs: list[_Parts] = []
        """Made when the request is accepted: until then nobody has said that so many can be had."""
        self._has_ids = output.return_token_ids if output.HasField("return_token_ids") else True
        self.accepted: Accepted | None = None

    def add(self, response: pb.GenerateResponse) -> Event:
        """The event of one response."""
        kind = response.WhichOneof("event")
        if kind == "accepted":
            return self._accept(response.accepted)
        if self.accepted is None:
            raise ProtocolError("the stream did not begin with Accepted")
        if kind == "delta":
            return self._extend(response.delta)
        if kind == "finished":
            return self._finish(response.finished)
        raise ProtocolError("an event of no known kind")

    def end(self) -> Generation:
        """The whole generation after a stream that ended with status OK."""
        if any(parts.finished is None for parts in self._outputs):
            raise ProtocolError("the stream ended before every output was finished")
        return self.so_far()

    def so_far(self) -> Generation:
        """What has arrived."""
        if self.accepted is None:
            raise ProtocolError("the stream ended without Accepted")
        return Generation(
            accepted=self.accepted,
            outputs=tuple(
                Output("".join(p.texts), tuple(p.token_ids), tuple(p.logprobs), p.finished) for p in self._outputs
            ),
        )

    def text(self, output_index: int = 0) -> str:
        """Text of one output so far."""
        return "" if self.accepted is None else "".join(self._outputs[output_index].texts)

    def _accept(self, accepted: pb.Accepted) -> Accepted:
        if self.accepted is not None:
            raise ProtocolError("a second Accepted")
        self.accepted = Accepted(accepted.request_id, accepted.num_prompt_tokens, accepted.seed, accepted.model)
        self._outputs = [_Parts() for _ in range(self._num_outputs)]
        return self.accepted

    def _open_output(self, index: int) -> _Parts:
        if index >= len(self._outputs):
            raise ProtocolError(f"output_index {index} of {len(self._outputs)} outputs")
        parts = self._outputs[index]
        if parts.finished is not None:
            raise ProtocolError(f"an event after the end of output {index}")
        return parts

    def _extend(self, delta: pb.OutputDelta) -> Delta:
        parts = self._open_output(delta.output_index)
        if self._has_ids and delta.first_index != len(parts.token_ids):
            raise ProtocolError(f"first_index is {delta.first_index}, expected {len(parts.token_ids)}")
        event = Delta(
            delta.output_index,
            delta.first_index,
            tuple(delta.token_ids),
            delta.text,
            tuple(TokenLogprobs(p.logprob, tuple((t.token_id, t.logprob) for t in p.top)) for p in delta.logprobs),
        )
        parts.token_ids.extend(event.token_ids)
        parts.texts.append(event.text)
        parts.logprobs.extend(event.logprobs)
        return event

    def _finish(self, finished: pb.Finished) -> Finished:
        parts = self._open_output(finished.output_index)
        reason = _REASONS.get(finished.reason)
        if reason is None:
            raise ProtocolError(f"finish reason {finished.reason}")
        match = finished.WhichOneof("stop_match")
        usage, bill = finished.usage, finished.bill
        parts.finished = Finished(
            output_index=finished.output_index,
            reason=reason,
            stop_match=getattr(finished, match) if match else None,
            usage=Usage(usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens),
            bill=Bill(bill.queue_ms, bill.computed_tokens, bill.num_preemptions, bill.swapped_bytes),
        )
        return parts.finished


def model_info(info: model_pb2.ModelInfo) -> ModelInfo:
    """The value of a ModelInfo message."""
    limits = info.limits
    return ModelInfo(
        name=info.name,
        architecture=info.architecture,
        fingerprint=info.fingerprint,
        tokenizer_hash=info.tokenizer_hash,
        vocab_size=info.vocab_size,
        max_model_len=info.max_model_len,
        eos_token_ids=tuple(info.eos_token_ids),
        chat_template=info.chat_template,
        capabilities=tuple(info.capabilities),
        kv_capacity_tokens=info.kv_capacity_tokens,
        max_prompt_bytes=limits.max_prompt_bytes,
        max_stop_strings=limits.max_stop_strings,
        max_stop_string_chars=limits.max_stop_string_chars,
        max_stop_token_ids=limits.max_stop_token_ids,
        max_outputs=limits.max_outputs,
    )
