"""Demand three times the KV pool: preemption by cost against always swapping and always recomputing.

    python -m bench.overload [--turns 3] [--host-cache on-evict] [--output overload.json]
    python -m bench.overload --virtual          # the same on a made-up clock: exact, and any machine will do
    python -m bench.overload --real [--requests 24]     # the executor of this repository with the demo model

The load changes under the scheduler: after a warm-up of short outputs, which its admission learns from, 128 requests
come over the real wire, three quarters of them at once, the others with a higher priority while those run, and their
outputs are nine times as long. The executor is the KV-checking oracle of the tests, which sleeps: a step takes
`--step-ms`, `--row-ms` for each row and a token's share of `--prefill-tokens-per-s` for each token; copies take as long
as makes the way out and back of one block cost a part, as much as, or several times what computing it again costs
(three ratios). It reports those rates as an executor reports what it measured. Every id is compared with what it must
be.

The three modes take turns within one run (A B C B C A …); the table has medians over the turns. `regret` is what
preemptions cost beyond their cheapest forecast. With `--real` the copy rate is throttled in the executor instead
(`--copy-bytes-per-s`) from the prefill rate that it reports, and the pool is made small.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from bench import machine
from pagemill.columns import unpack
from pagemill.model_files import find_demo_model, read_model_info
from scheduler_svc.core.params import HostCache, PreemptionMode, SchedulerConfig
from scheduler_svc.core.stats import SchedulerStats
from scheduler_svc.executor_session import ExecutorSession
from tests.oracles.base import Geometry, Pace
from tests.oracles.expected import expected_output
from tests.oracles.gateway import FakeGateway
from tests.oracles.kv import KvExecutor
from tests.oracles.rig import LiveRig, LockstepRig

RATIOS = {"cheap": 0.1, "equal": 1.0, "dear": 5.0}
"""Seconds to copy a block out and back ÷ seconds to compute its tokens again."""
MODES = tuple(PreemptionMode)
BLOCK_SIZE = 16
OVERLOAD = 3
VOCAB = 1000
MIN_TOKENS, MAX_TOKENS = 120, 400
LIMIT_S = 600.0


@dataclass(frozen=True)
class Request:
    """What one client asks."""

    prompt: list[int]
    stop_ids: list[int]
    priority: int
    num_output: int
    """Tokens until it stops; only an expectation where the model is not an oracle."""

    @property
    def num_blocks(self) -> int:
        return -(-(len(self.prompt) + self.num_output) // BLOCK_SIZE)


@dataclass(frozen=True)
class Turn:
    """One run of all requests."""

    wall_s: float
    tokens_per_s: float
    preemptions: int
    recomputed_tokens: int
    swapped_mb: float
    forecast_s: float
    regret_s: float
    most_preemptions: int
    """Of one request."""
    wrong: int
    """Requests whose ids are not what they must be; only an oracle's are known."""


def make_requests(count: int, vocab_size: int, scale: float, *, is_oracle: bool) -> list[Request]:
    """Prompts of 16 to 96 tokens; from 120 outputs on one id in 30 stops, so that all grow long."""
    rng = random.Random(17)
    found = []
    for number in range(count):
        prompt = [rng.randrange(vocab_size) for _ in range(round(scale * rng.randint(16, 96)))]
        stop_ids = rng.sample(range(vocab_size), min(1000, vocab_size // 30))
        num_output = MIN_TOKENS + 30
        if is_oracle:
            num_output = len(output_of(prompt, stop_ids))
        found.append(Request(prompt, stop_ids, int(number % 4 == 3), num_output))
    return found


def output_of(prompt: list[int], stop_ids: list[int]) -> list[int]:
    return expected_output(
        prompt, max_tokens=MAX_TOKENS, vocab_size=VOCAB, stop_token_ids=stop_ids, min_tokens=MIN_TOKENS
    )


def pool_blocks(requests: list[Request]) -> int:
    """A third of what all of them need at their longest."""
    longest = max(len(request.prompt) for request in requests) + MAX_TOKENS
    return max(longest // BLOCK_SIZE + 1, sum(request.num_blocks for request in requests) // OVERLOAD)


class Clients:
    """Sends what is due: the ordinary requests at once, the urgent ones as the work goes on."""

    def __init__(self, gateway: FakeGateway, requests: list[Request]) -> None:
        self._gateway = gateway
        self._num_before = sum(len(record.ids) for record in gateway.streams.values())
        self._urgent = [request for request in requests if request.priority]
        self._num_urgent = len(self._urgent)
        self._num_tokens = sum(request.num_output for request in requests)
        for request in requests:
            if not request.priority:
                self._submit(request)

    @staticmethod
    def warm_up(gateway: FakeGateway, vocab_size: int, count: int) -> None:
        """Requests whose outputs stop after 16 tokens in the mean."""
        rng = random.Random(5)
        for _ in range(count):
            stop_ids = rng.sample(range(vocab_size), min(1000, vocab_size // 16))
            prompt = [rng.randrange(vocab_size) for _ in range(16)]
            gateway.submit(prompt, max_tokens=MAX_TOKENS, stop_token_ids=stop_ids)

    def are_done(self) -> bool:
        """Whether all requests have been sent and have ended."""
        received = sum(len(record.ids) for record in self._gateway.streams.values()) - self._num_before
        while self._urgent and received >= self._due_at():
            self._submit(self._urgent.pop(0))
        if not self._gateway.num_open and self._urgent:  # they were expected to be longer
            self._submit(self._urgent.pop(0))
        return not self._urgent and not self._gateway.num_open

    def _due_at(self) -> float:
        """Tokens after which the next urgent one comes: evenly over the first half of the work."""
        sent = self._num_urgent - len(self._urgent)
        return 0.5 * self._num_tokens * (sent + 1) / (self._num_urgent + 1)

    def _submit(self, request: Request) -> None:
        self._gateway.submit(
            request.prompt,
            max_tokens=MAX_TOKENS,
            stop_token_ids=request.stop_ids,
            min_tokens=MIN_TOKENS,
            priority=request.priority,
        )


def core_config(args: argparse.Namespace, mode: PreemptionMode) -> SchedulerConfig:
    return SchedulerConfig(
        max_num_batched_tokens=256,
        max_num_seqs=args.requests,
        max_prefill_chunk=192,
        preemption_mode=mode,
        host_cache=HostCache(args.host_cache),
        growth_reserve=args.growth_reserve,
    )


# The oracle


def geometry(args: argparse.Namespace, num_blocks: int, ratio: float) -> tuple[Geometry, Pace]:
    recompute_s = BLOCK_SIZE / args.prefill_tokens_per_s
    copy_s = ratio * recompute_s / 2
    bytes_per_block = 1 << 20
    shape = Geometry(
        block_size=BLOCK_SIZE,
        num_blocks=num_blocks,
        num_host_blocks=round(num_blocks * args.host_share),
        max_rows=args.requests,
        max_tokens=256,
        num_lanes=args.requests * 4,
        max_model_len=1024,
        vocab_size=VOCAB,
        bytes_per_block=bytes_per_block,
        swap_out_bytes_per_s=bytes_per_block / copy_s,
        swap_in_bytes_per_s=bytes_per_block / copy_s,
        prefill_tokens_per_s=args.prefill_tokens_per_s,
    )
    return shape, Pace(token_s=1 / args.prefill_tokens_per_s, row_s=args.row_ms / 1000, copy_block_s=copy_s)


def run_oracle(args: argparse.Namespace, requests: list[Request], ratio: float, mode: PreemptionMode) -> Turn:
    shape, pace = geometry(args, pool_blocks(requests), ratio)
    if args.virtual:
        lockstep = LockstepRig(core=core_config(args, mode), turn_s=0.0005)
        executor = lockstep.add_executor(KvExecutor, shape, pace=pace, step_s=args.step_ms / 1000)
        gateway = lockstep.add_gateway()
        Clients.warm_up(gateway, VOCAB, args.warm_up)
        lockstep.until(lambda: gateway.num_sessions > 0 and gateway.num_open == 0, limit=10**7)
        before = lockstep.engine.core.stats()
        clients = Clients(gateway, requests)
        begin = lockstep.clock.now
        lockstep.until(clients.are_done, limit=round(LIMIT_S / lockstep.turn_s))
        wall_s = lockstep.clock.now - begin
        stats = lockstep.engine.core.stats()
    else:
        with live_rig(core_config(args, mode)) as (rig, _):
            executor = rig.add_executor(KvExecutor, shape, pace=pace, step_s=args.step_ms / 1000)
            rig.until(lambda: executor.num_sessions > 0)
            gateway = rig.add_gateway()
            wall_s, before, stats = serve(args, rig, gateway, requests, VOCAB)
    assert executor.violations == [], executor.violations
    return summary(gateway, wall_s, before, stats, shape.bytes_per_block, count_wrong(gateway))


def count_wrong(gateway: FakeGateway) -> int:
    wrong = 0
    for record in gateway.streams.values():
        message = record.message
        if not message.sampling.min_tokens:
            continue  # of the warm-up
        wrong += record.ids != output_of(unpack(message.prompt_ids), unpack(message.sampling.stop_token_ids))
    return wrong


# Both


@contextlib.contextmanager
def live_rig(config: SchedulerConfig, directory: str | None = None) -> Iterator[tuple[LiveRig, str]]:
    with contextlib.ExitStack() as stack:
        if directory is None:
            directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="pm-", dir="/tmp"))
        rig = LiveRig(directory, core=config)
        try:
            yield rig, directory
        finally:
            rig.close()


def serve(
    args: argparse.Namespace, rig: LiveRig, gateway: FakeGateway, requests: list[Request], vocab_size: int
) -> tuple[float, SchedulerStats, SchedulerStats]:
    """Seconds from the first request to the end of the last, and the numbers before and after."""
    Clients.warm_up(gateway, vocab_size, args.warm_up)
    rig.until(lambda: gateway.num_sessions > 0 and gateway.num_open == 0, gateway, limit_s=LIMIT_S)
    before = rig.engine.core.stats()
    begin = time.monotonic()
    clients = Clients(gateway, requests)
    rig.until(clients.are_done, gateway, limit_s=LIMIT_S)
    wall_s = time.monotonic() - begin
    assert gateway.errors == []
    return wall_s, before, rig.engine.core.stats()


def summary(
    gateway: FakeGateway, wall_s: float, before: SchedulerStats, after: SchedulerStats, bytes_per_block: int, wrong: int
) -> Turn:
    def grown(name: str) -> float:
        return float(getattr(after, name) - getattr(before, name))

    ends = [record.ended for record in gateway.streams.values()]
    num_blocks = grown("swapped_out_blocks_total") + grown("swapped_in_blocks_total")
    return Turn(
        wall_s=round(wall_s, 3),
        tokens_per_s=round(grown("generated_tokens_total") / wall_s, 1),
        preemptions=round(grown("num_preemptions_total")),
        recomputed_tokens=round(grown("recomputed_tokens_total")),
        swapped_mb=round(num_blocks * bytes_per_block / 1e6, 1),
        forecast_s=round(grown("preemption_forecast_s_total"), 4),
        regret_s=round(grown("preemption_regret_s_total"), 4),
        most_preemptions=max(end.num_preemptions for end in ends if end is not None),
        wrong=wrong,
    )


# The real executor


class RealExecutor:
    """One executor process for a ratio; a scheduler of each turn finds it at the same endpoint."""

    def __init__(self, args: argparse.Namespace, directory: str, num_blocks: int, copy_bytes_per_s: float) -> None:
        self.model = args.model or find_demo_model()
        command = [
            sys.executable, "-m", "executor_svc",
            "--model", str(self.model),
            "--scheduler-endpoint", f"ipc://{directory}/executors.sock",
            "--num-device-blocks", str(num_blocks),
            "--max-num-seqs", str(args.requests),
            "--metrics-port", "0",
            "--copy-bytes-per-s", str(copy_bytes_per_s),
            "--die-with-parent",
            *args.executor_option,
        ]  # fmt: skip
        self._process = subprocess.Popen(command)

    def wait_for(self, rig: LiveRig) -> ExecutorSession:
        """Its session with this scheduler; RuntimeError when it ends instead."""

        def is_there() -> bool:
            if self._process.poll() is not None:
                raise RuntimeError(f"the executor ended with status {self._process.returncode}")
            return rig.engine.executors.session is not None

        rig.until(is_there, limit_s=180.0)
        session = rig.engine.executors.session
        assert session is not None
        return session

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(30)


def run_real(args: argparse.Namespace) -> list[dict[str, Any]]:
    info = read_model_info(args.model or find_demo_model())
    vocab_size = min(info.vocab_size, 30_000)
    requests = make_requests(args.requests, vocab_size, 1.0, is_oracle=False)
    num_blocks = pool_blocks(requests)
    found = []
    with tempfile.TemporaryDirectory(prefix="pm-", dir="/tmp") as directory:
        recompute_s, bytes_per_block = probe(args, directory, num_blocks)

        def turn_of(executor: RealExecutor, mode: PreemptionMode) -> Turn:
            with live_rig(core_config(args, mode), directory) as (rig, _):
                executor.wait_for(rig)
                gateway = rig.add_gateway(fingerprint=info.fingerprint)
                served = serve(args, rig, gateway, requests, vocab_size)
                return summary(gateway, *served, bytes_per_block, 0)

        for name, ratio in chosen(args):
            copy_bytes_per_s = bytes_per_block / (ratio * recompute_s / 2)
            executor = RealExecutor(args, directory, num_blocks, copy_bytes_per_s)
            try:
                found.append(take_turns(args, name, ratio, partial(turn_of, executor)))
            finally:
                executor.close()
    return found


def probe(args: argparse.Namespace, directory: str, num_blocks: int) -> tuple[float, int]:
    """Seconds to compute a block, as the executor measures it, and bytes of a block."""
    executor = RealExecutor(args, directory, num_blocks, 0.0)
    try:
        with live_rig(core_config(args, PreemptionMode.AUTO), directory) as (rig, _):
            session = executor.wait_for(rig)
            print(f"the executor reports {session.limits}", file=sys.stderr)
            return session.limits.block_size / session.limits.prefill_tokens_per_s, session.limits.bytes_per_block
    finally:
        executor.close()


# Turns and tables


def chosen(args: argparse.Namespace) -> list[tuple[str, float]]:
    return [(name, RATIOS.get(name) or float(name)) for name in args.ratio or RATIOS]


def take_turns(
    args: argparse.Namespace, name: str, ratio: float, run: Callable[[PreemptionMode], Turn]
) -> dict[str, Any]:
    """All modes, one after the other, in an order that moves on with each turn."""
    turns: dict[str, list[Turn]] = {mode.value: [] for mode in MODES}
    for number in range(args.turns):
        for offset in range(len(MODES)):
            mode = MODES[(number + offset) % len(MODES)]
            turns[mode.value].append(run(mode))
            print(f"{name} turn {number + 1} {mode.value}: {turns[mode.value][-1]}", file=sys.stderr)
    return {"ratio": name, "copy_to_prefill": ratio, "turns": {m: list(map(asdict, t)) for m, t in turns.items()}}


def median(turns: list[dict[str, Any]], name: str) -> float:
    return float(statistics.median(turn[name] for turn in turns))


def print_table(found: list[dict[str, Any]]) -> None:
    print("| copy ÷ prefill | mode | wall s | tokens/s | preemptions | recomputed tokens | swapped MB | regret s |")
    print("|---|---|---|---|---|---|---|---|")
    for case in found:
        best = min(median(turns, "wall_s") for mode, turns in case["turns"].items() if mode != "auto")
        for mode, turns in case["turns"].items():
            m = {field: median(turns, field) for field in turns[0]}
            name = f"{case['ratio']} ({case['copy_to_prefill']})"
            print(
                f"| {name} | {mode} | {m['wall_s']:.2f} | {m['tokens_per_s']:.0f} | "
                f"{m['preemptions']:.0f} | {m['recomputed_tokens']:.0f} | {m['swapped_mb']:.0f} | {m['regret_s']:.3f} |"
            )
        case["auto_to_better"] = round(median(case["turns"]["auto"], "wall_s") / best, 4)
        print(f"{case['ratio']}: auto takes {case['auto_to_better']:.3f} of the better of the two", file=sys.stderr)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--requests", type=int, default=None, help="default: 128; 24 with --real")
    parser.add_argument("--ratio", action="append", help="cheap, equal, dear or a number; default: those three")
    parser.add_argument("--prefill-tokens-per-s", type=float, default=5000.0)
    parser.add_argument("--step-ms", type=float, default=5.0)
    parser.add_argument("--row-ms", type=float, default=0.05)
    parser.add_argument("--warm-up", type=int, default=100, help="requests before each turn, not counted")
    parser.add_argument("--host-share", type=float, default=2.0, help="host blocks ÷ device blocks")
    parser.add_argument("--host-cache", choices=[h.value for h in HostCache], default="on-evict")
    parser.add_argument("--growth-reserve", type=float, default=SchedulerConfig().growth_reserve)
    parser.add_argument("--virtual", action="store_true")
    parser.add_argument("--real", action="store_true")
    parser.add_argument("--model", type=Path, help="with --real; default: the demo model")
    parser.add_argument("--executor-option", action="append", default=[], help="with --real; such as --dtype=float32")
    parser.add_argument("--output", type=Path, help="also write every turn here, as JSON")
    args = parser.parse_args()
    args.requests = args.requests or (24 if args.real else 128)
    meter = machine.CpuMeter()
    if args.real:
        found = run_real(args)
    else:
        requests = make_requests(args.requests, VOCAB, 1.0, is_oracle=True)
        found = [
            take_turns(args, name, ratio, partial(run_oracle, args, requests, ratio)) for name, ratio in chosen(args)
        ]
    print_table(found)
    others = meter.others_cpus()
    if others > 0.1 and not args.virtual:
        print(f"others kept {others:.2f} CPUs busy: repeat on a quiet machine", file=sys.stderr)
    if args.output:
        options = {name: str(value) for name, value in vars(args).items()}
        result = {"machine": machine.describe(), "options": options, "other_cpus": round(others, 3), "cases": found}
        args.output.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
