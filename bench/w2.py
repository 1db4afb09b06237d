"""W2 side by side in one invocation: Pagemill's whole service against transformers one by one, turns alternating.

    python -m bench.w2 --output w2.json

A turn of Pagemill is all 64 requests of W2 at once over gRPC. A turn of transformers is every 8th of them (--every): it
would otherwise take minutes; tokens per second are compared. Each turn has prompts of its own, the same for both.
Both models stay loaded; the one whose turn it is not is idle. The ratio is that of the medians.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from bench import machine, workloads
from bench.stack import serving
from pagemill.model_files import find_demo_model
from pagemill_client.aio import AsyncClient
from pagemill_client.load import Request, closed_loop
from pagemill_client.report import Slo, summarize

Turn = dict[str, Any]
Side = Callable[[Sequence[Request]], Awaitable[Turn]]
SLO = Slo(ttft_s=1.0, itl_s=0.05)


async def main() -> None:
    args = _arguments()
    model = args.model or find_demo_model()
    ids = workloads.corpus(model)
    repetitions = workloads.make("W2", ids)
    warmup = workloads.make("W1", ids)[0]
    async with contextlib.AsyncExitStack() as exits:
        options = [*args.serve_option, f"--executor.dtype={args.dtype}"]
        pagemill = await exits.enter_async_context(_pagemill(str(model), options))
        baseline = await exits.enter_async_context(_transformers(model, args.dtype, args.every))
        sides = {f"transformers, every {args.every}th request": baseline, "pagemill": pagemill}
        for side in sides.values():
            await side(warmup)
        turns = await _alternate(sides, repetitions, args.turns)
    result = _result(args, sides, turns, repetitions[0])
    _print(result)
    if args.output:
        args.output.write_text(json.dumps(result, indent=1) + "\n")


async def _alternate(
    sides: dict[str, Side], repetitions: Sequence[Sequence[Request]], num_turns: int
) -> dict[str, list[Turn]]:
    turns: dict[str, list[Turn]] = {name: [] for name in sides}
    for number in range(num_turns):
        for name, side in sides.items():
            meter = machine.CpuMeter()
            turn = await side(repetitions[number % len(repetitions)])
            turn["own_cpu_s"], turn["other_cpus"] = round(meter.own_s(), 2), round(meter.others_cpus(), 3)
            turns[name].append(turn)
            print(f"turn {number + 1}, {name}: {turn['tokens_per_s']:.1f} tokens/s", file=sys.stderr)
    return turns


def _result(
    args: argparse.Namespace, sides: dict[str, Side], turns: dict[str, list[Turn]], first: Sequence[Request]
) -> dict[str, Any]:
    base, ours = (statistics.median(turn["tokens_per_s"] for turn in turns[name]) for name in sides)
    return {
        "workload": {"name": "W2", "requests": len(first), "digest": workloads.digest(first)},
        "options": {key: str(value) for key, value in vars(args).items() if key not in ("model", "output")},
        "machine": machine.describe(),
        "turns": turns,
        "median_tokens_per_s": dict(zip(sides, (base, ours), strict=True)),
        "ratio": ours / base,
    }


def _print(result: dict[str, Any]) -> None:
    for name, value in result["median_tokens_per_s"].items():
        print(f"{name}: median {value:.1f} tokens/s")
    print(f"ratio: {result['ratio']:.3f}")
    noise = max(turn["other_cpus"] for turns in result["turns"].values() for turn in turns)
    if noise > 0.1:
        print(f"other processes used up to {noise:.1f} CPUs meanwhile: repeat on a quiet machine")


@contextlib.asynccontextmanager
async def _pagemill(model: str, options: Sequence[str]) -> AsyncIterator[Side]:
    async with serving(model, options) as target, AsyncClient(target) as client:
        yield lambda requests: all_at_once(client, requests)


async def all_at_once(client: AsyncClient, requests: Sequence[Request]) -> Turn:
    """Send every request now and wait for all. Raises RuntimeError if one fails."""
    report = summarize(await closed_loop([client], requests, len(requests), ""), SLO)
    if report.errors:
        raise RuntimeError(f"requests failed: {report.errors}")
    return {"tokens_per_s": report.generated_tokens_per_s, **report.as_dict()}


@contextlib.asynccontextmanager
async def _transformers(model: Path, dtype: str, every: int) -> AsyncIterator[Side]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "bench.hf_sequential", str(model), "--dtype", dtype),
        *("--threads", str(len(os.sched_getaffinity(0)))),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        limit=2**20,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    stdin, stdout = process.stdin, process.stdout
    if not await stdout.readline():
        raise RuntimeError(f"transformers did not load {model}; it said why above")

    async def turn(requests: Sequence[Request]) -> Turn:
        chosen = requests[::every]
        stdin.write(json.dumps({"requests": [[r.ids, r.n_out] for r in chosen]}).encode() + b"\n")
        await stdin.drain()
        answer: Turn = json.loads(await stdout.readline())
        if answer["tokens"] != sum(r.n_out for r in chosen):
            raise RuntimeError(f"{answer['tokens']} tokens instead of {sum(r.n_out for r in chosen)}")
        return {"tokens_per_s": answer["tokens"] / answer["seconds"], "num_requests": len(chosen), **answer}

    try:
        yield turn
    finally:
        stdin.close()
        await process.wait()


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="directory or GGUF file; default: the demo model")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"], help="for both sides")
    parser.add_argument("--turns", type=int, default=3, help="turns of each side")
    parser.add_argument("--every", type=int, default=8, help="transformers runs every Nth request of W2")
    parser.add_argument("--serve-option", action="append", default=[], help="for pagemill serve: --NAME=VALUE")
    parser.add_argument("--output", type=Path, help="JSON file for the result")
    return parser.parse_args()


if __name__ == "__main__":
    asyncio.run(main())
