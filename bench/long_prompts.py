"""What other streams feel while prompts of 100,000 tokens come: gaps between tokens with and without them, by turns.

    python -m bench.long_prompts --output long-prompts.json

A scheduler as in production, beside it an executor that computes nothing and takes `--step-ms` for every step whatever
is in it (the scripted oracle of the tests), and a client, each in a process of its own. So what the gaps show is the
scheduler: decoding and hashing the prompt, looking its blocks up, planning its chunks. `--streams` requests decode all
the time. A turn `new` sends a prompt that nobody has seen each second, a turn `cached` one whose blocks are all there,
a turn `none` nothing. A long prompt is cancelled when the next one comes.
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
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench import machine
from pagemill.zmq_links import GATEWAY_BOUND, ZmqPeer, new_identity
from tests.oracles.gateway import FakeGateway, StreamRecord

KINDS = ("none", "new", "cached")
VOCAB = 30_000
BLOCK_SIZE = 16
LIMIT_S = 120.0
EVERY_S = 1.0


@contextlib.contextmanager
def service(step_s: float, num_tokens: int) -> Iterator[FakeGateway]:
    """A client of a scheduler with an executor that takes `step_s` a step and holds three such prompts."""
    with tempfile.TemporaryDirectory(prefix="pm-", dir="/tmp") as directory, contextlib.ExitStack() as stack:
        executors, gateways = (f"ipc://{directory}/{name}.sock" for name in ("executors", "gateways"))
        scheduler = [
            *("-m", "scheduler_svc", "--executor-endpoint", executors, "--gateway-endpoint", gateways),
            *("--max-num-seqs", "64", "--metrics-port", "0"),
        ]
        executor = [
            *("-m", "tests.oracles", "--kind", "scripted", "--scheduler-endpoint", executors),
            *("--step-s", str(step_s), "--block-size", str(BLOCK_SIZE), "--vocab-size", str(VOCAB)),
            *("--num-blocks", str(3 * num_tokens // BLOCK_SIZE), "--max-model-len", str(num_tokens + BLOCK_SIZE)),
            *("--max-rows", "64", "--max-tokens", "8192", "--num-lanes", "256"),
        ]
        for arguments in (scheduler, executor):
            process = subprocess.Popen([sys.executable, *arguments], stderr=subprocess.DEVNULL)
            stack.callback(process.wait, 10)
            stack.callback(process.terminate)
        gateway = FakeGateway(ZmqPeer(gateways, new_identity("gateway", "bench"), bound=GATEWAY_BOUND))
        stack.callback(gateway.link.close)
        wait_until(gateway, lambda: gateway.status is not None and gateway.status.ready)
        yield gateway


def wait_until(gateway: FakeGateway, condition: Any) -> None:
    until = time.monotonic() + LIMIT_S
    while not condition():
        if time.monotonic() > until:
            raise TimeoutError("the service did not get there")
        gateway.poll(0.01)


def make_prompt(rng: random.Random, num_tokens: int) -> list[int]:
    return [rng.randrange(VOCAB) for _ in range(num_tokens)]


def turn(
    gateway: FakeGateway, streams: list[StreamRecord], kind: str, known: list[int], args: argparse.Namespace, seed: int
) -> list[float]:
    """Milliseconds between two tokens of a stream, over all of them, for `--seconds`."""
    rng = random.Random(seed)
    prompts = [known if kind == "cached" else make_prompt(rng, args.tokens) for _ in range(args.seconds)]
    before = [len(record.ids) for record in streams]
    last: list[float | None] = [None] * len(streams)
    gaps: list[float] = []
    sent: list[StreamRecord] = []
    begin = time.monotonic()
    while (now := time.monotonic()) < begin + args.seconds:
        if kind != "none" and len(sent) < len(prompts) and now >= begin + EVERY_S * len(sent) + EVERY_S / 2:
            if sent and not sent[-1].is_over:
                gateway.cancel(sent[-1].stream)
            sent.append(gateway.submit(prompts[len(sent)], max_tokens=2))
        gateway.poll(0.005)
        now = time.monotonic()
        for index, record in enumerate(streams):
            if len(record.ids) > before[index]:
                before[index] = len(record.ids)
                earlier, last[index] = last[index], now
                if earlier is not None:
                    gaps.append((now - earlier) * 1e3)
    for record in sent:
        if not record.is_over:
            gateway.cancel(record.stream)
    wait_until(gateway, lambda: all(record.is_over for record in sent))
    return gaps


def quantile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def measure(args: argparse.Namespace) -> dict[str, Any]:
    gaps: dict[str, list[list[float]]] = {kind: [] for kind in KINDS}
    with service(args.step_ms / 1e3, args.tokens) as gateway:
        known = make_prompt(random.Random(1), args.tokens)
        first = gateway.submit(known, max_tokens=1)
        wait_until(gateway, lambda: first.is_over)
        long_run = min(args.tokens, 90_000)
        streams = [gateway.submit([number + 1], max_tokens=long_run) for number in range(args.streams)]
        wait_until(gateway, lambda: all(len(record.ids) > 5 for record in streams))
        for number in range(args.turns):
            for kind in KINDS[number % 3 :] + KINDS[: number % 3]:
                gaps[kind].append(turn(gateway, streams, kind, known, args, seed=number))
        assert gateway.errors == []
    found: dict[str, Any] = {}
    for kind, turns in gaps.items():
        p99 = [round(quantile(values, 0.99), 2) for values in turns]
        found[kind] = {
            "p50_ms": round(statistics.median(quantile(values, 0.5) for values in turns), 2),
            "p99_ms": round(statistics.median(p99), 2),
            "longest_ms": round(max(max(values) for values in turns), 2),
            "p99_ms_of_turns": p99,
        }
    for kind in KINDS[1:]:
        found[kind]["p99_to_none"] = round(found[kind]["p99_ms"] / found["none"]["p99_ms"], 3)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=100_000, help="of a long prompt")
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--step-ms", type=float, default=20.0)
    parser.add_argument("--seconds", type=int, default=8, help="of a turn")
    parser.add_argument("--turns", type=int, default=5, help="of each kind")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    meter = machine.CpuMeter()
    found = measure(args)
    others = round(meter.others_cpus(), 3)
    print("| long prompts | p50 ms | p99 ms | longest ms | p99 to none |\n|---|---|---|---|---|")
    for kind, row in found.items():
        print(f"| {kind} | {row['p50_ms']} | {row['p99_ms']} | {row['longest_ms']} | {row.get('p99_to_none', 1.0)} |")
    if others > 0.1:
        print(f"other processes kept {others} CPUs busy: repeat on a quiet machine", file=sys.stderr)
    if args.output is not None:
        record = {**machine.describe(), "arguments": vars(args) | {"output": None}, "found": found, "others": others}
        args.output.write_text(json.dumps(record, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
