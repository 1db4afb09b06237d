"""What a stream's Submit says, the first time and again."""

from __future__ import annotations

import hashlib
import time

import pytest

from pagemill import columns
from pagemill.engine.v1.sampling_pb2 import Sampling
from scheduler_svc.gateway.streams import Replay, cache_salt


def _replay(age_s: float, max_queue_ms: int | None) -> Replay:
    return Replay(
        request_id="r",
        tenant="",
        priority=0,
        prompt_ids=columns.pack([1]),
        num_prompt_tokens=1,
        sampling=Sampling(),
        max_tokens=8,
        arrival=time.monotonic() - age_s,
        deadline=None,
        max_queue_ms=max_queue_ms,
        cache_salt=b"",
    )


def test_the_time_in_the_queue_is_not_granted_again() -> None:
    submit = _replay(2.0, 60_000).submit(1, [])
    assert submit.age_ms >= 2000
    assert submit.max_queue_ms == 60_000 - submit.age_ms


def test_a_queue_limit_that_is_used_up_leaves_a_millisecond() -> None:
    assert _replay(2.0, 100).submit(1, []).max_queue_ms == 1


@pytest.mark.parametrize(("max_queue_ms", "emitted"), [(100, [7]), (60_000, [7, 8]), (None, []), (None, [7])])
def test_a_stream_with_tokens_or_without_a_limit_has_no_queue_limit(
    max_queue_ms: int | None, emitted: list[int]
) -> None:
    submit = _replay(2.0, max_queue_ms).submit(1, emitted)
    assert not submit.HasField("max_queue_ms")
    assert columns.unpack(submit.emitted_ids) == emitted


def test_s19_the_cache_salt_of_a_tenant_is_its_own() -> None:
    pairs = [("", "s"), ("t", ""), ("t", "s"), ("ts", ""), ("", "ts"), ("é", ""), ("", "é"), ("1", ":"), ("", "1:")]
    salts = [cache_salt(*pair) for pair in pairs]
    assert len(set(salts)) == len(pairs)
    assert {len(salt) for salt in salts} == {32}
    assert cache_salt("", "") == b""
    framed = (1).to_bytes(4, "little") + b"t" + b"s"
    assert cache_salt("t", "s") == hashlib.sha256(framed).digest()  # it outlives processes: never change it unnoticed
