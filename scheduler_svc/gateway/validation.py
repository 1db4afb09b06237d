"""Checks every field of a request before anything is allocated for it, and resolves its defaults.

`limits` has the numbers. A field that this version does not implement is refused by name, never ignored;
its neutral value (a penalty of 0, n of 1) changes nothing and is accepted. Range comes before support, so that a value
which no version will ever accept is always INVALID_PARAMETER.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from pagemill.errors import InvalidParameterError, PagemillError, Reason, Violation, invalid, unsupported
from pagemill.v1 import inference_pb2 as pb
from scheduler_svc.gateway.limits import LIMITS, ModelLimits

_VISIBLE_ASCII = re.compile(r"[\x21-\x7e]*")
ROLES = frozenset({"system", "user", "assistant", "tool", "developer", "function", "ipython"})
"""Roles that templates know. A list, because templates write the role into their control tokens."""


@dataclass(frozen=True, slots=True)
class Generation:
    """A checked request with every default resolved but those that need the prompt's length."""

    request_id: str
    """Empty: the server makes one."""
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int | None
    max_tokens: int | None
    """None: what is left of the context."""
    min_tokens: int
    stop: tuple[str, ...]
    stop_token_ids: tuple[int, ...]
    ignore_eos: bool
    include_stop: bool
    return_text: bool
    return_token_ids: bool
    priority: int
    cache_salt: str
    max_queue_ms: int | None


class _Check:
    """Collects violations, so that a caller learns of all of them at once (the first 16)."""

    def __init__(self) -> None:
        self.violations: list[Violation] = []

    def that(self, holds: bool, field: str, description: str) -> None:
        if not holds and len(self.violations) < 16:
            self.violations.append(Violation(field, description))

    def number(
        self, message: Any, name: str, path: str, default: float, *, ok: Callable[[float], bool], say: str
    ) -> Any:
        """The value of an optional scalar; a violation if it is not finite or not `ok`."""
        if not message.HasField(name):
            return default
        value = getattr(message, name)
        self.that(math.isfinite(value) and ok(value), f"{path}.{name}", f"{say} (got {value!r})")
        return value

    def done(self) -> None:
        if self.violations:
            raise InvalidParameterError(*self.violations)


def check_generate(request: pb.GenerateRequest, limits: ModelLimits) -> Generation:
    """The checked request. Raises InvalidParameterError naming each wrong field, or the first unsupported one."""
    check = _Check()
    _check_identity(check, request)
    _check_prompt(check, request, limits)
    sampling = _check_sampling(check, request.sampling, limits)
    stopping = _check_stopping(check, request.stopping, limits)
    _check_output(check, request.output)
    check.done()
    _refuse_unsupported(request)
    return Generation(
        request_id=request.request_id,
        **sampling,
        **stopping,
        return_text=_or(request.output, "return_text", True),
        return_token_ids=_or(request.output, "return_token_ids", True),
        priority=request.priority,
        cache_salt=request.cache_salt,
        max_queue_ms=_or(request, "max_queue_ms", None),
    )


def _or(message: Any, name: str, default: Any) -> Any:
    return getattr(message, name) if message.HasField(name) else default


def _check_identity(check: _Check, request: pb.GenerateRequest) -> None:
    for name in ("request_id", "cache_salt"):
        check.that(
            is_identifier(getattr(request, name)), name, f"at most {LIMITS.max_id_chars} visible ASCII characters"
        )
    check.that(
        abs(request.priority) <= LIMITS.max_priority, "priority", f"-{LIMITS.max_priority} to {LIMITS.max_priority}"
    )


def is_identifier(text: str) -> bool:
    """Whether `text` may name something: short, visible ASCII, so that it can stand in a log; or empty."""
    return len(text) <= LIMITS.max_id_chars and _VISIBLE_ASCII.fullmatch(text) is not None


def _check_prompt(check: _Check, request: pb.GenerateRequest, limits: ModelLimits) -> None:
    kind = request.WhichOneof("prompt")
    if kind is None:
        check.that(False, "prompt", "one of text, token_ids and chat must be set")
    elif kind == "text":
        check.that(bool(request.text), "text", "must not be empty")
        check.that(len(request.text) <= limits.max_prompt_bytes, "text", f"at most {limits.max_prompt_bytes} bytes")
    elif kind == "chat":
        check_chat(check.that, request.chat, limits)
    else:
        ids = request.token_ids.ids
        check.that(len(ids) > 0, "token_ids.ids", "must not be empty")
        if len(ids) <= 2 * limits.max_model_len:  # longer ones get CONTEXT_LENGTH_EXCEEDED
            check.that(
                not ids or max(ids) < limits.vocab_size, "token_ids.ids", f"ids must be below {limits.vocab_size}"
            )


def check_chat(that: Callable[[bool, str, str], None], chat: pb.ChatPrompt, limits: ModelLimits) -> None:
    """Report what is wrong with a conversation to `that`."""
    count = len(chat.messages)
    that(0 < count <= LIMITS.max_messages, "chat.messages", f"1 to {LIMITS.max_messages} messages (got {count})")
    if count > LIMITS.max_messages:
        return
    total = sum(len(m.content.encode()) + len(m.name) for m in chat.messages)
    that(total <= limits.max_prompt_bytes, "chat.messages", f"together at most {limits.max_prompt_bytes} bytes")
    for i, message in enumerate(chat.messages):
        that(message.role in ROLES, f"chat.messages[{i}].role", f"one of {', '.join(sorted(ROLES))}")
        fits = len(message.name) <= LIMITS.max_name_chars
        that(fits, f"chat.messages[{i}].name", f"at most {LIMITS.max_name_chars} characters")


def _check_sampling(check: _Check, sampling: pb.SamplingParams, limits: ModelLimits) -> dict[str, Any]:
    path = "sampling"
    top = LIMITS.max_temperature
    temperature = check.number(sampling, "temperature", path, 1.0, ok=lambda v: 0 <= v <= top, say=f"0 to {top:g}")
    top_p = check.number(sampling, "top_p", path, 1.0, ok=lambda v: 0 < v <= 1, say="above 0, at most 1")
    min_p = check.number(sampling, "min_p", path, 0.0, ok=lambda v: 0 <= v <= 1, say="0 to 1")
    for name in ("presence_penalty", "frequency_penalty"):
        check.number(sampling, name, path, 0.0, ok=lambda v: -2 <= v <= 2, say="-2 to 2")
    check.number(sampling, "repetition_penalty", path, 1.0, ok=lambda v: 0 < v <= 100, say="above 0, at most 100")
    _check_id_lists(check, sampling, limits)
    return {
        "temperature": temperature,
        "top_p": top_p,
        "top_k": min(sampling.top_k, limits.vocab_size),
        "min_p": min_p,
        "seed": _or(sampling, "seed", None),
    }


def _check_id_lists(check: _Check, sampling: pb.SamplingParams, limits: ModelLimits) -> None:
    below = f"ids must be below {limits.vocab_size}"
    bias, allowed = sampling.logit_bias, sampling.allowed_token_ids
    if len(bias) > LIMITS.max_logit_bias:
        check.that(False, "sampling.logit_bias", f"at most {LIMITS.max_logit_bias} entries (got {len(bias)})")
    else:
        check.that(all(key < limits.vocab_size for key in bias), "sampling.logit_bias", below)
        cap = LIMITS.max_logit_bias_abs
        fine = all(math.isfinite(v) and abs(v) <= cap for v in bias.values())
        check.that(fine, "sampling.logit_bias", f"values must be finite and within -{cap:g} to {cap:g}")
    if len(allowed) > LIMITS.max_allowed_token_ids:
        check.that(False, "sampling.allowed_token_ids", f"at most {LIMITS.max_allowed_token_ids} (got {len(allowed)})")
    else:
        check.that(all(i < limits.vocab_size for i in allowed), "sampling.allowed_token_ids", below)
    count = len(sampling.bad_words)
    check.that(count <= LIMITS.max_bad_words, "sampling.bad_words", f"at most {LIMITS.max_bad_words} (got {count})")


def _check_stopping(check: _Check, stopping: pb.StoppingParams, limits: ModelLimits) -> dict[str, Any]:
    max_tokens = _or(stopping, "max_tokens", None)
    check.that(max_tokens is None or max_tokens >= 1, "stopping.max_tokens", "at least 1")
    most = limits.max_model_len if max_tokens is None else max_tokens
    check.that(stopping.min_tokens <= most, "stopping.min_tokens", f"at most max_tokens ({most})")
    stop = _check_stop_strings(check, stopping.stop)
    ids = stopping.stop_token_ids
    few = len(ids) <= LIMITS.max_stop_token_ids
    check.that(few, "stopping.stop_token_ids", f"at most {LIMITS.max_stop_token_ids} (got {len(ids)})")
    if few:
        known = all(i < limits.vocab_size for i in ids)
        check.that(known, "stopping.stop_token_ids", f"ids must be below {limits.vocab_size}")
    return {
        "max_tokens": max_tokens,
        "min_tokens": stopping.min_tokens,
        "stop": stop,
        "stop_token_ids": tuple(ids) if few else (),
        "ignore_eos": stopping.ignore_eos,
        "include_stop": stopping.include_stop,
    }


def _check_stop_strings(check: _Check, stop: Sequence[str]) -> tuple[str, ...]:
    if len(stop) > LIMITS.max_stop_strings:
        check.that(False, "stopping.stop", f"at most {LIMITS.max_stop_strings} strings (got {len(stop)})")
        return ()
    longest = LIMITS.max_stop_string_chars
    for i, text in enumerate(stop):
        check.that(0 < len(text) <= longest, f"stopping.stop[{i}]", f"1 to {longest} characters (got {len(text)})")
    return tuple(stop)


def _check_output(check: _Check, output: pb.OutputOptions) -> None:
    top = LIMITS.max_outputs
    check.that(1 <= _or(output, "n", 1) <= top, "output.n", f"1 to {top} (got {output.n})")
    for name in ("logprobs", "prompt_logprobs"):
        value = getattr(output, name)
        check.that(value <= LIMITS.max_logprobs, f"output.{name}", f"0 to {LIMITS.max_logprobs} (got {value})")


def _refuse_unsupported(request: pb.GenerateRequest) -> None:
    """Everything here is a feature to come; the order is the order of the fields."""
    sampling, output = request.sampling, request.output
    used = {
        "sampling.presence_penalty": sampling.presence_penalty != 0,
        "sampling.frequency_penalty": sampling.frequency_penalty != 0,
        "sampling.repetition_penalty": _or(sampling, "repetition_penalty", 1.0) != 1,
        "sampling.logit_bias": len(sampling.logit_bias) > 0,
        "sampling.allowed_token_ids": len(sampling.allowed_token_ids) > 0,
        "sampling.bad_words": len(sampling.bad_words) > 0,
        "output.n": _or(output, "n", 1) != 1,
        "output.logprobs": output.HasField("logprobs"),
        "output.prompt_logprobs": output.HasField("prompt_logprobs"),
        "output.echo": output.echo,
    }
    for field, is_used in used.items():
        if is_used:
            raise unsupported(field)


def check_request_id(request_id: str) -> str:
    """The id of an existing request; it must be given."""
    if not request_id or not is_identifier(request_id):
        raise invalid("request_id", f"1 to {LIMITS.max_id_chars} visible ASCII characters")
    return request_id


def check_token_ids(token_ids: Sequence[int], limits: ModelLimits) -> None:
    """For Detokenize."""
    most = 2 * limits.max_model_len
    if len(token_ids) > most:
        raise invalid("token_ids", f"at most {most} (got {len(token_ids)})")
    if token_ids and max(token_ids) >= limits.vocab_size:
        raise invalid("token_ids", f"ids must be below {limits.vocab_size}")


def room_behind(num_prompt_tokens: int, max_model_len: int) -> int:
    """Tokens that the context leaves to an output; at least 1. Raises CONTEXT_LENGTH_EXCEEDED when there is none."""
    room = max_model_len - num_prompt_tokens
    if room < 1:
        raise PagemillError(
            Reason.CONTEXT_LENGTH_EXCEEDED,
            f"the prompt has {num_prompt_tokens} tokens; the context limit is {max_model_len} for prompt and output"
            f" together, so at most {max_model_len - 1} fit",
        )
    return room


def resolve_max_tokens(generation: Generation, num_prompt_tokens: int, max_model_len: int) -> int:
    """Most output tokens; at least 1. Raises as `room_behind`."""
    room = room_behind(num_prompt_tokens, max_model_len)
    return room if generation.max_tokens is None else min(generation.max_tokens, room)


def check_tokenize_chat(chat: pb.ChatPrompt, limits: ModelLimits) -> None:
    """For Tokenize."""
    check = _Check()
    check_chat(check.that, chat, limits)
    check.done()
