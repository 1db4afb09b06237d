"""A whole service for the length of a measurement, as `pagemill serve` runs it."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from pathlib import Path

from pagemill_client.processes import ChildSpec
from pagemill_client.running import running
from pagemill_client.serve import plan

KV_MEMORY_BYTES = 2**30
"""Enough for W2 four times over; without it every stack would take most of the machine."""


class Link:
    """The wire between scheduler and executor of one running service; its delay can be changed at any time."""

    def __init__(self, orders: asyncio.StreamWriter) -> None:
        self._orders = orders

    async def set_delay_ms(self, delay_ms: float, *, echo_ms: float = 0.0) -> None:
        """Hold every later frame for at least `delay_ms`, each way; see `delay_proxy` for the echo."""
        self._orders.write(f"{delay_ms} {echo_ms}\n".encode())
        await self._orders.drain()


@contextlib.asynccontextmanager
async def serving(
    model: str, options: Sequence[str] = (), *, adapt: Callable[[ChildSpec], ChildSpec] | None = None
) -> AsyncIterator[str]:
    """Serve `model`; gives the gateway's address. `adapt` may change how a process is started.

    Raises ServeError with the stack's own words if it does not come up.
    """
    with tempfile.TemporaryDirectory(prefix="pagemill-bench-") as directory:
        async with _running(_arguments(model, options), Path(directory), adapt) as target:
            yield target


@contextlib.asynccontextmanager
async def serving_through_a_proxy(
    model: str, options: Sequence[str] = (), *, executor_metrics_port: int = 0
) -> AsyncIterator[tuple[str, Link]]:
    """As `serving`, with `delay_proxy` between scheduler and executor, which adds nothing until told to."""
    with tempfile.TemporaryDirectory(prefix="pagemill-bench-") as directory:
        near, far = f"ipc://{directory}/near.sock", f"ipc://{directory}/far.sock"
        argv = [*_arguments(model, options), "--executor-endpoint", near, "--executor.scheduler-endpoint", far]
        argv.append(f"--executor.metrics-port={executor_metrics_port}")
        async with _proxy(far, near) as link, _running(argv, Path(directory)) as target:
            yield target, link


def _arguments(model: str, options: Sequence[str]) -> list[str]:
    argv = ["--model", model, "--port", "0", "--admin-port", "0", "--kv-memory-bytes", str(KV_MEMORY_BYTES), *options]
    named = {option.partition("=")[0] for option in options}
    flags = [f"--{role}.metrics-port" for role in ("gateway", "scheduler", "executor")]
    return argv + [f"{flag}=0" for flag in flags if flag not in named]


@contextlib.asynccontextmanager
async def _running(
    argv: list[str], directory: Path, adapt: Callable[[ChildSpec], ChildSpec] | None = None
) -> AsyncIterator[str]:
    stack = plan(argv, directory)
    if adapt is not None:
        stack = replace(stack, children=tuple(map(adapt, stack.children)))
    async with running(stack) as target:
        yield target


@contextlib.asynccontextmanager
async def _proxy(listen: str, connect: str) -> AsyncIterator[Link]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "bench.delay_proxy"),
        *("--listen", listen, "--connect", connect, "--delay-ms", "0"),
        stdin=asyncio.subprocess.PIPE,
    )
    assert process.stdin is not None
    try:
        yield Link(process.stdin)
    finally:
        process.terminate()
        await process.wait()
