"""More of everything than a client should send: calls, connections, resets (S13), and load generators that die."""

from __future__ import annotations

import asyncio
import resource
import threading
import time
import tracemalloc
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest
from pydantic import ValidationError

from pagemill.engine.v1 import frontend_pb2 as wire
from pagemill.v1 import inference_pb2 as pb
from pagemill.v1 import inference_pb2_grpc
from scheduler_svc.gateway import server
from scheduler_svc.gateway.config import GatewaySettings
from scheduler_svc.gateway.tokenizer import TextTokenizer
from tests.integration.gateway_fixture import FakeStream, collect, connect, emit, running_gateway, until
from tests.integration.raw_http2 import (
    REFUSED_STREAM,
    RST_STREAM,
    RawConnection,
    call,
    reset,
)
from tests.unit.gateway.tiny_tokenizer import byte_level_tokenizer

GENERATE = "/pagemill.v1.InferenceService/Generate"
NUM_CLIENTS = 2048
PER_CONNECTION = 100


def body(max_tokens: int = 8) -> bytes:
    request = pb.GenerateRequest(text="x")
    request.stopping.max_tokens = max_tokens
    return request.SerializeToString()


async def accept_only(stream: FakeStream) -> None:
    stream.accept()
    await stream.cancelled.wait()
    stream.end(wire.END_REASON_CANCELLED)


# ---- one request that is too much ----

MESSAGE = 8_000_000
"""Bytes of the largest messages here; the transport takes a few more."""


def many(field: str, count: int) -> pb.GenerateRequest:
    """A request with that many entries in the list `field`."""
    made = pb.GenerateRequest(text="x")
    if field == "token_ids.ids":
        made.token_ids.ids.extend([258] * count)
    elif field == "chat.messages":
        made.chat.MergeFromString(b"\x0a\x00" * count)
    elif field == "sampling.logit_bias":
        made.sampling.logit_bias.update(dict.fromkeys(range(count), 1.0))
    else:
        group, name = field.split(".")
        numbers = field.endswith("_ids")
        getattr(getattr(made, group), name).extend([258 if numbers else "a"] * count)
    return made


@pytest.mark.parametrize(
    ("field", "count"),
    [
        ("token_ids.ids", MESSAGE // 2),
        ("chat.messages", MESSAGE // 2),
        ("sampling.logit_bias", MESSAGE // 12),
        ("sampling.allowed_token_ids", MESSAGE // 2),
        ("sampling.bad_words", MESSAGE // 3),
        ("stopping.stop", MESSAGE // 3),
        ("stopping.stop_token_ids", MESSAGE // 2),
    ],
)
async def test_b12_a_list_that_is_too_long_is_refused_before_it_is_copied(field: str, count: int) -> None:
    async with running_gateway() as rig:
        await rig.probe()
        body = many(field, count).SerializeToString()
        assert len(body) > MESSAGE // 2
        assert await _memory_of_a_refusal(rig.channel, body) < 3 * MESSAGE  # it travels within this process as well
        assert len(rig.scheduler.submits) == 1  # the probe's
        await rig.probe()


@pytest.mark.parametrize("count", [10**9, 2**32 - 1])
@pytest.mark.parametrize("name", ["n", "logprobs", "prompt_logprobs"])
async def test_b12_b13_a_count_that_is_too_large_costs_nothing(name: str, count: int) -> None:
    async with running_gateway() as rig:
        await rig.probe()
        made = pb.GenerateRequest(text="x" * 100)
        setattr(made.output, name, count)
        assert await _memory_of_a_refusal(rig.channel, made.SerializeToString()) < 2**20
        await rig.probe()


async def _memory_of_a_refusal(channel: Any, body: bytes) -> int:
    """Bytes that this process held at most, beyond what it held before, until the call was refused."""
    send = channel.unary_stream(GENERATE)
    tracemalloc.start()
    try:
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await send(body, timeout=60).read()
        assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


class SlowTokenizer(TextTokenizer):
    """Takes long texts only when the gate opens; `starved` if nobody opened it."""

    def __init__(self) -> None:
        super().__init__(byte_level_tokenizer())
        self.gate, self.entered, self.starved = threading.Event(), threading.Event(), False

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        self._wait(text)
        return super().encode(text, add_special_tokens=add_special_tokens)

    def encode_chat(self, text: str, control_spans: Sequence[tuple[int, int]]) -> list[int]:
        self._wait(text)
        return super().encode_chat(text, control_spans)

    def _wait(self, text: str) -> None:
        if len(text) > 50:
            self.entered.set()
            self.starved = not self.gate.wait(10)


@pytest.mark.parametrize("kind", ["text", "chat"])
async def test_b33_short_requests_go_on_while_a_long_text_is_tokenised(kind: str) -> None:
    tokenizer = SlowTokenizer()
    async with running_gateway(tokenizer=tokenizer) as rig:
        made = pb.GenerateRequest(text="a" * 100, stopping=pb.StoppingParams(max_tokens=2))
        if kind == "chat":
            made.chat.messages.add(role="user", content="a" * 100)
        rig.scheduler.script = emit([*b"ok"])
        long = asyncio.create_task(rig.generate(made))
        await until(tokenizer.entered.is_set)
        for _ in range(20):
            await rig.probe_beside()
        assert not long.done()
        tokenizer.gate.set()
        assert (await long).text == "ok"
        assert not tokenizer.starved
        await rig.probe()


# ---- many requests ----


async def load_generator(port: int, num_calls: int) -> list[RawConnection]:
    """Connections with so many calls on them, as many on each as a gateway takes."""
    connections = []
    for first in range(0, num_calls, PER_CONNECTION):
        connection = await RawConnection.open(port)
        assert await connection.is_served()
        numbers = range(min(PER_CONNECTION, num_calls - first))
        await connection.send(b"".join(call(2 * i + 1, GENERATE, body()) for i in numbers))
        connections.append(connection)
    return connections


async def test_b76_a_load_generator_of_2048_clients_is_killed_five_times() -> None:
    async with running_gateway() as rig:
        for _ in range(5):
            rig.scheduler.script = accept_only
            generator = await load_generator(rig.gateway.port, NUM_CLIENTS)
            await until(lambda: len(rig.scheduler.live) == NUM_CLIENTS)
            for connection in generator:
                connection.kill()
            start = time.monotonic()
            rig.scheduler.script = emit([*b"ok"])
            request = pb.GenerateRequest(text="probe", stopping=pb.StoppingParams(max_tokens=2))
            assert (await rig.generate(request)).text == "ok"
            assert time.monotonic() - start < 5  # a second on an idle machine
            await until(lambda: not rig.scheduler.live and len(rig.gateway.registry) == 0)
            assert rig.gateway.scheduler.num_streams == 0
        await rig.probe()


async def test_b77_of_2048_healthy_streams_at_once_none_is_refused_or_aborted() -> None:
    """gRPC's own default bound on calls not yet looked at refused some 200 of them, without a reason."""
    async with running_gateway() as rig:
        everybody = asyncio.Event()

        async def hold(stream: FakeStream) -> None:
            stream.accept()
            await everybody.wait()
            await emit([*b"ab"])(stream)

        rig.scheduler.script = hold
        channels = [connect(rig.gateway.port) for _ in range(0, NUM_CLIENTS, PER_CONNECTION)]
        stubs = [inference_pb2_grpc.InferenceServiceStub(channel) for channel in channels]  # type: ignore[no-untyped-call]
        request = pb.GenerateRequest.FromString(body(2))
        calls = [stubs[i // PER_CONNECTION].Generate(request, timeout=60) for i in range(NUM_CLIENTS)]
        answers = asyncio.gather(*map(collect, calls))
        await until(lambda: len(rig.scheduler.live) == NUM_CLIENTS, 60)
        everybody.set()
        assert Counter(answer.text for answer in await answers) == {"ab": NUM_CLIENTS}
        samples = [s for metric in rig.gateway.metrics.requests.collect() for s in metric.samples]
        outcomes = {s.labels["outcome"]: s.value for s in samples if s.name.endswith("_total")}
        assert outcomes == {"length": NUM_CLIENTS}
        for channel in channels:
            await channel.close()


async def test_s13_calls_beyond_the_bound_of_a_connection_are_refused_on_it_alone() -> None:
    async with running_gateway(max_streams_per_connection=20) as rig:
        rig.scheduler.script = accept_only
        rude = await RawConnection.open(rig.gateway.port)
        assert await rude.is_served()
        await rude.send(b"".join(call(2 * i + 1, GENERATE, body()) for i in range(50)))
        refused: set[int] = set()
        async with asyncio.timeout(10):
            while len(refused) < 30 and (got := await rude.next()) is not None:
                if got.kind == RST_STREAM:
                    assert got.code == REFUSED_STREAM  # "not looked at": safe to send again
                    refused.add(got.stream)
        assert refused == set(range(41, 101, 2))
        await until(lambda: len(rig.scheduler.live) == 20)
        assert len(rig.gateway.registry) == 20
        await rig.probe_beside()
        await rude.close()
        await until(lambda: not rig.scheduler.live)


@pytest.mark.parametrize("message", [body(), None], ids=["whole calls", "calls without a message"])
async def test_s13_rapid_reset_costs_next_to_nothing(message: bytes | None) -> None:
    """CVE-2023-44487: calls that are opened and reset at once never count as open. 20,000 of them on one connection."""
    async with running_gateway() as rig:
        await rig.probe()
        rig.scheduler.script = accept_only
        num_submits = len(rig.scheduler.submits)
        before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        rude = await RawConnection.open(rig.gateway.port)
        assert await rude.is_served()

        async def read() -> None:
            while await rude.next() is not None:
                pass

        reading = asyncio.create_task(read())
        try:
            for burst in range(200):
                numbers = range(200 * burst + 1, 200 * (burst + 1), 2)
                await rude.send(b"".join(call(n, GENERATE, message) + reset(n) for n in numbers))
                await asyncio.sleep(0)
        except ConnectionError:
            pass  # hanging up is as good an answer
        start = time.monotonic()
        request = pb.GenerateRequest(text="probe", stopping=pb.StoppingParams(max_tokens=2))
        rig.scheduler.script = emit([*b"ok"])
        assert (await rig.generate(request)).text == "ok"
        assert time.monotonic() - start < 5
        await until(lambda: not rig.scheduler.live and len(rig.gateway.registry) == 0)
        assert len(rig.scheduler.submits) - num_submits < 2000
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib < 64 * 1024
        await rude.close()
        reading.cancel()


async def test_s13_connections_beyond_the_bound_are_hung_up_on_and_the_others_go_on() -> None:
    async with running_gateway(max_connections=4) as rig:
        await rig.probe()  # one connection
        mine = [await RawConnection.open(rig.gateway.port) for _ in range(5)]
        assert [await connection.is_served() for connection in mine] == [True, True, True, False, False]
        await rig.probe()
        await mine[0].close()

        async def let_in() -> bool:
            late = await RawConnection.open(rig.gateway.port)
            try:
                return await late.is_served()
            finally:
                await late.close()

        async with asyncio.timeout(10):
            while not await let_in():
                await asyncio.sleep(0.02)
        for connection in mine:
            await connection.close()


async def test_s13_a_connection_that_says_nothing_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_HANDSHAKE_TIMEOUT_S", 0.3)
    async with running_gateway() as rig:
        silent = await RawConnection.open(rig.gateway.port, preface=False)
        async with asyncio.timeout(10):
            while await silent.next() is not None:
                pass
        await rig.probe()
        await silent.close()


def test_s13_connections_take_at_most_half_of_the_files() -> None:
    half = resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2
    assert GatewaySettings(model=Path("x")).connection_limit == min(10_000, half)
    assert GatewaySettings(model=Path("x"), max_connections=half).connection_limit == half
    with pytest.raises(ValidationError, match="--max-connections: at most"):
        GatewaySettings(model=Path("x"), max_connections=half + 1)
