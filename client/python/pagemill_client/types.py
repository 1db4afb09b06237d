"""What a client sees of a generation: plain frozen values, free of protobuf."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation; `role` is "system", "user", "assistant" or "tool"."""

    role: str
    content: str
    name: str = ""


class FinishReason(Enum):
    """Why an output ended; every other end is an exception."""

    STOP = "stop"
    """An end-of-sequence id, a stop id or a stop string."""
    LENGTH = "length"
    """max_tokens or the context limit."""
    CANCELLED = "cancelled"
    """`cancel` was called for the request by another call."""


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural log probabilities at one position: of the chosen token, and of the most likely ones, best first."""

    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class Accepted:
    """First event of every stream: the request was admitted."""

    request_id: str
    num_prompt_tokens: int
    seed: int
    model: str


@dataclass(frozen=True, slots=True)
class Delta:
    """A piece of one output. `first_index` is the index, within the output, of the first of `token_ids`."""

    output_index: int
    first_index: int
    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprobs, ...]


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one output; `cached_tokens` of the prompt came from the prefix cache."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class Bill:
    """What the request cost the server."""

    queue_ms: int
    computed_tokens: int
    num_preemptions: int
    swapped_bytes: int


@dataclass(frozen=True, slots=True)
class Finished:
    """The end of one output. `stop_match` is what matched, None for the model's own end-of-sequence id."""

    output_index: int
    reason: FinishReason
    stop_match: str | int | None
    usage: Usage
    bill: Bill


Event: TypeAlias = Accepted | Delta | Finished


@dataclass(frozen=True, slots=True)
class Output:
    """One output as received so far; `finished` is None while it runs."""

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    finished: Finished | None


@dataclass(frozen=True, slots=True)
class Generation:
    """A whole stream, folded. Outputs are in the order of their index."""

    accepted: Accepted
    outputs: tuple[Output, ...]

    @property
    def text(self) -> str:
        """Text of the first output."""
        return self.outputs[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Token ids of the first output."""
        return self.outputs[0].token_ids

    @property
    def finished(self) -> Finished | None:
        """How the first output ended."""
        return self.outputs[0].finished


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """A model and its limits, as ModelService describes them."""

    name: str
    architecture: str
    fingerprint: str
    tokenizer_hash: str
    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    chat_template: str
    capabilities: tuple[str, ...]
    kv_capacity_tokens: int
    max_prompt_bytes: int
    max_stop_strings: int
    max_stop_string_chars: int
    max_stop_token_ids: int
    max_outputs: int
