"""What the executor itself costs per step: decoding the plan, the step around the model, encoding the result.

    python -m bench.bench_executor [--rows 64 --rows 256] [--steps 100] [--temperature 0] [--vocab-size 49152]

Steady decode: each row one token, block tables as long as needed from the start. The model is a stand-in that gives the
same random logits each time and costs nothing, so `execute` is mirror, batch and sampling. One thread. Prints means of
wall time in microseconds per step; `--profile` prints where `execute` spends it instead.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pstats
import time
from dataclasses import replace

import torch

from executor_svc.batch import Batch
from executor_svc.codec import decode_plan, encode_result
from pagemill.engine.v1 import executor_pb2 as pb
from pagemill.engine.v1.sampling_pb2 import Sampling
from tests.unit.executor.executor_fakes import Bench, DigestRunner, admit, column

BLOCK_SIZE = 16
PROMPT = [1, 2, 3]
WARM_UP_STEPS = 5
PARTS = ("decode", "execute", "encode")


class FreeRunner(DigestRunner):
    """A model that costs nothing."""

    def __init__(self, num_rows: int, blocks_per_row: int, vocab_size: int) -> None:
        super().__init__(
            block_size=BLOCK_SIZE, num_blocks=num_rows * blocks_per_row, max_model_len=blocks_per_row * BLOCK_SIZE
        )
        self.vocab_size = vocab_size
        self._answer = torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(1))

    def forward(self, batch: Batch) -> torch.Tensor:
        return self._answer


def decoding(num_rows: int, num_steps: int, vocab_size: int, temperature: float) -> Bench:
    """An executor whose lanes have had their prompts and have room for all steps."""
    blocks_per_row = -(-(len(PROMPT) + num_steps + WARM_UP_STEPS + 1) // BLOCK_SIZE)
    bench = Bench(FreeRunner(num_rows, blocks_per_row, vocab_size), num_lanes=num_rows, max_rows=num_rows)
    bench.limits = replace(bench.limits, max_tokens=num_rows * len(PROMPT))
    sampling = Sampling(temperature=temperature, top_p=1.0)
    tables = [range(row * blocks_per_row, (row + 1) * blocks_per_row) for row in range(num_rows)]
    outcomes = [
        bench.run(
            admit=[admit(row, PROMPT, table, sampling=sampling) for row, table in enumerate(tables)],
            row_lanes=column(*range(num_rows)),
            row_num_tokens=column(*[len(PROMPT)] * num_rows),
        )
    ]
    outcomes += [bench.run(repeat_decode=True) for _ in range(WARM_UP_STEPS)]
    assert not any(outcome.failed or outcome.row_errors for outcome in outcomes)
    return bench


def measure(bench: Bench, num_steps: int) -> dict[str, float]:
    """Mean microseconds of each part of a step."""
    totals = dict.fromkeys(PARTS, 0.0)
    for _ in range(num_steps):
        frame = bench.plan(repeat_decode=True).SerializeToString()
        times = [time.perf_counter()]
        plan = decode_plan(pb.StepPlan.FromString(frame), bench.limits)
        times.append(time.perf_counter())
        outcome = bench.executor.execute(plan, bench.step_id)
        times.append(time.perf_counter())
        encode_result(outcome).SerializeToString()
        times.append(time.perf_counter())
        assert not outcome.failed
        assert not outcome.row_errors
        for part, begin, end in zip(PARTS, times, times[1:], strict=False):
            totals[part] += end - begin
    return {part: round(total / num_steps * 1e6, 1) for part, total in totals.items()}


def profile(bench: Bench, num_steps: int) -> None:
    plans = [decode_plan(bench.plan(repeat_decode=True), bench.limits) for _ in range(num_steps)]
    profiler = cProfile.Profile()
    profiler.enable()
    for step_id, plan in enumerate(plans, start=bench.step_id - num_steps + 1):
        bench.executor.execute(plan, step_id)
    profiler.disable()
    pstats.Stats(profiler).sort_stats("tottime").print_stats(14)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, action="append", help="may be repeated; default 64 and 256")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--vocab-size", type=int, default=49_152)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    report = {}
    for num_rows in args.rows or [64, 256]:
        bench = decoding(num_rows, args.steps, args.vocab_size, args.temperature)
        if args.profile:
            profile(bench, args.steps)
            continue
        parts = report[num_rows] = measure(bench, args.steps)
        if not args.json:
            print(f"{num_rows:5} rows   " + "   ".join(f"{part} {us:8.1f} us" for part, us in parts.items()))
    if args.json and not args.profile:
        print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
