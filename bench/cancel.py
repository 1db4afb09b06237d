"""Time from cancelling many requests to all their blocks being free, under mixed load: the worst of several rounds.

    python -m bench.cancel --rounds 20 --streams 48 --output cancel.json

Each round begins `--streams` requests at once, a third of them long prompts, none with a prefix of another;
each is cancelled at a random moment of the next `--spread-s` seconds. Two times are taken by reading the scheduler's
metrics: from the last cancel to no running and no waiting request, and to no used block on the device. Until then the
others prefill and decode, and this client computes on the same cores.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import statistics
import time
import urllib.request
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from bench import machine
from bench.link_delay import free_port
from bench.stack import serving
from pagemill_client.aio import AsyncClient
from pagemill_client.types import Delta

LENGTHS = (8, 64, 192, 512, 1024, 1500)
"""Prompt tokens; a request's length is one of them."""
VOCABULARY = 40_000
"""Ids below this are ordinary tokens of every model that these benches use."""
LIMIT_S = 60.0
POLL_S = 0.01


def load_of(port: int) -> tuple[int, int]:
    """Live requests of the scheduler, and used blocks on the device."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=LIMIT_S) as page:
        families = {family.name: family for family in text_string_to_metric_families(page.read().decode())}
    live = sum(
        sample.value
        for name in ("pagemill_running_requests", "pagemill_queue_requests", "pagemill_swapped_requests")
        for sample in families[name].samples
    )
    used = sum(
        sample.value
        for sample in families["pagemill_kv_blocks"].samples
        if sample.labels["tier"] == "device" and sample.labels["state"] in ("used", "in_flight")
    )
    return int(live), int(used)


async def one_round(
    client: AsyncClient, port: int, rng: random.Random, streams: int, spread_s: float
) -> dict[str, Any]:
    """One round; its figures."""
    tokens = 0

    async def one(length: int, until: float) -> None:
        nonlocal tokens
        ids = [rng.randrange(VOCABULARY) for _ in range(length)]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(until), client.generate(ids, max_tokens=512, ignore_eos=True) as stream:
                async for event in stream:
                    tokens += len(event.token_ids) if isinstance(event, Delta) else 0

    now = asyncio.get_running_loop().time()
    lengths = [LENGTHS[index % len(LENGTHS)] for index in range(streams)]
    await asyncio.gather(*(one(length, now + rng.uniform(0.05, spread_s)) for length in lengths))
    last = time.perf_counter()
    no_live_s = None
    while True:
        live, used = await asyncio.to_thread(load_of, port)
        taken = time.perf_counter() - last
        if no_live_s is None and not live:
            no_live_s = taken
        if no_live_s is not None and not used:
            return {"no_live_s": no_live_s, "no_blocks_s": taken, "tokens": tokens}
        if taken > LIMIT_S:
            raise RuntimeError(f"{live} requests and {used} blocks are left {LIMIT_S} s after the last cancel")
        await asyncio.sleep(POLL_S)


async def measure(model: str, rounds: int, streams: int, spread_s: float) -> dict[str, Any]:
    """All rounds on one service."""
    port, rng = free_port(), random.Random(1)
    async with serving(model, [f"--scheduler.metrics-port={port}"]) as target, AsyncClient(target) as client:
        await client.generate(list(range(100, 612)), max_tokens=8).collect()  # warm
        meter = machine.CpuMeter()
        results = [await one_round(client, port, rng, streams, spread_s) for _ in range(rounds)]
    times = sorted(result["no_blocks_s"] for result in results)
    return {
        "machine": machine.describe(),
        "others_cpus": meter.others_cpus(),
        "streams": streams,
        "rounds": results,
        "median_s": statistics.median(times),
        "worst_s": times[-1],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="time from cancelling to free blocks")
    parser.add_argument("--model", default="demo", help="directory, GGUF file or demo")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--streams", type=int, default=48)
    parser.add_argument("--spread-s", type=float, default=4.0, help="the last cancel is at most this after the start")
    parser.add_argument("--output", type=Path, help="write the figures here")
    args = parser.parse_args()
    result = asyncio.run(measure(args.model, args.rounds, args.streams, args.spread_s))
    print(
        f"blocks free after the last cancel: {result['median_s']:.2f} s (median), {result['worst_s']:.2f} s (worst of "
        f"{args.rounds}); others used {result['others_cpus']:.2f} CPUs"
    )
    if args.output:
        args.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
