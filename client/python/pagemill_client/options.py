"""Request building: from Python arguments to `pagemill.v1` messages. Pure."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias, TypedDict

from pagemill.v1 import inference_pb2 as pb
from pagemill_client.types import Message

Prompt: TypeAlias = str | Sequence[int] | Sequence[Message]
"""Plain text, ready token ids, or a conversation."""


class GenerateOptions(TypedDict, total=False):
    """Everything a generation can be told besides its prompt; absent means the server's default.

    Field by field as in `pagemill/v1/inference.proto`, where ranges and defaults are stated.
    """

    request_id: str
    model: str
    priority: int
    cache_salt: str
    max_queue_ms: int
    # sampling
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    seed: int
    logit_bias: Mapping[int, float]
    allowed_token_ids: Sequence[int]
    bad_words: Sequence[str]
    # stopping
    max_tokens: int
    min_tokens: int
    stop: str | Sequence[str]
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    include_stop: bool
    # output
    n: int
    logprobs: int
    prompt_logprobs: int
    echo: bool
    return_text: bool
    return_token_ids: bool


_SAMPLING = frozenset(field.name for field in pb.SamplingParams.DESCRIPTOR.fields)
_STOPPING = frozenset(field.name for field in pb.StoppingParams.DESCRIPTOR.fields)
_OUTPUT = frozenset(field.name for field in pb.OutputOptions.DESCRIPTOR.fields)


def generate_request(prompt: Prompt, options: GenerateOptions) -> pb.GenerateRequest:
    """The request. A request id is made when none is given: a retry whose first answer was lost then shows as
    DUPLICATE_REQUEST_ID instead of running twice, and `cancel` can be called at any time.

    Raises TypeError for an unknown option or a prompt of no known kind, ValueError for a value outside its type.
    """
    given: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
    if isinstance(given.get("stop"), str):
        given["stop"] = [given["stop"]]
    request = pb.GenerateRequest(
        request_id=given.pop("request_id", "") or uuid.uuid4().hex,
        sampling=pb.SamplingParams(**_take(given, _SAMPLING)),
        stopping=pb.StoppingParams(**_take(given, _STOPPING)),
        output=pb.OutputOptions(**_take(given, _OUTPUT)),
        **_take(given, frozenset({"model", "priority", "cache_salt", "max_queue_ms"})),
    )
    if given:
        raise TypeError(f"unknown option: {', '.join(sorted(given))}")
    _set_prompt(request, prompt)
    return request


def chat_prompt(messages: Sequence[Message]) -> pb.ChatPrompt:
    """The conversation as a message."""
    return pb.ChatPrompt(messages=[pb.ChatMessage(role=m.role, content=m.content, name=m.name) for m in messages])


def tokenize_request(prompt: str | Sequence[Message], model: str, add_special_tokens: bool) -> pb.TokenizeRequest:
    """The request for token ids of a text or a conversation."""
    request = pb.TokenizeRequest(model=model, add_special_tokens=add_special_tokens)
    if isinstance(prompt, str):
        request.text = prompt
    else:
        request.chat.CopyFrom(chat_prompt(prompt))
    return request


def _set_prompt(request: pb.GenerateRequest, prompt: Prompt) -> None:
    if isinstance(prompt, str):
        request.text = prompt
        return
    messages = [item for item in prompt if isinstance(item, Message)]
    ids = [item for item in prompt if isinstance(item, int)]
    if len(messages) == len(prompt) and messages:
        request.chat.CopyFrom(chat_prompt(messages))
    elif len(ids) == len(prompt):
        request.token_ids.CopyFrom(pb.TokenIds(ids=ids))  # empty is the server's to refuse: it knows the rules
    else:
        raise TypeError("prompt: expected str, a sequence of int, or a sequence of Message")


def _take(given: dict[str, Any], names: frozenset[str]) -> dict[str, Any]:
    return {name: given.pop(name) for name in names & given.keys()}
