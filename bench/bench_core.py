"""CPU time of one scheduler step: schedule + apply, without codec and wire.

    python bench/bench_core.py [--steps 2000] [--json]

Deterministic load on an executor that answers at once with fixed tokens, plans two deep as in production:

steady      n sequences decode, none comes or goes; a sixteenth of them needs a block each step
churn       256 run, outputs of 64 tokens, so that about four sequences end and start each step, with chunked prefill
queued      the same with 10,000 waiting, refilled by one submission for each that ends (its cost included)
starting    each step begins four prompts of 2,048 tokens, in blocks that it takes from a full cache
blocked     256 run in a pool with no room for the next, 10,000 waiting: admission looks and finds no fit each step
reserving   1,024 run, and what 10,000 waiting ones need is there, but kept for their growth: the same with arithmetic

Prints the median, the 99th percentile and the worst of the process's CPU time per step, in milliseconds.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import time
from collections import deque
from collections.abc import Callable

from scheduler_svc.core.events import FinishedEvent
from scheduler_svc.core.params import ExecutorLimits, SchedulerConfig, SeqId, SequenceSpec
from scheduler_svc.core.plan import NO_TOKEN, StepPlan, StepResult
from scheduler_svc.core.scheduler import Scheduler

_DEPTH = 2


class Load:
    """A scheduler, the executor's answers, and as many waiting sequences as asked for."""

    def __init__(
        self,
        num_running: int,
        num_blocks: int,
        prompt: tuple[int, int],
        output: tuple[int, int],
        block_size: int = 16,
        growth_reserve: float = 1.0,
        chunk: int = 512,
    ) -> None:
        self.rng = random.Random(1)
        self.prompt, self.output = prompt, output
        config = SchedulerConfig(
            max_num_batched_tokens=num_running + chunk,
            max_prefill_chunk=chunk,
            max_num_seqs=num_running,
            max_queue_requests=20_000,
            max_queue_tokens=1 << 40,
            watermark=0.0,
            growth_reserve=growth_reserve,
            pipeline_depth=_DEPTH,
        )
        limits = ExecutorLimits(
            block_size=block_size,
            num_device_blocks=num_blocks,
            max_rows=num_running,
            max_tokens=num_running + chunk,
            num_lanes=num_running * (_DEPTH + 1),
            max_model_len=1 << 17,
        )
        self.scheduler = Scheduler(config)
        self.scheduler.attach_executor(limits, 0.0)
        self.num_submitted = 0
        self.now = 0.0
        self.rows: list[int] = []
        self.remaining: dict[int, int] = {}

    def submit(self, count: int) -> None:
        for _ in range(count):
            prompt_ids = [self.num_submitted, *[7] * self.rng.randint(*self.prompt)]  # no two begin alike
            output = self.rng.randint(*self.output)
            spec = SequenceSpec(
                SeqId(self.num_submitted), prompt_ids, output, frozenset({2}), arrival=self.now, deadline=1e9
            )
            assert self.scheduler.submit(spec, self.now) is None
            self.num_submitted += 1

    def answer(self, plan: StepPlan) -> StepResult:
        """What an executor would say, at the cost of a real one's decoding: outside the measured time."""
        for admit in plan.admit:
            self.remaining[admit.lane] = len(admit.token_ids) - admit.num_cached_tokens
        if not plan.repeat_decode:
            self.rows = plan.row_lanes
        token_ids = [5] * len(self.rows)
        if plan.row_num_tokens is not None:
            for row, (lane, count) in enumerate(zip(self.rows, plan.row_num_tokens, strict=True)):
                left = self.remaining[lane] = self.remaining[lane] - count
                if left > 0:
                    token_ids[row] = NO_TOKEN
        return StepResult(plan.step_id, token_ids)

    def run(self, num_steps: int, *, refill: bool) -> list[float]:
        """CPU seconds of each step, in the order in which a loop does them: apply, submissions, schedule."""
        inflight: deque[StepResult] = deque()
        times: list[float] = []
        clock = time.process_time
        while len(times) < num_steps:
            self.now += 0.02
            start = clock()
            ended = 0
            if len(inflight) == _DEPTH:
                events = self.scheduler.apply(inflight.popleft(), self.now)
                ended = sum(1 for event in events if type(event) is FinishedEvent)
            if refill and ended:
                self.submit(ended)
            self.scheduler.expire(self.now)
            plan = self.scheduler.schedule(self.now)
            times.append(clock() - start)
            assert plan is not None
            inflight.append(self.answer(plan))
        while inflight:
            self.scheduler.apply(inflight.popleft(), self.now)
        return times


def steady(num_running: int, num_steps: int) -> list[float]:
    load = Load(num_running, num_running * (num_steps + 1100) // 16, (1, 31), (num_steps + 1000,) * 2)
    load.submit(num_running)
    load.run(200, refill=False)
    assert load.scheduler.stats().running == num_running
    return load.run(num_steps, refill=False)


def steady_long(num_steps: int) -> list[float]:
    """1,024 sequences of 8,192 prompt tokens: half a million blocks in use."""
    load = Load(1024, 1024 * (8192 + num_steps + 1000) // 16, (8191, 8191), (num_steps + 200,) * 2, chunk=1 << 16)
    load.submit(1024)
    while load.scheduler.stats().prefill_tokens_total < 1024 * 8192:
        load.run(10, refill=False)
    assert load.scheduler.stats().running == 1024
    return load.run(num_steps, refill=False)


def churn(num_queued: int, num_steps: int) -> list[float]:
    load = Load(256, 256 * 40, (20, 400), (64, 64))
    load.submit(256 + num_queued)
    load.run(200, refill=True)
    return load.run(num_steps, refill=True)


def blocked(num_steps: int) -> list[float]:
    """Each that runs has one block it never outgrows, two are free, and every waiting one needs three."""
    num_steps = min(num_steps, 700)
    load = Load(257, 258, (1, 31), (2000, 2000), block_size=1024, growth_reserve=0.0)
    load.submit(256)
    load.run(200, refill=False)
    load.prompt = (2049, 2049)
    load.submit(10_000)
    times = load.run(num_steps, refill=False)
    assert load.scheduler.stats().queue_requests == 10_000
    return times


def starting(num_steps: int) -> list[float]:
    """80 or so run; the cached blocks of those before them fill the rest of the pool."""
    load = Load(256, 256 * 150, (2047, 2047), (20, 20), chunk=8192)
    load.submit(400)
    load.run(150, refill=True)
    assert load.scheduler.stats().evictions_total > 0
    return load.run(num_steps, refill=True)


def reserving(num_steps: int) -> list[float]:
    """1,024 sequences of 2,048 tokens run, and of 10,000 others no more than a few find a place though 30 % are free.

    The pool is what the 1,024 need at the worst moment, when the shortest of their outputs ends, and 68 blocks.
    """
    load = Load(1280, 226_900, (2047, 2047), (1500, 2000), chunk=1 << 16)
    load.submit(1024)
    while load.scheduler.stats().prefill_tokens_total < 1024 * 2048:
        load.run(10, refill=False)
    load.prompt, load.output = (500, 3000), (2000, 2000)
    load.submit(10_000)
    load.run(20, refill=False)
    times = load.run(num_steps, refill=False)
    stats = load.scheduler.stats()
    assert 1024 <= stats.running < 1040
    assert stats.queue_requests > 9_980
    assert stats.blocks_free > 0.3 * stats.blocks_total
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    scenarios: dict[str, Callable[[], list[float]]] = {
        "steady 256": lambda: steady(256, args.steps),
        "steady 1024": lambda: steady(1024, args.steps),
        "steady 1024 x 8192 tokens": lambda: steady_long(min(args.steps, 500)),
        "churn 256": lambda: churn(0, args.steps),
        "churn 256, 10000 queued": lambda: churn(10_000, args.steps),
        "starting 4 x 2048 tokens": lambda: starting(min(args.steps, 500)),
        "reserving 1024, 10000 queued": lambda: reserving(min(args.steps, 300)),
        "blocked 256, 10000 queued": lambda: blocked(args.steps),
    }
    report = {}
    for name, scenario in scenarios.items():
        gc.collect()
        times = sorted(seconds * 1000 for seconds in scenario())
        p50, p99 = times[len(times) // 2], times[len(times) * 99 // 100]
        report[name] = {"p50_ms": round(p50, 4), "p99_ms": round(p99, 4), "max_ms": round(times[-1], 4)}
        if not args.json:
            print(f"{name:28} p50 {p50:7.3f} ms   p99 {p99:7.3f} ms   worst {times[-1]:7.3f} ms")
    if args.json:
        print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
