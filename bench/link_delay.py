"""What a longer wire between scheduler and executor costs: W2 with and without a delay, in one running service.

    python -m bench.link_delay --delay-ms 5 --pairs 8 --output link.json

One service with `delay_proxy` on the executor's link; between turns only the proxy's delay changes. Two turns make a
pair, and the order within a pair alternates (A B, B A, …), so that a machine that slows down or speeds up during the
run touches both alike. The prompts of the two turns have equal lengths and differ in their text.

Two answers. The ratio of tokens per second, delayed ÷ direct, median over the pairs, holds whatever else the machine
did. The share of a turn in which the executor executed nothing is the part that a link can cost: the executor's own
clock gives the rest, which neighbours of the machine change by more than any delay.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import socket
import statistics
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

from bench import machine, workloads
from bench.stack import Link, serving_through_a_proxy
from bench.w2 import Turn, all_at_once
from pagemill.model_files import find_demo_model
from pagemill_client.aio import AsyncClient
from pagemill_client.load import Request


async def main() -> None:
    args = _arguments()
    model = args.model or find_demo_model()
    repetitions = workloads.make("W2", workloads.corpus(model))
    pairs: list[dict[str, Turn]] = []
    port = _free_port()
    async with (
        serving_through_a_proxy(str(model), args.serve_option, executor_metrics_port=port) as (target, link),
        AsyncClient(target) as client,
    ):
        await all_at_once(client, repetitions[-1][:8])
        for number in range(args.pairs):
            order = (0.0, args.delay_ms) if number % 2 == 0 else (args.delay_ms, 0.0)
            pair = {}
            for half, delay_ms in enumerate(order):
                requests = repetitions[(2 * number + half) % len(repetitions)]
                pair["delayed" if delay_ms else "direct"] = await _turn(client, link, port, delay_ms, requests)
            pairs.append(pair)
            print(f"pair {number + 1}: {_tokens(pair, 'direct'):.1f} direct, ratio {_ratio(pair):.3f}", file=sys.stderr)
    result = _result(args, pairs)
    print(f"median ratio of {len(pairs)} pairs: {result['ratio']:.3f}, each: {result['ratios']}")
    for which, share in result["idle_share"].items():
        print(f"{which}: the executor executed nothing for {share:.2%} of a turn (median)")
    if args.output:
        args.output.write_text(json.dumps(result, indent=1) + "\n")


async def _turn(client: AsyncClient, link: Link, port: int, delay_ms: float, requests: list[Request]) -> Turn:
    await link.set_delay_ms(delay_ms)
    meter = machine.CpuMeter()
    before, started = _execute_s(port), time.monotonic()
    turn = await all_at_once(client, requests)
    wall_s = time.monotonic() - started
    return {
        **turn,
        "idle_share": max(0.0, 1 - (_execute_s(port) - before) / wall_s),
        "own_cpu_s": round(meter.own_s(), 2),
        "other_cpus": round(meter.others_cpus(), 3),
    }


def _execute_s(port: int) -> float:
    """Seconds that the executor has spent in steps since it started."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as page:
        for line in page.read().decode().splitlines():
            if line.startswith('pagemill_step_seconds_sum{phase="execute"}'):
                return float(line.rpartition(" ")[2])
    raise RuntimeError("the executor's page has no pagemill_step_seconds")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _tokens(pair: dict[str, Turn], which: str) -> float:
    return float(pair[which]["tokens_per_s"])


def _ratio(pair: dict[str, Turn]) -> float:
    return _tokens(pair, "delayed") / _tokens(pair, "direct")


def _result(args: argparse.Namespace, pairs: list[dict[str, Turn]]) -> dict[str, Any]:
    return {
        "options": {key: str(value) for key, value in vars(args).items()},
        "machine": machine.describe(),
        "pairs": pairs,
        "ratios": [round(_ratio(pair), 3) for pair in pairs],
        "ratio": statistics.median(map(_ratio, pairs)),
        "idle_share": {
            which: statistics.median(pair[which]["idle_share"] for pair in pairs) for which in ("direct", "delayed")
        },
    }


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="directory or GGUF file; default: the demo model")
    parser.add_argument("--delay-ms", type=float, default=5.0, help="added to every frame, in each direction")
    parser.add_argument("--pairs", type=int, default=8, help="turns of each kind")
    parser.add_argument("--serve-option", action="append", default=[], help="for pagemill serve: --NAME=VALUE")
    parser.add_argument("--output", type=Path, help="JSON file for the result")
    return parser.parse_args()


if __name__ == "__main__":
    asyncio.run(main())
