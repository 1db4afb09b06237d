"""A stack for the length of a block: ready inside, gone behind it, and its troubles are told."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from pagemill_client import running as module
from pagemill_client.running import running
from pagemill_client.serve import Stack
from pagemill_client.supervisor import ServeError

STACK: Any = type("Anything", (), {"target": "127.0.0.1:1"})()


class FakeStack:
    """In place of `serve.run`: says what it is told to, and notes how it was ended."""

    def __init__(self) -> None:
        self.fails = False
        self.say: Callable[[str], None] = lambda _: None
        self.ended = ""

    async def run(
        self, stack: Stack, stop: asyncio.Event, hurry: asyncio.Event, *, announce: Any, on_ready: Any, **_: object
    ) -> int:
        self.say = announce
        if self.fails:
            announce("executor ended before it was ready")
            return 1
        announce("ready after 1.0 s")
        on_ready()
        await stop.wait()
        self.ended = "at once" if hurry.is_set() else "in order"
        return 0


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeStack:
    stack = FakeStack()
    monkeypatch.setattr(module, "run", stack.run)
    return stack


async def test_it_is_ready_inside_and_ended_in_order_behind(fake: FakeStack) -> None:
    async with running(STACK) as target:
        assert target == "127.0.0.1:1"
        inside = fake.ended
    assert (inside, fake.ended) == ("", "in order")


async def test_what_does_not_come_up_is_told_in_its_own_words(fake: FakeStack) -> None:
    fake.fails = True
    with pytest.raises(ServeError, match="executor ended before it was ready"):
        async with running(STACK):
            raise AssertionError("the block must not run")


async def test_an_exception_ends_it_at_once_and_is_passed_on(fake: FakeStack) -> None:
    with pytest.raises(KeyError):
        async with running(STACK):
            raise KeyError
    assert fake.ended == "at once"


async def test_a_cancelled_block_leaves_nothing_running(fake: FakeStack) -> None:
    inside = asyncio.Event()

    async def measure() -> None:
        async with running(STACK):
            inside.set()
            await asyncio.Event().wait()

    task = asyncio.create_task(measure())
    await inside.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert fake.ended == "at once"


async def test_a_crash_inside_the_block_is_an_error_although_the_process_was_started_again(fake: FakeStack) -> None:
    with pytest.raises(ServeError, match="starting it again") as caught:
        async with running(STACK):
            fake.say("executor ended (killed by SIGKILL); starting it again in 0.1 s")
    assert "ready after" not in str(caught.value)
    assert fake.ended == "at once"
