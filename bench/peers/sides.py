"""What is compared, each behind the same call: the requests of a turn in, a record per request out."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench import machine
from bench.peers.environments import PEERS, ROOT
from bench.stack import serving
from pagemill_client.aio import AsyncClient
from pagemill_client.load import Record, Request, closed_loop, open_loop

PAGEMILL = "pagemill"
_LINE_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Side:
    """`about`: versions, types of weights and KV, threads, and how it runs."""

    name: str
    about: dict[str, Any]
    turn: Callable[[Sequence[Request]], Awaitable[list[Record]]]


@contextlib.asynccontextmanager
async def pagemill(model: Path, options: Sequence[str], about: dict[str, Any]) -> AsyncIterator[Side]:
    """The whole service, loaded over gRPC from here. Raises ServeError if it does not come up."""
    async with serving(str(model), options) as target, contextlib.AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(AsyncClient(target)) for _ in range(2)]

        async def turn(requests: Sequence[Request]) -> list[Record]:
            if requests[0].at is not None:
                return await open_loop(clients, requests, "")
            return await closed_loop(clients, requests, len(requests), "")

        versions = {name: machine.describe()["versions"][name] for name in ("pagemill", "torch")}
        how = "the whole service, over gRPC; prefix cache" + (f"; {' '.join(options)}" if options else "")
        yield Side(PAGEMILL, {"versions": versions, "how": how, **about}, turn)


@contextlib.asynccontextmanager
async def peer(name: str, python: Path, options: dict[str, Any]) -> AsyncIterator[Side]:
    """A peer's own process in its own environment. Raises RuntimeError if it does not load; it has said why.

    It and what it starts are stopped while others have their turns: some wait by spinning (vLLM's engine takes half of
    two CPUs while it has nothing to do), which would halve the speed of the side whose turn it is.
    """
    process = await asyncio.create_subprocess_exec(
        *(str(python), "-m", PEERS[name].worker, json.dumps(options)),
        cwd=ROOT,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        limit=_LINE_BYTES,
        # A group of processes to stop, in this session: without its parent the system hangs it up even if stopped.
        process_group=0,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    stdin, stdout = process.stdin, process.stdout

    async def answer() -> dict[str, Any]:
        line = await stdout.readline()
        if not line:
            raise RuntimeError(f"{name} ended with status {await process.wait()}; it said why above")
        value: dict[str, Any] = json.loads(line)
        return value

    async def turn(requests: Sequence[Request]) -> list[Record]:
        with contextlib.suppress(ProcessLookupError):  # it has died; what follows says so
            os.killpg(process.pid, signal.SIGCONT)
        stdin.write(json.dumps({"requests": [[r.ids, r.n_out, r.at] for r in requests]}).encode() + b"\n")
        await stdin.drain()
        found = records(requests, await answer())
        os.killpg(process.pid, signal.SIGSTOP)
        return found

    try:
        about = (await answer())["about"]
        os.killpg(process.pid, signal.SIGSTOP)
        yield Side(name, about, turn)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGCONT)
        stdin.close()
        try:
            await asyncio.wait_for(process.wait(), 30)
        except TimeoutError:
            os.killpg(process.pid, signal.SIGKILL)
            await process.wait()


def records(requests: Sequence[Request], answer: dict[str, Any]) -> list[Record]:
    """A worker's answer as the load generator's own records. A request with too few or too many tokens has failed."""
    found = []
    for request, sent, arrivals in zip(requests, answer["sent"], answer["arrivals"], strict=True):
        record = Record(len(request.ids), sent, [(at, count) for at, count in arrivals])
        record.ended_at = arrivals[-1][0] if arrivals else sent
        if record.num_tokens != request.n_out:
            record.error = f"{record.num_tokens} tokens instead of {request.n_out}"
        found.append(record)
    return found
