from __future__ import annotations

import asyncio
import socket

import pytest

from pagemill_client import AsyncClient, Client, InvalidRequestError, Message, OverloadedError, UnavailableError
from tests.unit.client.fake_gateway import FakeGateway

DEAD = "unix:/nonexistent/gateway.sock"


async def test_unary_calls_of_the_async_client(gateway: FakeGateway) -> None:
    async with AsyncClient(gateway.target) as client:
        assert await client.cancel("alive") is True
        assert await client.cancel("gone") is False
        assert await client.tokenize("text", add_special_tokens=False) == [0, 1, 2]
        assert await client.tokenize([Message("user", "hi")]) == [0, 1, 2]
        assert await client.detokenize([65, 66], skip_special_tokens=False) == "AB"
        assert [model.name for model in await client.list_models()] == ["fake"]
        info = await client.get_model()
        assert (info.vocab_size, info.max_model_len, info.eos_token_ids, info.max_outputs) == (100, 64, (2, 3), 16)
        assert await client.ready()
    assert all(left is not None and 20 < left < 31 for left in gateway.deadlines)
    check_arguments(gateway)


async def test_unary_calls_of_the_blocking_client(gateway: FakeGateway) -> None:
    def calls() -> None:
        with Client(gateway.target) as client:
            assert client.cancel("alive") is True
            assert client.cancel("gone") is False
            assert client.tokenize("text", add_special_tokens=False) == [0, 1, 2]
            assert client.tokenize([Message("user", "hi")]) == [0, 1, 2]
            assert client.detokenize([65, 66], skip_special_tokens=False) == "AB"
            assert [model.name for model in client.list_models()] == ["fake"]
            assert client.get_model().vocab_size == 100
            assert client.ready()

    await asyncio.to_thread(calls)
    check_arguments(gateway)


def check_arguments(gateway: FakeGateway) -> None:
    assert gateway.unary[2].text == "text"
    assert gateway.unary[2].add_special_tokens is False
    assert gateway.unary[3].chat.messages[0].content == "hi"
    assert gateway.unary[4].skip_special_tokens is False


async def test_unary_calls_too_wait_for_a_full_queue_and_not_for_ever(gateway: FakeGateway) -> None:
    gateway.full_times = 2
    async with AsyncClient(gateway.target) as client:
        assert await client.tokenize("x") == [0, 1, 2]
    assert len(gateway.unary) == 3

    def blocking() -> list[int]:
        with Client(gateway.target) as client:
            return client.tokenize("x")

    gateway.full_times = 2
    assert await asyncio.to_thread(blocking) == [0, 1, 2]
    gateway.full_times = 3
    async with AsyncClient(gateway.target) as client:
        with pytest.raises(OverloadedError):
            await client.tokenize("x")
    gateway.full_times = 3
    with pytest.raises(OverloadedError):
        await asyncio.to_thread(blocking)
    assert len(gateway.unary) == 12


async def test_an_unknown_model_is_the_callers_mistake(gateway: FakeGateway) -> None:
    async with AsyncClient(gateway.target) as client:
        with pytest.raises(InvalidRequestError) as caught:
            await client.get_model("other")
    assert (caught.value.reason, caught.value.status) == ("MODEL_NOT_FOUND", "NOT_FOUND")


async def test_alive_and_ready_are_different(gateway: FakeGateway) -> None:
    gateway.ready = False
    async with AsyncClient(gateway.target) as client:
        assert await client.alive()
        assert not await client.ready()


async def test_something_that_listens_and_keeps_silent_is_not_ready() -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        target = f"127.0.0.1:{silent.getsockname()[1]}"
        async with AsyncClient(target) as client:
            assert not await client.ready(timeout_s=0.2)
        with Client(target) as blocking:
            assert not blocking.alive(timeout_s=0.2)


async def test_a_server_that_is_not_there_is_unavailable() -> None:
    async with AsyncClient(DEAD) as client:
        assert not await client.ready()
        with pytest.raises(UnavailableError):
            await client.get_model()
    with Client(DEAD) as blocking:
        assert not blocking.ready()
