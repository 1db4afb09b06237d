"""Chat prompts: the model's template, rendered in a worker process that is killed when it takes too long.

A template is code from a model file and its input comes from clients, so a rendering that never ends must cost one
request and not the gateway: a thread cannot be stopped, a process can. It costs some 0.15 s to start (in the
background, at the gateway's start) and a fraction of a millisecond per conversation.
"""

from __future__ import annotations

import asyncio
import json
import logging
import struct
import sys
from typing import Any

from pagemill.errors import InvalidParameterError, PagemillError, Reason, Violation, invalid
from pagemill.logs import kv
from scheduler_svc.gateway.chat_render import Rendered

_log = logging.getLogger(__name__)

_START_TIMEOUT_S = 10.0
_MAX_WAITING = 1000
_MAX_ANSWER_BYTES = 256 * 1024 * 1024


class TemplateCompileError(ValueError):
    """The model's chat template is not valid Jinja; the text is one line for the operator."""


class ChatTemplate:
    """Renders conversations with one template, one after another."""

    def __init__(
        self, template: str, special_tokens: dict[str, str], controls: list[str], *, timeout_s: float = 2.0
    ) -> None:
        self._setup = {"template": template, "special_tokens": special_tokens, "controls": controls}
        self._timeout_s = timeout_s
        self._turn = asyncio.Lock()
        self._waiting = 0
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        """Start the worker. Raises TemplateCompileError."""
        async with self._turn:
            await self._ensure_running()

    async def render(self, messages: list[dict[str, str]], *, add_generation_prompt: bool) -> Rendered:
        """The rendered conversation. Raises PagemillError for what the template or its limits do not allow."""
        if self._waiting >= _MAX_WAITING:
            raise PagemillError(Reason.QUEUE_FULL, "too many chats are waiting to be rendered", retry_after_ms=1000)
        self._waiting += 1
        try:
            async with self._turn:
                answer = await self._ask({"messages": messages, "add_generation_prompt": add_generation_prompt})
        finally:
            self._waiting -= 1
        if "error" in answer:
            raise _refusal(answer)
        return Rendered(answer["text"], [(start, end) for start, end in answer["spans"]])

    async def close(self) -> None:
        """End the worker."""
        await self._kill()

    async def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        process = await self._ensure_running()
        try:
            async with asyncio.timeout(self._timeout_s):
                return await _exchange(process, request)
        except TimeoutError:
            _log.warning("chat template timed out", extra=kv(seconds=self._timeout_s))
        except (OSError, asyncio.IncompleteReadError, ValueError) as error:
            _log.error("chat worker failed", extra=kv(kind=type(error).__name__))
        except asyncio.CancelledError:  # an answer that nobody reads would be taken for the next one's
            await self._kill()
            raise
        await self._kill()
        return {"error": "limits"}

    async def _ensure_running(self) -> asyncio.subprocess.Process:
        if self._process is not None and self._process.returncode is None:
            return self._process
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "scheduler_svc.gateway.chat_worker",
            stdin=pipe,
            stdout=pipe,
            start_new_session=True,  # a Ctrl-C in the terminal is for the gateway, which drains first
        )
        self._process = process
        try:
            async with asyncio.timeout(_START_TIMEOUT_S):
                answer = await _exchange(process, self._setup)
        except (TimeoutError, OSError, asyncio.IncompleteReadError) as error:
            await self._kill()
            raise PagemillError(Reason.INTERNAL, "the chat worker does not start") from error
        except asyncio.CancelledError:
            await self._kill()
            raise
        if "error" in answer:
            await self._kill()
            raise TemplateCompileError(f"the model's chat template does not compile: {answer['message']}")
        return process

    async def _kill(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        if process.stdin is not None:
            process.stdin.close()
        if process.returncode is None:
            process.kill()
            await process.wait()


async def _exchange(process: asyncio.subprocess.Process, request: dict[str, Any]) -> dict[str, Any]:
    assert process.stdin is not None
    assert process.stdout is not None
    body = json.dumps(request).encode()
    process.stdin.write(struct.pack("<I", len(body)) + body)
    await process.stdin.drain()
    length = struct.unpack("<I", await process.stdout.readexactly(4))[0]
    if length > _MAX_ANSWER_BYTES:
        raise ValueError("answer too long")
    answer: dict[str, Any] = json.loads(await process.stdout.readexactly(length))
    return answer


def _refusal(answer: dict[str, Any]) -> PagemillError:
    kind = answer["error"]
    if kind == "refused":
        # The text is the template's, written by the model's authors for exactly this reader.
        return invalid("chat.messages", f"refused by the model's chat template: {answer['message'] or 'it failed'}")
    if kind == "ambiguous":
        text = "text spells control tokens of the model where its chat template transforms it"
        return InvalidParameterError(Violation("chat.messages", text))
    return InvalidParameterError(Violation("chat.messages", "rendering exceeds the limits on time and memory"))
