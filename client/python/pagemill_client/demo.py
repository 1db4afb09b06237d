"""`pagemill demo`: the whole service with the demo model, for the length of one answer."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path

from pagemill.model_files import ModelFileError
from pagemill.settings import load
from pagemill_client.config import DemoSettings
from pagemill_client.roles import OptionError
from pagemill_client.serve import Stack, plan, run, stop_on_signals
from pagemill_client.terminal import err, out, safe


def main(argv: list[str]) -> int:
    """Run `pagemill demo`; exit status 0 when the answer was streamed and everything stopped cleanly."""
    settings = load(DemoSettings, argv)
    # Any free port and no metrics: the demo must work beside a service that is already running.
    options = [
        "--model",
        "demo",
        "--port",
        "0",
        "--admin-port",
        "0",
        "--ready-timeout-s",
        str(settings.ready_timeout_s),
    ]
    options += [f"--{role}.metrics-port=0" for role in ("gateway", "scheduler", "executor")]
    with tempfile.TemporaryDirectory(prefix="pagemill-") as directory:
        try:
            stack = plan(options, Path(directory))
        except (OptionError, ModelFileError) as error:
            err(f"{settings.prog}: {error}")
            return 1
        return asyncio.run(_demo(settings, stack))


async def _demo(settings: DemoSettings, stack: Stack) -> int:
    stop, hurry, ready = asyncio.Event(), asyncio.Event(), asyncio.Event()
    stop_on_signals(stop, hurry)
    running = asyncio.create_task(
        run(
            stack,
            stop,
            hurry,
            on_line=lambda _, line: err(line) if settings.log_level == "debug" else None,
            announce=lambda line: err(f"{settings.prog}: {line}"),
            on_ready=ready.set,
            lines_shown=settings.log_level == "debug",
        )
    )
    answer = asyncio.create_task(_answer(settings, stack, ready))
    await asyncio.wait([running, answer], return_when=asyncio.FIRST_COMPLETED)
    if running.done():  # it failed, or a signal ended it: the line that says why is out already
        answer.cancel()
        await asyncio.gather(answer, return_exceptions=True)
        return running.result() or 1
    stop.set()
    status = await running
    return status or answer.result()


async def _answer(settings: DemoSettings, stack: Stack, ready: asyncio.Event) -> int:
    """Stream one answer; 0 if it came."""
    await ready.wait()
    # gRPC is loaded by the readiness probe anyway, and not before the children have started.
    from pagemill_client.aio import AsyncClient  # noqa: PLC0415
    from pagemill_client.errors import PagemillError  # noqa: PLC0415
    from pagemill_client.types import Message  # noqa: PLC0415

    out(f"\n> {settings.message}\n")
    try:
        async with AsyncClient(stack.target) as client:
            messages = [Message("user", settings.message)]
            async with client.chat(messages, temperature=0.0, max_tokens=settings.max_tokens) as stream:
                async for text in stream.texts():
                    out(safe(text), end="")
                generation = await stream.collect()
    except PagemillError as error:
        err(f"{settings.prog}: {error}")
        return 1
    out("\n")
    return 0 if generation.text else 1
