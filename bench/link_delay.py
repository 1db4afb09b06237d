"""What a longer wire between scheduler and executor costs: W2 with and without a delay, in one running service.

    python -m bench.link_delay --delay-ms 5 --rounds 6 --output link.json

One service with `delay_proxy` on the executor's link; between turns only what the proxy does changes. A round has a
turn of each kind, and the order of the kinds rotates from round to round, so that a machine that slows down or speeds
up during the run touches all alike. The prompts of all turns have equal lengths and differ in their text.

direct   frames pass at once
echo     frames pass at once, and the proxy wakes after the delay to do nothing: on a machine whose CPUs are all busy,
         each wake-up of another process costs the executor time, which a longer wire would not do
delayed  frames are held for the delay

Three answers: the ratios of tokens per second, delayed ÷ direct and delayed ÷ echo, as medians over the rounds; and the
share of a turn in which the executor executed nothing, by its own clock, which is all that a link can cost.
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
from bench.stack import serving_through_a_proxy
from bench.w2 import Turn, all_at_once
from pagemill.model_files import find_demo_model
from pagemill_client.aio import AsyncClient
from pagemill_client.load import Request

KINDS = ("direct", "echo", "delayed")


async def main() -> None:
    args = _arguments()
    model = args.model or find_demo_model()
    repetitions = workloads.make("W2", workloads.corpus(model))
    rounds: list[dict[str, Turn]] = []
    port = free_port()
    options = ["--no-prefix-cache", *args.serve_option]
    async with (
        serving_through_a_proxy(str(model), options, executor_metrics_port=port) as (target, link),
        AsyncClient(target) as client,
    ):
        await all_at_once(client, repetitions[-1][:8])
        for number in range(args.rounds):
            turns: dict[str, Turn] = {}
            for place in range(len(KINDS)):
                kind = KINDS[(number + place) % len(KINDS)]
                requests = repetitions[(len(KINDS) * number + place) % len(repetitions)]
                await link.set_delay_ms(
                    args.delay_ms if kind == "delayed" else 0.0, echo_ms=args.delay_ms if kind == "echo" else 0.0
                )
                turns[kind] = await _turn(client, port, requests)
            rounds.append(turns)
            speeds = ", ".join(f"{kind} {turns[kind]['tokens_per_s']:.1f}" for kind in KINDS)
            print(f"round {number + 1}: {speeds} tokens/s", file=sys.stderr)
    result = _result(args, rounds)
    for base, ratios in result["ratios"].items():
        print(f"delayed / {base}: median {result['ratio'][base]:.3f} of {ratios}")
    for kind, share in result["idle_share"].items():
        print(f"{kind}: the executor executed nothing for {share:.2%} of a turn (median)")
    if args.output:
        args.output.write_text(json.dumps(result, indent=1) + "\n")


async def _turn(client: AsyncClient, port: int, requests: list[Request]) -> Turn:
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


def free_port() -> int:
    """A TCP port on loopback that nothing listened on a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _result(args: argparse.Namespace, rounds: list[dict[str, Turn]]) -> dict[str, Any]:
    ratios = {
        base: [round(turns["delayed"]["tokens_per_s"] / turns[base]["tokens_per_s"], 3) for turns in rounds]
        for base in ("direct", "echo")
    }
    return {
        "options": {key: str(value) for key, value in vars(args).items() if key not in ("model", "output")},
        "machine": machine.describe(),
        "rounds": rounds,
        "ratios": ratios,
        "ratio": {base: statistics.median(values) for base, values in ratios.items()},
        "idle_share": {kind: statistics.median(turns[kind]["idle_share"] for turns in rounds) for kind in KINDS},
    }


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="directory or GGUF file; default: the demo model")
    parser.add_argument("--delay-ms", type=float, default=5.0, help="added to every frame, in each direction")
    parser.add_argument("--rounds", type=int, default=6, help="turns of each kind")
    parser.add_argument("--serve-option", action="append", default=[], help="for pagemill serve: --NAME=VALUE")
    parser.add_argument("--output", type=Path, help="JSON file for the result")
    return parser.parse_args()


if __name__ == "__main__":
    asyncio.run(main())
