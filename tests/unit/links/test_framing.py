from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagemill.columns import pack, unpack
from pagemill.engine.v1.executor_pb2 import ExecutorEnvelope, ExecutorHello, Heartbeat, StepPlan
from pagemill.framing import PROTOCOL, Channel, Drop


def pair(epoch: int = 5) -> tuple[Channel[ExecutorEnvelope], Channel[ExecutorEnvelope]]:
    a, b = Channel(ExecutorEnvelope), Channel(ExecutorEnvelope)
    a.open(epoch)
    b.open(epoch)
    return a, b


def test_frames_are_numbered_and_acknowledged() -> None:
    a, b = pair()
    for seq in (1, 2, 3):
        envelope = b.unpack(a.pack(heartbeat=Heartbeat()))
        assert envelope is not None
        assert (envelope.seq, envelope.epoch, envelope.protocol) == (seq, 5, PROTOCOL)
    answer = a.unpack(b.pack(heartbeat=Heartbeat()))
    assert answer is not None
    assert (answer.seq, answer.ack) == (1, 3)


def test_duplicates_and_stale_epochs_are_dropped_and_gaps_counted() -> None:
    a, b = pair()
    first, second, third = (a.pack(heartbeat=Heartbeat()) for _ in range(3))
    assert b.unpack(first) is not None
    assert b.unpack(first) is None
    assert b.unpack(third) is not None
    assert b.unpack(second) is None
    assert b.gaps == 1
    b.open(6)
    assert b.unpack(a.pack(heartbeat=Heartbeat())) is None
    assert b.dropped == {Drop.DUPLICATE: 2, Drop.STALE_EPOCH: 1}


def test_newer_epoch_passes_without_being_adopted() -> None:
    a, b = pair()
    a.open(9)
    envelope = b.unpack(a.pack(heartbeat=Heartbeat()))
    assert envelope is not None
    assert (envelope.epoch, b.epoch) == (9, 5)


def test_hello_passes_whatever_its_protocol() -> None:
    _, b = pair()
    frame = ExecutorEnvelope(protocol=77, epoch=1, seq=4, hello=ExecutorHello()).SerializeToString()
    assert b.unpack(frame) is not None
    frame = ExecutorEnvelope(protocol=77, epoch=5, seq=4, heartbeat=Heartbeat()).SerializeToString()
    assert b.unpack(frame) is None
    assert b.dropped == {Drop.PROTOCOL: 1}


@given(st.binary(max_size=80))
def test_any_bytes_are_expected_input(data: bytes) -> None:
    _, b = pair()
    b.unpack(data)


@given(st.lists(st.integers(-(2**31), 2**31 - 1)))
def test_columns_come_back(values: list[int]) -> None:
    assert unpack(pack(values)) == values


def test_columns_are_bounded() -> None:
    with pytest.raises(ValueError, match="multiple of 4"):
        unpack(b"123")
    with pytest.raises(ValueError, match="at most 2"):
        unpack(pack([1, 2, 3]), "row_lanes", 2)
    with pytest.raises(OverflowError):
        pack([2**31])
    assert StepPlan(row_lanes=pack([1, -1])).row_lanes == b"\x01\x00\x00\x00\xff\xff\xff\xff"
