"""Times single steps of the model runner: decode rows at some contexts, and prompts, by type of weights and backend.

    python -m bench.bench_steps                                              # what auto chooses
    python -m bench.bench_steps --variant bfloat16/native --variant float32/sdpa
    python -m bench.bench_steps --variant auto/auto --variant auto/auto/int8 --variant auto/auto/gguf

Variants take turns shape by shape; milliseconds, median [least] of --rounds steps. A step ends with the logits.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

import torch

from bench import machine
from executor_svc.batch import Batch
from executor_svc.runner import PagedRunner, load
from pagemill.model_files import find_demo_model

BLOCK_SIZE = 16


def decode(num_rows: int, context: int, shared: int = 0) -> Batch:
    """Rows with `context` positions before their one new token; the first `shared` are the same blocks for all."""
    width = context // BLOCK_SIZE + 1
    tables = torch.arange(num_rows * width, dtype=torch.int32).view(num_rows, width).clone()
    tables[:, : shared // BLOCK_SIZE] = tables[0, : shared // BLOCK_SIZE]
    slots = tables[:, -1].long() * BLOCK_SIZE + context % BLOCK_SIZE
    ids = torch.zeros(num_rows, dtype=torch.int64)
    lens = [context + 1] * num_rows
    return Batch(ids, torch.full((num_rows,), context), slots, [1] * num_rows, lens, tables, list(range(num_rows)))


def prompt(length: int) -> Batch:
    positions = torch.arange(length)
    table = torch.arange(-(-length // BLOCK_SIZE), dtype=torch.int32)[None]
    return Batch(torch.zeros_like(positions), positions, positions, [length], [length], table, [0])


SHAPES = {
    "1 row at 128": decode(1, 128),
    "1 row at 4,096": decode(1, 4096),
    "16 rows at 256": decode(16, 256),
    "64 rows at 256": decode(64, 256),
    "32 rows at 1,056, 1,024 shared": decode(32, 1056, 1024),
    "prompt of 256": prompt(256),
    "prompt of 2,048": prompt(2048),
}


def step_s(runner: PagedRunner, batch: Batch) -> float:
    started = time.perf_counter()
    runner.forward(batch)
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="directory or GGUF file; default: the demo model")
    parser.add_argument("--variant", action="append", help="DTYPE/BACKEND[/WEIGHT DTYPE], each may be auto")
    parser.add_argument("--shape", action="append", choices=list(SHAPES), help="default: all")
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    runners: dict[str, PagedRunner] = {}
    for variant in args.variant or ["auto/auto"]:
        dtype, attention, weight_dtype = (*variant.split("/"), "auto")[:3]
        runner = load(
            args.model or find_demo_model(),
            dtype=dtype,
            weight_dtype=weight_dtype,
            attention=attention,
            block_size=BLOCK_SIZE,
        )
        runner.allocate_kv(max(int(batch.block_tables.max()) for batch in SHAPES.values()) + 1)
        runners[f"{runner.dtype_name}/{runner.attention_name}"] = runner
        print(f"{list(runners)[-1]}: weights {runner.weight_bytes / (1 << 20):.1f} MiB")
    for name, batch in SHAPES.items():
        if args.shape and name not in args.shape:
            continue
        seconds: dict[str, list[float]] = {variant: [] for variant in runners}
        for number in range(args.rounds + 1):
            for variant, runner in runners.items():
                took = step_s(runner, batch)
                if number:  # the first is a warm-up
                    seconds[variant].append(took)
        for variant, times in seconds.items():
            print(f"{name}, {variant}: {statistics.median(times) * 1e3:.1f} [{min(times) * 1e3:.1f}] ms")
    print(json.dumps(machine.describe()))


if __name__ == "__main__":
    main()
