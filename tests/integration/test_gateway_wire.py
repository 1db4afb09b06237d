"""Requests as raw bytes: what a client of the protocol cannot say, and the wire can."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
import pytest_asyncio
from google.protobuf.descriptor import FieldDescriptor

from pagemill import columns
from pagemill.engine.v1 import frontend_pb2 as wire
from pagemill.errors import Reason
from pagemill.v1 import inference_pb2 as pb
from pagemill.v1 import model_pb2
from tests.integration.gateway_fixture import (
    DEADLINE_S,
    Rig,
    collect,
    emit,
    reason_of,
    running_gateway,
    tiny,
    violations_of,
)

Descriptor = Any
"""Of a message; protobuf has two kinds."""

pytestmark = pytest.mark.asyncio(loop_scope="module")
V = tiny().vocab_size
VARINT, I64, LEN, I32 = 0, 1, 2, 5
SURROGATE = b"\xed\xa0\x80"
"""U+D800 as if it were a character: the bytes that an unpaired surrogate becomes where nobody looks."""
METHODS = {
    f"{service.name}/{method.name}": method.input_type
    for file in (pb.DESCRIPTOR, model_pb2.DESCRIPTOR)
    for service in file.services_by_name.values()
    for method in service.methods
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared() -> Any:
    async with running_gateway() as rig:
        yield rig


@pytest_asyncio.fixture(loop_scope="module")
async def rig(shared: Rig) -> Any:
    """The shared gateway; after each test it must still answer and hold nothing."""
    shared.scheduler.submits.clear()
    yield shared
    await shared.probe()


def varint(value: int) -> bytes:
    """Of 64 bits; a negative value is the 10 bytes that protobuf makes of it."""
    value &= 2**64 - 1
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes((*out, value))


def field(number: int, kind: int, value: int | bytes) -> bytes:
    """One field: `value` is a number, or the bytes of its content."""
    body = varint(value) if isinstance(value, int) else value
    return varint(number << 3 | kind) + (varint(len(body)) if kind == LEN else b"") + body


def number_of(path: str, message: Descriptor = pb.GenerateRequest.DESCRIPTOR) -> Iterator[int]:
    """Numbers of the fields of `path`, outermost first."""
    for name in path.split("."):
        found = message.fields_by_name[name]
        yield found.number
        message = found.message_type


def inside(path: str, content: bytes, message: Descriptor = pb.GenerateRequest.DESCRIPTOR) -> bytes:
    """`content` in the message at `path`."""
    for number in reversed([*number_of(path, message)] if path else []):
        content = field(number, LEN, content)
    return content


def prompt(max_tokens: int = 1) -> bytes:
    made = pb.GenerateRequest(text="x", sampling=pb.SamplingParams(seed=1))
    made.stopping.max_tokens = max_tokens
    return made.SerializeToString()


def call(rig: Rig, body: bytes, method: str = "InferenceService/Generate") -> Any:
    kind = rig.channel.unary_stream if method.endswith("Generate") else rig.channel.unary_unary
    answers = {"response_deserializer": pb.GenerateResponse.FromString} if method.endswith("Generate") else {}
    return kind(f"/pagemill.v1.{method}", **answers)(body, timeout=DEADLINE_S)


async def refusal(rig: Rig, body: bytes, method: str = "InferenceService/Generate") -> grpc.aio.AioRpcError:
    made = call(rig, body, method)
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await (collect(made) if method.endswith("Generate") else made)
    assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert error.value.initial_metadata() is None or not list(error.value.initial_metadata())
    return error.value


# ---- numbers ----


@pytest.mark.parametrize("key", [V, V + 1000, -1])
async def test_b01_a_bias_beyond_the_vocabulary_beside_a_chat(rig: Rig, key: int) -> None:
    chat = pb.GenerateRequest(chat=pb.ChatPrompt(messages=[pb.ChatMessage(role="user", content="x")]))
    entry = field(1, VARINT, key) + field(2, I32, struct.pack("<f", 1.0))
    error = await refusal(rig, chat.SerializeToString() + inside("sampling.logit_bias", entry))
    assert reason_of(error) is Reason.INVALID_PARAMETER
    assert violations_of(error) == ["sampling.logit_bias"]
    assert rig.scheduler.submits == []


@pytest.mark.parametrize(
    "ids",
    [
        field(1, LEN, varint(-1)),
        field(1, VARINT, -1),
        field(1, LEN, varint(2**40 + V)),
        field(1, LEN, struct.pack("<f", 1.5)),
        field(1, I32, struct.pack("<f", 1.5)),
        field(1, I64, struct.pack("<d", 1.5)),
    ],
    ids=["-1", "-1 unpacked", "2**40 + V", "1.5 as ids", "a float", "a double"],
)
async def test_b03_ids_that_no_client_could_send(rig: Rig, ids: bytes) -> None:
    error = await refusal(rig, inside("token_ids", ids))
    assert reason_of(error) is Reason.INVALID_PARAMETER
    assert violations_of(error) == ["token_ids.ids"]
    assert rig.scheduler.submits == []


@pytest.mark.parametrize("ids", [[-1], [2**40], [1.5], ["7"]])
async def test_b03_clients_refuse_ids_that_are_none(ids: list[Any]) -> None:
    with pytest.raises((ValueError, TypeError)):
        pb.TokenIds(ids=ids)


async def test_b03_protobuf_keeps_32_bits_of_an_id(rig: Rig) -> None:
    """So says its specification, and nobody behind it can tell: what is left is checked like any other id."""
    rig.scheduler.script = emit([65])
    limit = inside("stopping", field(1, VARINT, 1))
    await collect(call(rig, inside("token_ids", field(1, LEN, varint(2**40 + 7))) + limit))
    assert columns.unpack(rig.scheduler.submits[-1].prompt_ids) == [7]


@pytest.mark.parametrize("seed", ["7", 1.5, 2**63, 2**64, -(2**63) - 1])
async def test_b04_clients_refuse_seeds_that_are_no_int64(seed: Any) -> None:
    with pytest.raises((ValueError, TypeError)):
        pb.SamplingParams(seed=seed)


async def test_b04_a_seed_of_another_type_is_an_unknown_field(rig: Rig) -> None:
    """The one of its own type counts, whatever else stands under its number."""
    rig.scheduler.script = emit([65])
    (_, number) = number_of("sampling.seed")
    for other in (field(number, LEN, b"7"), field(number, I64, struct.pack("<d", 1.5)), b""):
        answer = await collect(call(rig, prompt() + inside("sampling", other)))
        assert answer.accepted.seed == 1 == rig.scheduler.submits[-1].sampling.seed


@pytest.mark.parametrize("name", ["logprobs", "prompt_logprobs", "n"])
@pytest.mark.parametrize("value", [-1, V, 10**9])
async def test_b12_b13_counts_that_would_be_allocated(rig: Rig, name: str, value: int) -> None:
    (_, number) = number_of(f"output.{name}")
    error = await refusal(rig, prompt() + inside("output", field(number, VARINT, value)))
    assert reason_of(error) is Reason.INVALID_PARAMETER
    assert violations_of(error) == [f"output.{name}"]
    assert rig.scheduler.submits == []


# ---- fields that the contract does not have ----


def _strange_fields(known: Descriptor) -> bytes:
    """A field of every type under every number that `known` does not have, as far as our own protocols count."""
    highest = max(f.number for message in wire.DESCRIPTOR.message_types_by_name.values() for f in message.fields)
    submit = wire.Submit(tenant="other", cache_salt=b"x", choice_index=3, emitted_ids=columns.pack([65]))
    values: list[tuple[int, int | bytes]] = [
        (VARINT, 1),
        (I32, b"\1\1\1\1"),
        (I64, b"\1" * 8),
        (LEN, submit.SerializeToString()),
    ]
    strange = set(range(1, 2 * highest)) - set(known.fields_by_number)
    return b"".join(field(number, kind, value) for number in strange for kind, value in values)


@pytest.mark.parametrize("path", ["", "sampling", "stopping", "output", "chat", "chat.messages"])
async def test_b18_the_public_schema_is_an_allow_list(rig: Rig, path: str) -> None:
    """What the scheduler is told is the same, byte for byte, with and without all other fields there could be."""
    rig.scheduler.script = emit([65])
    good = pb.GenerateRequest.FromString(prompt())
    good.chat.messages.add(role="user", content="x")
    known: Descriptor = good.DESCRIPTOR
    for name in path.split(".") if path else []:
        known = known.fields_by_name[name].message_type
    own = good.chat.messages[0].SerializeToString() if path == "chat.messages" else b""
    if own:  # a list: the message itself comes with the strange fields, not another one beside it
        good.chat.ClearField("messages")
    bodies = [good.SerializeToString() + inside(path, own + extra) for extra in (b"", _strange_fields(known))]
    for body in bodies:
        assert (await collect(call(rig, body))).text == "A"
    plain, sneaky = rig.scheduler.submits
    for submit in (plain, sneaky):
        for own_to_each in ("stream", "client_request_id", "age_ms", "deadline_ms"):
            submit.ClearField(own_to_each)
    assert sneaky.SerializeToString(deterministic=True) == plain.SerializeToString(deterministic=True)


# ---- text that is none ----


def _texts(message: Descriptor, path: str = "") -> Iterator[tuple[str, Descriptor, int]]:
    """Path, owner and number of every text field of a request."""
    for one in message.fields:
        if one.type == FieldDescriptor.TYPE_STRING:
            yield path, message, one.number
        elif one.message_type and not one.message_type.GetOptions().map_entry:
            yield from _texts(one.message_type, f"{path}.{one.name}".lstrip("."))


TEXTS = [
    pytest.param(method, path, number, id=f"{method.split('/')[1]} {path}.{owner.fields_by_number[number].name}")
    for method, request in METHODS.items()
    for path, owner, number in _texts(request)
]


@pytest.mark.parametrize("bad", [SURROGATE, b"\xff", b"a\xe2\x82"], ids=["surrogate", "byte", "cut"])
@pytest.mark.parametrize(("method", "path", "number"), TEXTS)
async def test_b29_text_that_is_no_utf8_is_refused_wherever_it_stands(
    rig: Rig, method: str, path: str, number: int, bad: bytes
) -> None:
    error = await refusal(rig, inside(path, field(number, LEN, bad), METHODS[method]), method)
    assert violations_of(error) == ["request"]
    details = str(error.details())
    assert "UTF-8" in details
    assert not any(word in details for word in ("Error", "Exception", "Decode", "codec", "Traceback"))
    assert rig.scheduler.submits == []


async def test_b29_the_fields_that_are_tried_are_those_of_the_contract() -> None:
    names = {str(param.id) for param in TEXTS}
    assert {"Generate .text", "Generate chat.messages.name", "Generate stopping.stop", "Cancel .request_id"} <= names
    assert {name.split()[0] for name in names} >= {"Generate", "Cancel", "Tokenize", "Detokenize", "GetModel"}
