"""Stream numbers, and what is owed to a scheduler while the link is full."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pagemill.engine.v1 import frontend_pb2 as wire
from pagemill.framing import PROTOCOL
from pagemill.links import SendOutcome
from pagemill.model_files import ModelFormat, ModelInfo
from scheduler_svc.gateway import tokenizer
from scheduler_svc.gateway.gguf_tokenizer import UnsupportedTokenizerError
from scheduler_svc.gateway.link import Identity
from scheduler_svc.gateway.metrics import GatewayMetrics
from scheduler_svc.gateway.scheduler_client import SchedulerClient
from scheduler_svc.gateway.stream_table import StreamTable
from tests.unit.gateway.tiny_tokenizer import byte_level_tokenizer


class _Nowhere:
    def send(self, frame: bytes) -> SendOutcome:
        return SendOutcome.FULL

    async def recv(self) -> bytes:
        raise ConnectionAbortedError

    def recv_nowait(self) -> bytes | None:
        return None

    def close(self, linger_s: float = 0.0) -> None:
        pass


def test_stream_numbers_are_positive_and_skip_the_living_when_they_come_round() -> None:
    table = StreamTable(GatewayMetrics())
    assert [table.new_id(), table.new_id()] == [1, 2]
    living: Any = object()
    table.streams[1] = living
    table._next_id = 2**31 - 2
    assert [table.new_id(), table.new_id()] == [2**31 - 1, 2]


async def test_a_frame_that_was_not_taken_uses_up_no_number() -> None:
    client = SchedulerClient(_Nowhere(), Identity("1", "i", "h", "f"), GatewayMetrics())
    assert not client._send(hello=client._identity.hello())
    assert client._channel.sent_seq == 0


async def test_dropped_frames_are_counted_by_their_own_kind() -> None:
    metrics = GatewayMetrics()
    client = SchedulerClient(_Nowhere(), Identity("1", "i", "h", "f"), metrics)
    other = wire.FrontendEnvelope(protocol=PROTOCOL + 98, status=wire.SchedulerStatus()).SerializeToString()
    for frame in (b"\xff", other, b"\xff", b"\xff"):
        client._take(frame)
    assert metrics.stale.labels("malformed")._value.get() == 3
    assert metrics.stale.labels("protocol")._value.get() == 1


def _info(path: Path, vocab_size: int) -> ModelInfo:
    return ModelInfo(
        path=path,
        format=ModelFormat.HF_DIRECTORY,
        name="m",
        architecture="llama",
        config={},
        vocab_size=vocab_size,
        max_model_len=8,
        eos_token_ids=(),
        bos_token_id=None,
        add_bos_token=False,
        special_tokens={},
        chat_template=None,
        fingerprint="",
        tokenizer_hash="",
        gguf=None,
        tensors=None,
    )


def test_r30_a_tokenizer_with_more_ids_than_the_model_does_not_start(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(byte_level_tokenizer().to_str())
    assert tokenizer.load(_info(tmp_path, 300)).vocab_size == 259
    with pytest.raises(UnsupportedTokenizerError, match="259 ids, the model only 100"):
        tokenizer.load(_info(tmp_path, 100))
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(UnsupportedTokenizerError, match="cannot be read"):
        tokenizer.load(_info(tmp_path, 300))
