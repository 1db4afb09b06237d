"""`pagemill bench`: loads a running service and reports what its clients saw."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import time
from collections.abc import Iterator
from importlib import metadata
from typing import Any

from pagemill.settings import load
from pagemill_client.aio import AsyncClient
from pagemill_client.config import BenchSettings, LoadSettings, parse_range
from pagemill_client.errors import PagemillError
from pagemill_client.generate import describe
from pagemill_client.load import (
    Request,
    WorkloadError,
    closed_loop,
    open_loop,
    poisson,
    random_requests,
    read_workload,
)
from pagemill_client.report import Report, Slo, summarize, table
from pagemill_client.terminal import err, out
from pagemill_client.types import ModelInfo


def main(argv: list[str]) -> int:
    """Run `pagemill bench`. Exit status 1 when the service cannot be asked or every request failed."""
    settings = load(BenchSettings, argv)
    try:
        model, reports = asyncio.run(_bench(settings))
        document = _document(settings, model, reports)
        if settings.output is not None:
            settings.output.write_text(document + "\n")
    except (PagemillError, WorkloadError, OSError, ValueError) as error:
        err(f"{settings.prog}: {describe(error, settings.target)}")
        return 1
    out(document if settings.format == "json" else table(reports))
    return 0 if any(report.num_finished for report in reports.values()) else 1


async def _bench(settings: BenchSettings) -> tuple[ModelInfo, dict[str, Report]]:
    """What was loaded, and one report per run by its name."""
    slo = Slo(settings.slo_ttft_ms / 1e3, settings.slo_itl_ms / 1e3)
    async with contextlib.AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(_client(settings)) for _ in range(settings.connections)]
        model = await clients[0].get_model(settings.model_name)
        rng = random.Random(settings.seed)  # noqa: S311 (a load that can be repeated, no secret)
        await closed_loop(clients, warmup_of(settings, model, rng), settings.concurrency, model.name)
        reports: dict[str, Report] = {}
        for repetition in range(1, settings.repeat + 1):
            suffix = f" #{repetition}" if settings.repeat > 1 else ""
            for name, requests in _plans(settings, model, rng):
                if requests[0].at is None:
                    records = await closed_loop(clients, requests, settings.concurrency, model.name)
                else:
                    records = await open_loop(clients, requests, model.name)
                reports[name + suffix] = summarize(records, slo)
        return model, reports


def _client(settings: BenchSettings) -> AsyncClient:
    return AsyncClient(settings.target, tls=settings.tls, insecure=settings.insecure, timeout_s=settings.timeout_s)


def _plans(settings: BenchSettings, model: ModelInfo, rng: random.Random) -> Iterator[tuple[str, list[Request]]]:
    """Name and requests of each run; requests without arrival times are for a closed loop."""
    if settings.rate:
        for rate in settings.rate:
            yield f"{rate:g}/s", poisson(_checked(settings, model, rng), rate, rng)
    elif settings.use_arrivals:
        yield "arrivals of the file", _checked(settings, model, rng)
    else:
        requests = [Request(request.ids, request.n_out) for request in _checked(settings, model, rng)]
        yield f"{settings.concurrency} at once", requests


def _checked(settings: BenchSettings, model: ModelInfo, rng: random.Random) -> list[Request]:
    if any(rate <= 0 for rate in settings.rate):
        raise WorkloadError("--rate: expected arrivals per second above 0")
    if settings.use_arrivals and settings.workload is None:
        raise WorkloadError("--use-arrivals needs a --workload file")
    requests = requests_of(settings, model, rng)
    if settings.use_arrivals and any(request.at is None for request in requests):
        raise WorkloadError(f'{settings.workload}: --use-arrivals needs "at" in every request')
    return requests


def requests_of(settings: LoadSettings, model: ModelInfo, rng: random.Random) -> list[Request]:
    """The requests of the workload file, or random ones. Raises WorkloadError, OSError."""
    if settings.workload is None:
        lengths = parse_range(settings.prompt_tokens), parse_range(settings.output_tokens)
        return random_requests(settings.num_requests, *lengths, model.vocab_size, rng)
    requests = read_workload(settings.workload)
    if not requests:
        raise WorkloadError(f"{settings.workload}: no requests")
    return requests


def warmup_of(settings: LoadSettings, model: ModelInfo, rng: random.Random) -> list[Request]:
    """Requests that no measured one shares a prefix with."""
    return random_requests(settings.warmup, (64, 64), (8, 8), model.vocab_size, rng)


def _document(settings: BenchSettings, model: ModelInfo, reports: dict[str, Report]) -> str:
    chosen: dict[str, Any] = settings.model_dump(mode="json", exclude={"config", "format", "output"})
    return json.dumps(
        {
            "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "pagemill": metadata.version("pagemill"),
            "model": {"name": model.name, "fingerprint": model.fingerprint},
            "settings": chosen,
            "runs": {name: report.as_dict() for name, report in reports.items()},
        },
        indent=1,
    )
