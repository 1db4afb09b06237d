"""W4 through the whole service: 32 requests that share 1,024 tokens, all at once, none of it cached before.

    python -m bench.w4

A turn is one repetition of W4 over gRPC, sent at one time; each has a prefix of its own, so the cache is cold every
time (`cached_tokens` of the first request says so). `prefilled_tokens` is what was left to compute: all prompt tokens
less those that the requests report as cached. 1,024 + 32 x 32 is the least, 33,792 is what computing each prompt alone
takes. A turn may be repeated warm with --warm: the same requests again.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench import machine, workloads
from bench.stack import serving
from pagemill.model_files import find_demo_model
from pagemill_client.aio import AsyncClient
from pagemill_client.load import Request
from pagemill_client.options import GenerateOptions

Turn = dict[str, Any]


async def main() -> None:
    args = _arguments()
    model = args.model or find_demo_model()
    ids = workloads.corpus(model)
    repetitions = workloads.make("W4", ids)
    turns: list[Turn] = []
    async with (
        serving(str(model), [*args.serve_option, f"--executor.dtype={args.dtype}"]) as target,
        AsyncClient(target) as client,
    ):
        # Half the size of a turn and unlike all of them: the first batches of a process are slower.
        await _turn(client, [Request(r.ids[8:], r.n_out) for r in repetitions[-1]][::2])
        for number in range(args.turns):
            requests = repetitions[number % (len(repetitions) - 1)]
            for state in ("cold", "warm") if args.warm else ("cold",):
                meter = machine.CpuMeter()
                turn = await _turn(client, requests)
                turn |= {"cache": state, "own_cpu_s": round(meter.own_s(), 2)}
                turn["other_cpus"] = round(meter.others_cpus(), 3)
                turns.append(turn)
                print(json.dumps(turn), file=sys.stderr)
    cold = [turn["wall_s"] for turn in turns if turn["cache"] == "cold"]
    print(f"W4 cold: median {statistics.median(cold):.2f} s [{min(cold):.2f} to {max(cold):.2f}] of {len(cold)} turns")
    if (noise := max(turn["other_cpus"] for turn in turns)) > 0.1:
        print(f"other processes used up to {noise:.1f} CPUs meanwhile: repeat on a quiet machine")
    if args.output:
        result = {"options": {key: str(value) for key, value in vars(args).items()}, "turns": turns}
        result |= {"workload": workloads.digest(repetitions[0]), "machine": machine.describe()}
        args.output.write_text(json.dumps(result, indent=1) + "\n")


async def _turn(client: AsyncClient, requests: Sequence[Request]) -> Turn:
    """Raises what the client raises if one request fails, and RuntimeError if one stops early."""

    def options(request: Request) -> GenerateOptions:
        return {"max_tokens": request.n_out, "temperature": 0.0, "ignore_eos": True, "return_text": False}

    started = time.perf_counter()
    streams = [client.generate(request.ids, **options(request)) for request in requests]
    generations = await asyncio.gather(*(stream.collect() for stream in streams))
    wall_s = time.perf_counter() - started
    done = [end for generation in generations if (end := generation.outputs[0].finished)]
    generated = sum(end.usage.completion_tokens for end in done)
    if generated != sum(request.n_out for request in requests):
        raise RuntimeError(f"{generated} tokens instead of {sum(request.n_out for request in requests)}")
    cached = [end.usage.cached_tokens for end in done]
    prompts = sum(len(r.ids) for r in requests)
    return {
        "wall_s": round(wall_s, 3),
        "prompt_tokens": prompts,
        "prefilled_tokens": prompts - sum(cached),
        "cached_tokens_least": min(cached),
        "generated_tokens": generated,
        "preemptions": sum(end.bill.num_preemptions for end in done),
    }


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="directory or GGUF file; default: the demo model")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--turns", type=int, default=5, help="repetitions of W4")
    parser.add_argument("--warm", action="store_true", help="each repetition twice, the second time with a warm cache")
    parser.add_argument("--serve-option", action="append", default=[], help="for pagemill serve: --NAME=VALUE")
    parser.add_argument("--output", type=Path, help="JSON file for the result")
    return parser.parse_args()


if __name__ == "__main__":
    asyncio.run(main())
