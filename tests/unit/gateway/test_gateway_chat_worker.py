"""The process that renders: its limits, its answers, and what becomes of it when something goes wrong."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import signal
import struct
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from pagemill.errors import PagemillError, Reason
from scheduler_svc.gateway import chat as chat_module
from scheduler_svc.gateway import chat_worker
from scheduler_svc.gateway.chat import ChatTemplate, TemplateCompileError
from scheduler_svc.gateway.chat_render import ChatRenderer

CONTROLS = ["<s>"]
ECHO = "<s>{{ messages[0].content }}"


def chat(content: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": content}]


@asynccontextmanager
async def running(template: str, **options: Any) -> AsyncIterator[ChatTemplate]:
    made = ChatTemplate(template, {}, CONTROLS, **options)
    try:
        await made.start()
        yield made
    finally:
        await made.close()


def pid(template: ChatTemplate) -> int:
    assert template._process is not None
    return template._process.pid


async def render(template: ChatTemplate, content: str, opened: bool = True) -> str:
    return (await template.render(chat(content), add_generation_prompt=opened)).text


async def refusal(template: ChatTemplate, content: str) -> PagemillError:
    with pytest.raises(PagemillError) as caught:
        await render(template, content)
    return caught.value


async def test_its_answer_is_the_renderers_own() -> None:
    template = "<s>{{ messages[0].content }}{% if add_generation_prompt %}<s>{% endif %}"
    async with running(template) as remote:
        for opened in (True, False):
            expected = ChatRenderer(template, {}, CONTROLS).render(chat("é<s>"), add_generation_prompt=opened)
            assert await remote.render(chat("é<s>"), add_generation_prompt=opened) == expected
        assert remote._waiting == 0


async def test_many_at_once_get_each_their_own() -> None:
    async with running(ECHO) as template:
        texts = [str(i) * 50 for i in range(40)]
        assert await asyncio.gather(*(render(template, text) for text in texts)) == [f"<s>{text}" for text in texts]


async def test_s17_it_has_limits_a_session_of_its_own_and_ends_with_its_gateway() -> None:
    async with running(ECHO) as template:
        number = pid(template)
        limits = Path(f"/proc/{number}/limits").read_text().splitlines()
        by_name = {line[:25].strip(): line[25:].split() for line in limits}
        assert by_name["Max address space"][:2] == [str(chat_worker._MAX_MEMORY_BYTES)] * 2
        assert by_name["Max core file size"][:2] == ["0", "0"]
        assert os.getsid(number) == number
    with pytest.raises(ProcessLookupError):
        os.kill(number, 0)


@pytest.mark.parametrize(
    "template",
    [
        "{% macro f() %}{{ f() }}{% endmacro %}{% if messages[0].content == 'go' %}{{ f() }}{% endif %}fine",
        "{% if messages[0].content == 'go' %}{{ ('x' * 2000000000) | length }}{% endif %}fine",
    ],
    ids=["recursion", "memory"],
)
async def test_limits_within_python_cost_not_even_the_worker(template: str) -> None:
    async with running(template, timeout_s=20) as remote:
        before = pid(remote)
        error = await refusal(remote, "go")
        assert error.reason is Reason.INVALID_PARAMETER
        assert "limits on time and memory" in error.message
        assert await render(remote, "x") == "fine"
        assert pid(remote) == before


async def test_text_of_unclear_origin_is_refused_as_the_callers() -> None:
    async with running("{% if '<s>' in messages[0].content %}<s>{% endif %}x") as template:
        error = await refusal(template, "<s>")
        assert error.reason is Reason.INVALID_PARAMETER
        assert "control tokens" in error.message
        assert await render(template, "x") == "x"


async def test_a_template_too_deep_to_compile_is_said_at_start() -> None:
    template = ChatTemplate("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", {}, CONTROLS)
    with pytest.raises(TemplateCompileError, match="does not compile"):
        await template.start()
    assert template._process is None


async def test_a_worker_that_died_while_idle_is_replaced() -> None:
    async with running(ECHO) as template:
        assert template._process is not None
        template._process.kill()
        await template._process.wait()
        assert await render(template, "x") == "<s>x"


async def test_a_worker_that_dies_at_work_costs_one_request() -> None:
    endless = "{% if messages[0].content == 'loop' %}{% for a in range(99999) %}{% for b in range(99999) %}" + (
        "{% endfor %}{% endfor %}{% endif %}fine"
    )
    async with running(endless, timeout_s=30) as template:
        number = pid(template)
        looping = asyncio.create_task(refusal(template, "loop"))
        while not template._turn.locked():
            await asyncio.sleep(0)
        os.kill(number, signal.SIGKILL)
        assert (await looping).reason is Reason.INVALID_PARAMETER
        assert await render(template, "x") == "fine"
        assert pid(template) != number


async def test_an_answer_that_is_too_long_costs_the_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(ECHO) as template:
        number = pid(template)
        monkeypatch.setattr(chat_module, "_MAX_ANSWER_BYTES", 100)
        assert (await refusal(template, "x" * 200)).reason is Reason.INVALID_PARAMETER
        assert await render(template, "x") == "<s>x"
        assert pid(template) != number


async def test_waiting_conversations_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_module, "_MAX_WAITING", 3)
    async with running(ECHO) as template:
        async with template._turn:
            waiting = [asyncio.create_task(render(template, str(i))) for i in range(3)]
            await asyncio.sleep(0)
            error = await refusal(template, "x")
            assert error.reason is Reason.QUEUE_FULL
            assert error.retry_after_ms is not None
        assert await asyncio.gather(*waiting) == ["<s>0", "<s>1", "<s>2"]
        assert await render(template, "x") == "<s>x"


@pytest.mark.parametrize("script", ["exit 1", "sleep 60"])
async def test_a_worker_that_does_not_start_is_our_fault_and_leaves_nothing(
    script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = tmp_path / "python"
    fake.write_text(f"#!/bin/sh\nexec {script}\n" if script.startswith("sleep") else f"#!/bin/sh\n{script}\n")
    fake.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(fake))
    monkeypatch.setattr(chat_module, "_START_TIMEOUT_S", 0.3)
    template = ChatTemplate(ECHO, {}, CONTROLS)
    with pytest.raises(PagemillError) as caught:
        async with asyncio.timeout(10):
            await template.start()
    assert caught.value.reason is Reason.INTERNAL
    assert template._process is None


def test_frames_end_with_the_input_and_are_bounded() -> None:
    assert chat_worker._read(io.BytesIO(b"")) is None
    assert chat_worker._read(io.BytesIO(b"\x02")) is None
    assert chat_worker._read(io.BytesIO(struct.pack("<I", 2) + b"{}")) == {}
    assert chat_worker._read(io.BytesIO(struct.pack("<I", 3) + b"{}")) is None
    huge = io.BytesIO(struct.pack("<I", chat_worker._MAX_FRAME_BYTES + 1) + b"{}")
    assert chat_worker._read(huge) is None
    assert huge.tell() == 4


@pytest.mark.parametrize("num_asked", [0, 1, 3])
def test_a_worker_whose_gateway_has_died_ends_without_a_word(num_asked: int) -> None:
    def frame(body: dict[str, Any]) -> bytes:
        data = json.dumps(body).encode()
        return struct.pack("<I", len(data)) + data

    setup = {"template": ECHO, "special_tokens": {}, "controls": CONTROLS}
    request = {"messages": chat("x"), "add_generation_prompt": True}
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [sys.executable, "-m", "scheduler_svc.gateway.chat_worker"], stdin=pipe, stdout=pipe, stderr=pipe
    ) as worker:
        assert worker.stdin is not None
        assert worker.stdout is not None
        assert worker.stderr is not None
        worker.stdout.close()  # nobody will read its answers
        worker.stdin.write(frame(setup) + frame(request) * num_asked)
        with contextlib.suppress(BrokenPipeError):
            worker.stdin.close()
        assert worker.stderr.read() == b""
        assert worker.wait(30) == 0
