"""Pagemill and its peers on the same machine, the same weights and the same requests, in turn.

    make bench-peers PEERS_DIR=/var/tmp/peers                       # everything; an hour and 15 GB
    python -m bench.peers --folder /var/tmp/peers --peer llama.cpp --workload W1 --workload W3 --turns 5

Each peer gets a virtual environment of its own in the folder, with the versions that `environments` pins, and the
weights in its own format. All sides stay loaded; a turn is one workload on one side while the others are idle, and
turns alternate A B A B. Turns are added to results.jsonl in the folder, so that a measurement may be made in parts; the
table and the plot are made of all turns in there (of this type of weights), and go into --document.

Equal footing: weights of one type (--dtype) from one file, keys and values of 16 bits where weights have 16 (llama.cpp
keeps float16, OpenVINO float32 on CPUs without bfloat16), all usable CPUs as threads, greedy, fixed lengths, token ids
in and out. Pagemill is measured through its whole service, over gRPC; peers run in process, without a server.
transformers' W2 and W4 are every 8th request (--every), because they would take minutes, and compared by tokens per
second.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench import machine, workloads
from bench.peers import weights
from bench.peers.environments import PEERS, build
from bench.peers.report import insert, markdown, measure, svg
from bench.peers.sides import Side, pagemill, peer
from pagemill.model_files import find_demo_model
from pagemill_client.load import Request

WORKLOADS = ("W1", "W2", "W3", "W4", "W5r1", "W5r2", "W5r4", "W5r8")
MAX_SEQS = 64
DOCUMENT = Path(__file__).parents[2] / "docs" / "performance.md"


async def main() -> None:
    args = _arguments()
    args.folder.mkdir(parents=True, exist_ok=True)
    results = args.folder / "results.jsonl"
    if args.turns:
        await _measure(args, results)
    lines = results.read_text().splitlines() if results.exists() else []
    turns = [turn for turn in map(json.loads, lines) if turn["dtype"] == args.dtype]
    if not turns:
        sys.exit(f"no turns with --dtype {args.dtype} in {results}")
    plot = args.document.with_name(f"{args.document.stem}-peers.svg")
    section = markdown(turns, plot.name)
    if args.write:
        args.document.write_text(insert(args.document.read_text(), section))
        plot.write_text(svg(turns))
    print(section)


async def _measure(args: argparse.Namespace, results: Path) -> None:
    model = args.model or find_demo_model()
    ids = workloads.corpus(model)
    requests = {name: workloads.make(name, ids) for name in args.workload}
    async with contextlib.AsyncExitStack() as exits:
        sides = []
        for name in args.peer:
            options = _options(args, name, model, requests)
            python = build(name, args.folder)
            if name == "openvino":
                options["openvino"] = str(weights.openvino_directory(Path(options["model"]), python, args.folder))
            _say(f"{name}: loading")
            sides.append(await exits.enter_async_context(peer(name, python, options)))
        about = {"weights": args.dtype, "kv": args.dtype, "threads": _threads()}
        own = [f"--executor.dtype={args.dtype}", *args.serve_option]
        sides.append(await exits.enter_async_context(pagemill(model, own, about)))
        for side in sides:
            await side.turn(_warm_up(ids))
        for workload in args.workload:
            first = 1 + max((t["turn"] for t in _turns_in(results) if t["workload"] == workload), default=0)
            for number in range(first, first + args.turns):
                for side in sides:
                    await _turn(args, side, workload, number, requests[workload], results)


async def _turn(
    args: argparse.Namespace,
    side: Side,
    workload: str,
    number: int,
    repetitions: Sequence[Sequence[Request]],
    results: Path,
) -> None:
    """One turn; its line is added to the results. Prompts are new to the side in each of the first turns."""
    requests = repetitions[(number - 1) % len(repetitions)]
    if side.name == "transformers" and workload in ("W2", "W4"):
        requests = requests[:: args.every]
    meter = machine.CpuMeter()
    found = await side.turn(requests)
    line = {
        "workload": workload,
        "side": side.name,
        "turn": number,
        "dtype": args.dtype,
        "metrics": measure(workload, requests, found),
        "own_cpu_s": round(meter.own_s(), 2),
        "other_cpus": round(meter.others_cpus(), 3),
        "digest": workloads.digest(requests),
        "about": side.about,
        "machine": machine.describe(),
    }
    with results.open("a") as file:
        file.write(json.dumps(line) + "\n")
    _say(f"{workload}, turn {number}, {side.name}: {json.dumps(line['metrics'])}, others {line['other_cpus']} CPUs")


def _options(
    args: argparse.Namespace, name: str, model: Path, requests: dict[str, list[list[Request]]]
) -> dict[str, Any]:
    """For the peer's worker."""
    most = max(sum(len(r.ids) + r.n_out for r in reqs[:MAX_SEQS]) for sets in requests.values() for reqs in sets)
    options: dict[str, Any] = {"dtype": args.dtype, "threads": _threads(), "max_seqs": MAX_SEQS}
    if name == "llama.cpp":
        file = args.gguf or weights.gguf_file(model, args.dtype, args.folder)
        kind = args.dtype if args.gguf is None else args.gguf.name
        return options | {"gguf": str(file), "gguf_type": kind, "kv_tokens": -(-max(most, 8192) // 256) * 256}
    return options | {"model": str(weights.hf_directory(model, args.dtype, args.folder))}


def _warm_up(ids: Sequence[int]) -> list[Request]:
    """Some short requests and a long prompt, none of which begins like a measured one."""
    text = ids[-2000:][::-1]
    return [Request(tuple(text[i * 97 : i * 97 + 64 + 37 * i]), 8) for i in range(4)] + [Request(tuple(text[:1500]), 2)]


def _turns_in(results: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []


def _threads() -> int:
    return len(os.sched_getaffinity(0))


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="for environments, weights and results")
    parser.add_argument("--peer", action="append", choices=list(PEERS), help="default: all")
    parser.add_argument("--workload", action="append", choices=WORKLOADS, help="default: all")
    parser.add_argument("--turns", type=int, default=5, help="turns of each side; 0 only writes the report")
    parser.add_argument("--every", type=int, default=8, help="transformers runs every Nth request of W2 and W4")
    parser.add_argument("--model", type=Path, help="directory or GGUF file; default: the demo model")
    parser.add_argument("--gguf", type=Path, help="file for llama.cpp; default: made from --model if that is one")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"], help="of weights, on all sides")
    parser.add_argument("--serve-option", action="append", default=[], help="for pagemill serve: --NAME=VALUE")
    parser.add_argument("--document", type=Path, default=DOCUMENT, help="where table and plot go")
    parser.add_argument("--write", action=argparse.BooleanOptionalAction, default=True, help="change the document")
    args = parser.parse_args()
    args.peer = list(PEERS) if args.peer is None else args.peer
    args.workload = list(WORKLOADS) if args.workload is None else args.workload
    if not 0 <= args.turns <= workloads.REPETITIONS:
        parser.error(f"--turns: 0 to {workloads.REPETITIONS}, for each has prompts of its own")
    return args


if __name__ == "__main__":
    asyncio.run(main())
