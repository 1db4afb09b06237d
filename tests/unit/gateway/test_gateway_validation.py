"""Every field of a request is checked before anything is allocated for it, and refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from pagemill.errors import InvalidParameterError, PagemillError, Reason
from pagemill.v1 import inference_pb2 as pb
from scheduler_svc.gateway.limits import ModelLimits
from scheduler_svc.gateway.validation import check_generate, check_token_ids, resolve_max_tokens

V, L = 300, 64
LIMITS = ModelLimits(V, L)
INF, NAN = float("inf"), float("nan")


def request(path: str = "", value: Any = None) -> pb.GenerateRequest:
    """A good request with one field set."""
    made = pb.GenerateRequest(text="x")
    if path:
        *parents, name = path.split(".")
        message: Any = made
        for parent in parents:
            message = getattr(message, parent)
        if isinstance(value, dict):
            getattr(message, name).update(value)
        elif isinstance(value, list):
            getattr(message, name).extend(value)
        else:
            setattr(message, name, value)
    return made


BAD = [
    ("request_id", "x" * 129),
    ("request_id", "with space"),
    ("request_id", "new\nline"),
    ("request_id", "é"),
    ("cache_salt", "x" * 129),
    ("cache_salt", "\x7f"),
    ("priority", 1001),
    ("priority", -1001),
    ("text", ""),
    ("text", "x" * (8 * L + 1)),
    ("token_ids.ids", [V]),
    ("token_ids.ids", [2**32 - 1]),
    ("sampling.temperature", -0.1),
    ("sampling.temperature", 100.5),
    ("sampling.temperature", NAN),
    ("sampling.temperature", INF),
    ("sampling.top_p", 0.0),
    ("sampling.top_p", 1.01),
    ("sampling.top_p", NAN),
    ("sampling.min_p", -0.1),
    ("sampling.min_p", 1.1),
    ("sampling.presence_penalty", 2.1),
    ("sampling.frequency_penalty", -2.1),
    ("sampling.frequency_penalty", NAN),
    ("sampling.repetition_penalty", 0.0),
    ("sampling.repetition_penalty", -1.0),
    ("sampling.repetition_penalty", INF),
    ("sampling.logit_bias", {V: 1.0}),
    ("sampling.logit_bias", {V + 1000: 1.0}),
    ("sampling.logit_bias", {1: 100.5}),
    ("sampling.logit_bias", {1: NAN}),
    ("sampling.logit_bias", dict.fromkeys(range(301), 0.5)),
    ("sampling.allowed_token_ids", [V]),
    ("sampling.allowed_token_ids", [1] * 1025),
    ("sampling.bad_words", ["x"] * 65),
    ("stopping.max_tokens", 0),
    ("stopping.min_tokens", L + 1),
    ("stopping.stop", ["a"] * 5),
    ("stopping.stop", [""]),
    ("stopping.stop", ["ok", ""]),
    ("stopping.stop", ["x" * 65]),
    ("stopping.stop", ["x"] * 10_000),
    ("stopping.stop_token_ids", [V]),
    ("stopping.stop_token_ids", [1] * 65),
    ("output.n", 0),
    ("output.n", 17),
    ("output.n", 1_000_000_000),
    ("output.logprobs", 21),
    ("output.logprobs", V),
    ("output.prompt_logprobs", 2**32 - 1),
]


@pytest.mark.parametrize(("path", "value"), BAD)
def test_a_value_out_of_range_is_refused_naming_the_field(path: str, value: Any) -> None:
    with pytest.raises(InvalidParameterError) as error:
        check_generate(request(path, value), LIMITS)
    assert error.value.reason is Reason.INVALID_PARAMETER
    assert [v.field.split("[")[0] for v in error.value.violations] == [path]


UNSUPPORTED = [
    ("sampling.presence_penalty", 0.5),
    ("sampling.frequency_penalty", 2.0),
    ("sampling.repetition_penalty", 1.1),
    ("sampling.logit_bias", {1: 1.0}),
    ("sampling.allowed_token_ids", [1]),
    ("sampling.bad_words", ["x"]),
    ("output.n", 2),
    ("output.logprobs", 0),
    ("output.logprobs", 20),
    ("output.prompt_logprobs", 1),
    ("output.echo", True),
]


@pytest.mark.parametrize(("path", "value"), UNSUPPORTED)
def test_a_feature_to_come_is_refused_by_name_and_never_ignored(path: str, value: Any) -> None:
    with pytest.raises(InvalidParameterError) as error:
        check_generate(request(path, value), LIMITS)
    assert error.value.reason is Reason.UNSUPPORTED_FEATURE
    assert [v.field for v in error.value.violations] == [path]


GOOD = [
    ("request_id", "x" * 128),
    ("request_id", "!~"),
    ("cache_salt", "salt"),
    ("priority", -1000),
    ("max_queue_ms", 0),
    ("sampling.temperature", 0.0),
    ("sampling.temperature", 1e-30),
    ("sampling.temperature", 100.0),
    ("sampling.top_p", 1e-9),
    ("sampling.top_k", 2**32 - 1),
    ("sampling.min_p", 1.0),
    ("sampling.seed", 2**63 - 1),
    ("sampling.seed", -(2**63)),
    ("sampling.presence_penalty", 0.0),
    ("sampling.repetition_penalty", 1.0),
    ("stopping.max_tokens", 2**32 - 1),
    ("stopping.min_tokens", L),
    ("stopping.stop", ["x" * 64] * 4),
    ("stopping.stop_token_ids", [V - 1] * 64),
    ("output.n", 1),
    ("output.echo", False),
    ("text", "x" * (8 * L)),
    ("token_ids.ids", [0, V - 1]),
]


@pytest.mark.parametrize(("path", "value"), GOOD)
def test_values_at_the_edge_and_neutral_ones_pass(path: str, value: Any) -> None:
    check_generate(request(path, value), LIMITS)


def test_every_field_of_the_contract_is_in_one_of_the_tables() -> None:
    """A field added to the .proto must be checked here, or it would be ignored silently."""
    covered = {path for path, _ in [*BAD, *UNSUPPORTED, *GOOD]}
    boolean = {"stopping.ignore_eos", "stopping.include_stop", "output.return_text", "output.return_token_ids"}
    own_tests = {"model", "chat"}
    for top in pb.GenerateRequest.DESCRIPTOR.fields:
        if top.name in own_tests:
            continue
        children = [f"{top.name}.{f.name}" for f in top.message_type.fields] if top.message_type else [top.name]
        assert set(children) <= covered | boolean


def test_seeds_beyond_int64_cannot_even_be_sent() -> None:
    """B04."""
    for seed in (2**63, 2**64, -(2**63) - 1):
        with pytest.raises(ValueError, match=r"out of range|Value out"):
            pb.SamplingParams(seed=seed)


def test_all_wrong_fields_are_named_at_once() -> None:
    bad = request("sampling.temperature", -1.0)
    bad.stopping.max_tokens = 0
    with pytest.raises(InvalidParameterError) as error:
        check_generate(bad, LIMITS)
    assert [v.field for v in error.value.violations] == ["sampling.temperature", "stopping.max_tokens"]


def test_a_floor_above_the_ceiling_is_refused() -> None:
    bad = request("stopping.min_tokens", 5)
    bad.stopping.max_tokens = 4
    with pytest.raises(InvalidParameterError):
        check_generate(bad, LIMITS)


@pytest.mark.parametrize(
    ("messages", "field"),
    [
        ([], "chat.messages"),
        ([("user", "x", "")] * 1025, "chat.messages"),
        ([("user", "x" * (8 * L + 1), "")], "chat.messages"),
        ([("user", "é" * (4 * L + 1), "")], "chat.messages"),
        ([("im_start", "x", "")], "chat.messages[0].role"),
        ([("user", "x", ""), ("", "x", "")], "chat.messages[1].role"),
        ([("user", "x", "n" * 65)], "chat.messages[0].name"),
    ],
)
def test_chats_are_checked_message_by_message(messages: list[tuple[str, str, str]], field: str) -> None:
    bad = pb.GenerateRequest()
    bad.chat.SetInParent()
    for role, content, name in messages:
        bad.chat.messages.add(role=role, content=content, name=name)
    with pytest.raises(InvalidParameterError) as error:
        check_generate(bad, LIMITS)
    assert [v.field for v in error.value.violations] == [field]


def test_a_request_without_a_prompt_is_refused() -> None:
    for empty in (pb.GenerateRequest(), pb.GenerateRequest(token_ids=pb.TokenIds())):
        with pytest.raises(InvalidParameterError):
            check_generate(empty, LIMITS)


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "expected"),
    [
        (L - 3, None, 3),
        (L - 1, 5, 1),
        (L - 1, None, 1),
        (1, 2**32 - 1, L - 1),
        (10, 5, 5),
        (L, 1, None),
        (L + 1, 1, None),
    ],
)
def test_b11_b28_max_tokens_is_bounded_by_the_context(
    prompt: int, max_tokens: int | None, expected: int | None
) -> None:
    good = request()
    if max_tokens is not None:
        good.stopping.max_tokens = max_tokens
    generation = check_generate(good, LIMITS)
    if expected is None:
        with pytest.raises(PagemillError) as error:
            resolve_max_tokens(generation, prompt, L)
        assert error.value.reason is Reason.CONTEXT_LENGTH_EXCEEDED
    else:
        assert resolve_max_tokens(generation, prompt, L) == expected


def test_detokenize_is_bounded() -> None:
    check_token_ids([V - 1] * (2 * L), LIMITS)
    for bad in ([1] * (2 * L + 1), [V]):
        with pytest.raises(InvalidParameterError):
            check_token_ids(bad, LIMITS)
