"""A whole service for the length of a measurement, as `pagemill serve` runs it."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

from pagemill_client.serve import plan, run

KV_MEMORY_BYTES = 2**30
"""Enough for W2 four times over; without it every stack would take most of the machine."""


@contextlib.asynccontextmanager
async def serving(model: str, options: Sequence[str] = (), *, link_delay_ms: float = 0.0) -> AsyncIterator[str]:
    """Serve `model`; gives the gateway's address. `link_delay_ms` is added each way between scheduler and executor.

    Raises RuntimeError with the stack's own words if it does not come up.
    """
    with tempfile.TemporaryDirectory(prefix="pagemill-bench-") as directory:
        argv = ["--model", model, "--port", "0", "--kv-memory-bytes", str(KV_MEMORY_BYTES), *options]
        argv += [f"--{role}.metrics-port=0" for role in ("gateway", "scheduler", "executor")]
        async with contextlib.AsyncExitStack() as exits:
            if link_delay_ms:
                near, far = f"ipc://{directory}/near.sock", f"ipc://{directory}/far.sock"
                argv += ["--executor-endpoint", near, "--executor.scheduler-endpoint", far]
                await exits.enter_async_context(_delaying(far, near, link_delay_ms))
            yield await exits.enter_async_context(_running(argv, Path(directory)))


@contextlib.asynccontextmanager
async def _running(argv: list[str], directory: Path) -> AsyncIterator[str]:
    stack = plan(argv, directory)
    stop, ready = asyncio.Event(), asyncio.Event()
    said: list[str] = []
    task = asyncio.create_task(
        run(stack, stop, asyncio.Event(), on_line=lambda *_: None, announce=said.append, on_ready=ready.set)
    )
    waits = [task, asyncio.create_task(ready.wait())]
    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    waits[1].cancel()
    if task.done():
        raise RuntimeError("\n".join(said))
    try:
        yield stack.target
    finally:
        stop.set()
        await task


@contextlib.asynccontextmanager
async def _delaying(listen: str, connect: str, delay_ms: float) -> AsyncIterator[None]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "bench.delay_proxy"),
        *("--listen", listen, "--connect", connect, "--delay-ms", str(delay_ms)),
    )
    try:
        yield
    finally:
        process.terminate()
        await process.wait()
