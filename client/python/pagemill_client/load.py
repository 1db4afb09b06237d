"""The load a bench run makes: which requests, when, and what became of each."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pagemill_client.aio import AsyncClient
from pagemill_client.errors import PagemillError
from pagemill_client.options import GenerateOptions
from pagemill_client.types import Delta, Finished


class WorkloadError(ValueError):
    """A workload file does not hold; the text is one line for the user."""


@dataclass(frozen=True, slots=True)
class Request:
    """`ids` to continue by exactly `n_out` tokens; `at`: seconds after the start, None for a closed loop."""

    ids: tuple[int, ...]
    n_out: int
    at: float | None = None


@dataclass(slots=True)
class Record:
    """What one request met. `sent_at`: when it was due (open loop) or sent. `arrivals`: (time, tokens) per delta.

    `error` is the reason of a request that failed, None for one that finished.
    """

    num_prompt_tokens: int
    sent_at: float = 0.0
    arrivals: list[tuple[float, int]] = field(default_factory=list)
    ended_at: float = 0.0
    error: str | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens received."""
        return sum(n for _, n in self.arrivals)


def read_workload(path: Path) -> list[Request]:
    """Requests of a JSON file. Raises WorkloadError, OSError."""
    try:
        items: Any = json.loads(path.read_bytes())
        return [
            Request(tuple(map(int, r["ids"])), int(r["n_out"]), None if r.get("at") is None else float(r["at"]))
            for r in items
        ]
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        expected = 'expected a list of {"ids": [...], "n_out": N, "at": seconds (optional)}'
        raise WorkloadError(f"{path}: {expected}") from error


def random_requests(
    num: int, prompt_tokens: tuple[int, int], output_tokens: tuple[int, int], vocab_size: int, rng: random.Random
) -> list[Request]:
    """Requests with uniform lengths and uniform token ids."""
    return [
        Request(
            tuple(rng.randrange(vocab_size) for _ in range(rng.randint(*prompt_tokens))), rng.randint(*output_tokens)
        )
        for _ in range(num)
    ]


def poisson(requests: Sequence[Request], rate: float, rng: random.Random) -> list[Request]:
    """The same requests with Poisson arrivals of `rate` per second, the first at 0."""
    at, timed = 0.0, []
    for request in requests:
        timed.append(Request(request.ids, request.n_out, at))
        at += rng.expovariate(rate)
    return timed


async def closed_loop(
    clients: Sequence[AsyncClient], requests: Sequence[Request], concurrency: int, model: str
) -> list[Record]:
    """Run the requests in order, `concurrency` at a time; each follows as soon as another has ended."""
    records = [Record(len(request.ids)) for request in requests]
    waiting = iter(zip(requests, records, strict=True))

    async def worker(client: AsyncClient) -> None:
        for request, record in waiting:
            await _one(client, request, record, model)

    num_workers = min(concurrency, len(requests))
    await asyncio.gather(*(worker(clients[i % len(clients)]) for i in range(num_workers)))
    return records


async def open_loop(clients: Sequence[AsyncClient], requests: Sequence[Request], model: str) -> list[Record]:
    """Start each request when it is due, whatever the others do; its latency counts from then."""
    records = [Record(len(request.ids)) for request in requests]
    start = time.perf_counter() + 0.05

    async def timed(client: AsyncClient, request: Request, record: Record) -> None:
        due = start + (request.at or 0.0)
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        await _one(client, request, record, model, due=due)

    rows = zip(requests, records, strict=True)
    await asyncio.gather(*(timed(clients[i % len(clients)], *row) for i, row in enumerate(rows)))
    return records


async def _one(client: AsyncClient, request: Request, record: Record, model: str, *, due: float | None = None) -> None:
    # Ids only and no end-of-sequence: the amount of work is the same in every run and for every server.
    options: GenerateOptions = {
        "model": model, "temperature": 0.0, "max_tokens": request.n_out, "ignore_eos": True, "return_text": False,
    }  # fmt: skip
    now = time.perf_counter
    record.sent_at = now() if due is None else due
    try:
        async with client.generate(request.ids, **options) as stream:
            async for event in stream:
                if isinstance(event, Delta) and event.token_ids:
                    record.arrivals.append((now(), len(event.token_ids)))
                elif isinstance(event, Finished) and event.usage.completion_tokens != request.n_out:
                    record.error = f"ENDED_EARLY_{event.reason.name}"
    except PagemillError as error:
        record.error = error.reason or error.status
    record.ended_at = now()
