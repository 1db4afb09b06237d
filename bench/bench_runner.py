"""Times the model runner alone: 64 sequences at once, prompts of 32 to 512 and outputs of 32 to 128 tokens.

A simple scheduler in this file (decode rows first, then chunks of prompts within a token budget) stands in for the real
one, so that what is measured is the model, the attention and the KV pool. Prompts are random ids: speed does not depend
on what they say. Judge by user CPU seconds when the machine is not idle.

    python bench/bench_runner.py                 # bfloat16, the demo model
    python bench/bench_runner.py --profile       # and which operators the time goes to
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import resource
import time
from dataclasses import dataclass, field

import torch

from executor_svc.batch import Batch
from executor_svc.runner import PagedRunner, load
from pagemill.model_files import find_demo_model


@dataclass
class Sequence:
    token_ids: list[int]
    num_outputs: int
    blocks: list[int]
    prompt_len: int
    computed: int = 0

    @property
    def done(self) -> bool:
        return len(self.token_ids) == self.prompt_len + self.num_outputs


@dataclass
class Totals:
    steps: int = 0
    decode_s: float = 0.0
    mixed_s: float = 0.0
    decode_steps: int = 0
    step_tokens: list[int] = field(default_factory=list)


def make_sequences(runner: PagedRunner) -> list[Sequence]:
    lens_rng, ids_rng = random.Random(0), random.Random(100)
    lens = [(lens_rng.randint(32, 512), lens_rng.randint(32, 128)) for _ in range(64)]
    blocks_rng = random.Random(7)
    needed = [-(-(prompt + out) // runner.block_size) for prompt, out in lens]
    free = list(range(sum(needed)))
    blocks_rng.shuffle(free)  # scattered tables, as after an hour of serving
    runner.allocate_kv(len(free))
    sequences = []
    for (prompt, out), count in zip(lens, needed, strict=True):
        ids = [ids_rng.randrange(runner.vocab_size) for _ in range(prompt)]
        sequences.append(Sequence(ids, out, [free.pop() for _ in range(count)], prompt))
    return sequences


def plan(sequences: list[Sequence], budget: int, chunk: int) -> list[tuple[Sequence, int]]:
    rows = [(s, 1) for s in sequences if not s.done and len(s.token_ids) - s.computed == 1]
    left = budget - len(rows)
    for s in sequences:
        missing = len(s.token_ids) - s.computed
        if s.done or missing <= 1 or left <= 0:
            continue
        take = min(missing, chunk, left)
        rows.append((s, take))
        left -= take
    return rows


def make_batch(rows: list[tuple[Sequence, int]], block_size: int) -> Batch:
    ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    for s, n in rows:
        span = range(s.computed, s.computed + n)
        ids += s.token_ids[s.computed : s.computed + n]
        positions += span
        slots += [s.blocks[p // block_size] * block_size + p % block_size for p in span]
    lens = [s.computed + n for s, n in rows]
    width = max(-(-n // block_size) for n in lens)
    tables = torch.zeros(len(rows), width, dtype=torch.int32)
    for i, (s, _) in enumerate(rows):
        used = s.blocks[:width]
        tables[i, : len(used)] = torch.tensor(used, dtype=torch.int32)
    sample = [i for i, (s, n) in enumerate(rows) if s.computed + n == len(s.token_ids)]
    return Batch(
        torch.tensor(ids), torch.tensor(positions), torch.tensor(slots), [n for _, n in rows], lens, tables, sample
    )


def run(runner: PagedRunner, sequences: list[Sequence], budget: int, chunk: int) -> Totals:
    totals = Totals()
    while rows := plan(sequences, budget, chunk):
        began = time.perf_counter()
        batch = make_batch(rows, runner.block_size)
        tokens = runner.forward(batch).argmax(-1).tolist()
        for s, n in rows:
            s.computed += n
        for row, token in zip(batch.sample_rows, tokens, strict=True):
            rows[row][0].token_ids.append(token)
        took = time.perf_counter() - began
        totals.steps += 1
        totals.step_tokens.append(batch.token_ids.numel())
        if len(rows) == batch.token_ids.numel():
            totals.decode_steps += 1
            totals.decode_s += took
        else:
            totals.mixed_s += took
    return totals


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=None, help="directory or GGUF file (default: the demo model)")
    parser.add_argument("--dtype", default="auto", help="auto, bfloat16 or float32")
    parser.add_argument("--kv-dtype", default="auto", help="auto, int8, bfloat16 or float32")
    parser.add_argument("--block-size", type=int, default=16, help="positions per block")
    parser.add_argument("--budget", type=int, default=512, help="tokens per step")
    parser.add_argument("--chunk", type=int, default=256, help="prompt tokens of one sequence per step")
    parser.add_argument("--threads", type=int, default=None, help="threads (default: usable CPUs)")
    parser.add_argument("--profile", action="store_true", help="print where the time goes, by operator")
    args = parser.parse_args()
    began = time.perf_counter()
    runner = load(
        args.model or find_demo_model(),
        dtype=args.dtype,
        kv_dtype=args.kv_dtype,
        block_size=args.block_size,
        num_threads=args.threads,
    )
    load_s = time.perf_counter() - began
    run(runner, make_sequences(runner)[:4], args.budget, args.chunk)  # warm-up: oneDNN builds its kernels per shape
    sequences = make_sequences(runner)
    profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) if args.profile else None
    cpu, began = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    with profiler or contextlib.nullcontext():
        totals = run(runner, sequences, args.budget, args.chunk)
    wall = time.perf_counter() - began
    after = resource.getrusage(resource.RUSAGE_SELF)
    if profiler:
        print(profiler.key_averages().table(sort_by="self_cpu_time_total", row_limit=25, max_name_column_width=50))
    outputs = sum(s.num_outputs for s in sequences)
    print(
        json.dumps(
            {
                "wall_s": round(wall, 2),
                "user_cpu_s": round(after.ru_utime - cpu.ru_utime, 2),
                "system_cpu_s": round(after.ru_stime - cpu.ru_stime, 2),
                "output_tokens": outputs,
                "output_tokens_per_s": round(outputs / wall, 1),
                "prompt_tokens": sum(s.prompt_len for s in sequences),
                "steps": totals.steps,
                "mixed_s": round(totals.mixed_s, 2),
                "decode_steps": totals.decode_steps,
                "decode_s": round(totals.decode_s, 2),
                "load_s": round(load_s, 2),
                "peak_rss_mb": round(after.ru_maxrss / 1024),
                "kv_pool_mb": round(runner.num_blocks * runner.bytes_per_block / 1e6),
                "dtype": runner.dtype_name,
                "kv_dtype": runner.kv_dtype_name,
                "threads": torch.get_num_threads(),
            }
        )
    )


if __name__ == "__main__":
    main()
