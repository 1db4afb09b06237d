"""The bytes of the engine protocol: what another language, or a build of last year, must be able to rely on."""

from __future__ import annotations

from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from pagemill.columns import pack
from pagemill.engine.v1 import executor_pb2 as ex
from pagemill.engine.v1 import frontend_pb2 as fe
from pagemill.framing import PROTOCOL, Channel
from scheduler_svc.core.params import SamplingSpec
from scheduler_svc.core.plan import Admit, StepPlan
from scheduler_svc.executor_codec import encode_plan
from scheduler_svc.gateway_codec import encode_tokens

# Changing one of these breaks executors and gateways of the version before: it needs a new protocol major.
GOLDEN_PLAN = (
    "0807"
    "120401000000"
    "6236080210011a0c0a000000ffffff7f0c00000020023204030000003a1a0d0000003f150000803f18052801"
    "30013a080100000002000000"
    "6a0402000000"
    "720409000000"
    "820108020000000300000"
    "08a01080300000001000000"
)
GOLDEN_TOKENS = "0a080100000002000000120801000000020000001a080000000005000000220c070000000800000009000000"


def golden_plan() -> StepPlan:
    admit = Admit(
        lane=2,
        generation=1,
        token_ids=[10, 2**31 - 1, 12],
        num_prompt_tokens=2,
        num_cached_tokens=0,
        block_ids=[3],
        sampling=SamplingSpec(temperature=0.5, top_p=1.0, top_k=5, seed=1, min_tokens=1),
        stop_token_ids=frozenset({1, 2}),
    )
    return StepPlan(
        7,
        release_lanes=[1],
        admit=[admit],
        append_lanes=[2],
        append_block_ids=[9],
        row_lanes=[2, 3],
        row_num_tokens=[3, 1],
    )


def test_golden_plan() -> None:
    assert encode_plan(golden_plan()).SerializeToString(deterministic=True).hex() == GOLDEN_PLAN


def test_golden_token_batch() -> None:
    batch = encode_tokens([1, 2], [1, 2], [0, 5], [7, 8, 9])
    assert batch.SerializeToString(deterministic=True).hex() == GOLDEN_TOKENS


def test_golden_envelope() -> None:
    channel = Channel(ex.ExecutorEnvelope)
    channel.open(3)
    frame = channel.pack(plan=ex.StepPlan(step_id=1, repeat_decode=True))
    assert PROTOCOL == 1
    assert frame.hex() == "08011003180" + "16a0408017801"


def test_columns_are_packed_sfixed32_to_other_languages() -> None:
    field = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name="typed.proto", package="typed", syntax="proto3")
    message = file.message_type.add(name="TokenBatch")
    for number, name in enumerate(("streams", "counts", "first_index", "token_ids"), start=1):
        message.field.add(name=name, number=number, label=field.LABEL_REPEATED, type=field.TYPE_SFIXED32)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    kind = message_factory.GetMessageClass(pool.FindMessageTypeByName("typed.TokenBatch"))
    batch = encode_tokens([1, 2], [1, 2], [0, 5], [7, -1, 2**31 - 1])
    typed: Any = kind.FromString(batch.SerializeToString())
    assert list(typed.token_ids) == [7, -1, 2**31 - 1]
    assert typed.SerializeToString() == batch.SerializeToString()


def test_unknown_fields_of_a_newer_peer_are_ignored() -> None:
    newer = (
        ex.StepResult(step_id=4, status=ex.STEP_STATUS_OK, token_ids=pack([1])).SerializeToString() + b"\xfa\x7f\x01x"
    )
    assert ex.StepResult.FromString(newer).step_id == 4


def test_enum_values_are_as_they_were() -> None:
    assert dict(ex.ExecutorState.items()) == {
        "EXECUTOR_STATE_UNSPECIFIED": 0,
        "EXECUTOR_STATE_LOADING": 1,
        "EXECUTOR_STATE_WARMING": 2,
        "EXECUTOR_STATE_IDLE": 3,
        "EXECUTOR_STATE_RUNNING": 4,
    }
    assert [value for _, value in fe.StreamError.items()] == list(range(len(fe.StreamError.items())))
