"""CPU of the scheduler per step: core, codec, sessions and events, with an executor that costs nothing.

    python bench/bench_scheduler.py [--steps 400] [--json FILE]

The real engine runs in this process over links that only keep frames; a null executor answers each plan with one fixed
token per row. Only the engine's rounds are timed, in process CPU time. Budgets (DESIGN 9): 0.5 ms per step at 256
running, 2 ms at 1,024, p99 10 ms with 10,000 queued.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from collections import deque

from pagemill.columns import pack, unpack
from pagemill.engine.v1 import executor_pb2 as ex
from pagemill.engine.v1 import frontend_pb2 as fe
from pagemill.engine.v1.sampling_pb2 import Sampling
from pagemill.framing import Channel
from pagemill.links import PeerId, SendOutcome
from scheduler_svc.config import EngineConfig
from scheduler_svc.core.params import SchedulerConfig
from scheduler_svc.engine import Engine

EXECUTOR, GATEWAY = PeerId(b"executor/null/1"), PeerId(b"gateway/null/1")


class NullHub:
    """A hub that keeps frames; nothing is ever full."""

    num_dropped = 0

    def __init__(self) -> None:
        self.inbox: deque[tuple[PeerId, bytes]] = deque()
        self.outbox: deque[bytes] = deque()

    def send(self, peer: PeerId, frame: bytes) -> SendOutcome:
        self.outbox.append(frame)
        return SendOutcome.SENT

    def recv(self) -> tuple[PeerId, bytes] | None:
        return self.inbox.popleft() if self.inbox else None

    def fileno(self) -> int:
        return -1

    def close(self, linger_s: float = 0.0) -> None:
        pass


class Bench:
    """An engine with `running` sequences decoding and `queued` more waiting."""

    def __init__(self, running: int, queued: int, max_tokens: int, prompt: int = 64) -> None:
        self.executors, self.gateways = NullHub(), NullHub()
        self.now = 0.0
        self.engine = Engine(
            core_config=SchedulerConfig(
                max_num_seqs=running + 1, max_num_batched_tokens=max(2048, 2 * running), max_queue_requests=20_000
            ),
            config=EngineConfig(lease_s=1e6, heartbeat_s=1e5),
            executor_hub=self.executors,
            gateway_hub=self.gateways,
            clock=lambda: self.now,
            wait=lambda timeout_s: False,
        )
        self.executor_channel: Channel[ex.ExecutorEnvelope] = Channel(ex.ExecutorEnvelope)
        self.gateway_channel: Channel[fe.FrontendEnvelope] = Channel(fe.FrontendEnvelope)
        self.rows: list[int] = []
        self.lanes: dict[int, list[int]] = {}
        self._say_hello(running)
        self.submitted = 0
        self.submit(running + queued, max_tokens, prompt)
        while self.engine.core.stats().running < running + bool(queued):
            self.step()
        for _ in range(20):
            self.step()

    def _say_hello(self, running: int) -> None:
        hello = ex.ExecutorHello(
            protocol_min=1, protocol_max=1, model_fingerprint="x", block_size=16, num_device_blocks=2_000_000,
            max_rows=running + 1, max_tokens=65536, num_lanes=4 * (running + 1), max_model_len=262144,
            vocab_size=50_000,
        )  # fmt: skip
        self.executors.inbox.append((EXECUTOR, self.executor_channel.pack(hello=hello)))
        front = fe.FrontendHello(protocol_min=1, protocol_max=1, model_fingerprint="x")
        self.gateways.inbox.append((GATEWAY, self.gateway_channel.pack(hello=front)))
        self.engine.step()
        self.executor_channel.open(ex.ExecutorEnvelope.FromString(self.executors.outbox.popleft()).epoch)
        self.gateway_channel.open(fe.FrontendEnvelope.FromString(self.gateways.outbox.popleft()).epoch)

    def send_prompt(self, prompt_ids: list[int]) -> None:
        """One request for one token; the engine reads it in its next round."""
        self.submitted += 1
        message = fe.Submit(
            stream=self.submitted, prompt_ids=pack(prompt_ids), max_tokens=1, sampling=Sampling(top_p=1.0)
        )
        self.gateways.inbox.append((GATEWAY, self.gateway_channel.pack(submit=message)))

    def submit(self, count: int, max_tokens: int, prompt: int) -> None:
        for _ in range(count):
            self.submitted += 1
            message = fe.Submit(
                stream=self.submitted,
                prompt_ids=pack([self.submitted, *[1] * (prompt + self.submitted % 17)]),  # no two begin alike
                max_tokens=max_tokens,
                sampling=Sampling(top_p=1.0),
            )
            self.gateways.inbox.append((GATEWAY, self.gateway_channel.pack(submit=message)))
        while self.gateways.inbox:
            self.engine.step()

    def answer(self) -> int:
        """The null executor: answers the plans it has; the number of rows of the last one."""
        while self.executors.outbox:
            envelope = ex.ExecutorEnvelope.FromString(self.executors.outbox.popleft())
            if envelope.WhichOneof("body") != "plan":
                continue
            plan = envelope.plan
            for admit in plan.admit:
                self.lanes[admit.lane] = [admit.num_cached_tokens, admit.num_prompt_tokens]
            counts = None
            if not plan.repeat_decode:
                self.rows = unpack(plan.row_lanes)
                counts = unpack(plan.row_num_tokens) if plan.row_num_tokens else None
            ids = []
            for row, lane in enumerate(self.rows):
                state = self.lanes[lane]
                state[0] += 1 if counts is None else counts[row]
                ids.append(7 if state[0] >= state[1] else -1)
            result = ex.StepResult(step_id=plan.step_id, status=ex.STEP_STATUS_OK, token_ids=pack(ids))
            self.executors.inbox.append((EXECUTOR, self.executor_channel.pack(result=result)))
        return len(self.rows)

    def step(self) -> float:
        """One step of the null executor and the engine's round after it; CPU milliseconds of the round."""
        self.answer()
        self.now += 0.001
        begin = time.process_time_ns()
        self.engine.step()
        spent = (time.process_time_ns() - begin) / 1e6
        self.gateways.outbox.clear()
        return spent


def measure(name: str, steps: int, running: int, queued: int, max_tokens: int) -> dict[str, object]:
    bench = Bench(running, queued, max_tokens)
    before = bench.engine.counters.plans_sent
    gc.collect()
    gc.freeze()
    times = [bench.step() for _ in range(steps)]
    gc.unfreeze()
    plans = bench.engine.counters.plans_sent - before
    cuts = statistics.quantiles(times, n=100)
    scale = steps / plans  # a round applies and plans as many steps as the pipeline is deep
    stats = bench.engine.core.stats()
    return {
        "case": name,
        "p50_ms": round(cuts[49] * scale, 3),
        "mean_ms": round(statistics.fmean(times) * scale, 3),
        "p99_ms": round(cuts[98], 3),
        "max_ms": round(max(times), 3),
        "steps": plans,
        "plans_per_round": round(plans / steps, 2),
        "running": stats.running,
        "queued": stats.queue_requests,
        "finished": stats.finished_total,
    }


def measure_long_prompt(num_tokens: int, running: int) -> dict[str, object]:
    """The longest round that others see while one long prompt is taken in, hashed, admitted and computed; then again,
    when all of it is cached."""
    bench = Bench(running, 0, 20_000)
    gc.collect()
    gc.freeze()
    alone = [bench.step() for _ in range(200)]
    longest = []
    for _ in range(2):
        finished = bench.engine.core.stats().finished_total
        bench.send_prompt([number % 50_000 for number in range(num_tokens)])
        times = []
        while bench.engine.core.stats().finished_total == finished:
            times.append(bench.step())
        longest.append(round(max(times), 3))
    gc.unfreeze()
    return {
        "case": f"{running} running, one prompt of {num_tokens:,} tokens",
        "p99_ms_before": round(statistics.quantiles(alone, n=100)[98], 3),
        "longest_ms_cold": longest[0],
        "longest_ms_cached": longest[1],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--json", help="also write the numbers here")
    args = parser.parse_args()
    found = []
    for case in (
        ("256 running, steady decode", 256, 0, 20_000),
        ("1,024 running, steady decode", 1024, 0, 20_000),
        ("256 running, 10,000 queued, steady", 256, 10_000, 20_000),
        ("256 running, 10,000 queued, streams of 64 tokens come and go", 256, 10_000, 64),
        ("1,024 running, 10,000 queued, steady", 1024, 10_000, 20_000),
    ):
        name, running, queued, max_tokens = case
        found.append(measure(name, args.steps, running, queued, max_tokens))
        print(found[-1])
    found.append(measure_long_prompt(100_000, 64))
    print(found[-1])
    if args.json:
        with open(args.json, "w") as file:
            json.dump(found, file, indent=1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
