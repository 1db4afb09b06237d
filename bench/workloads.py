"""Workloads W1 to W5: the same requests in every run and for every system that is compared.

Prompts are slices of real text, the Python documentation that ships with CPython (`pydoc_data.topics`), as token ids of
the model's own tokenizer; outputs have fixed lengths. Everything follows from seeds: the same tokenizer and CPython
version give the same bytes (`digest` tells).

W1   one stream, 128 → 128 tokens
W2   64 requests at once, prompts 32 to 512, outputs 32 to 128
W3   one prompt of 2,048, 1 token
W4   32 requests that share 1,024 tokens and have 32 of their own, 32 out
W5rN Poisson arrivals at N = 1, 2, 4, 8 per second, 40 requests, lengths as W2

    python -m bench.workloads W2 --repetition 0 > w2.json     # for `pagemill bench --workload`
"""

from __future__ import annotations

import argparse
import hashlib
import json
import pydoc_data.topics
import random
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from pagemill.model_files import find_demo_model, read_model_info
from pagemill_client.load import Request
from scheduler_svc.gateway import tokenizer

REPETITIONS = 6
"""Different prompts of the same lengths, so that no cache helps from one repetition to the next."""
RATES = (1, 2, 4, 8)

Ids = Sequence[int]


def corpus(model: Path) -> list[int]:
    """Token ids of the documentation, topics in the order of their names."""
    topics: dict[str, str] = pydoc_data.topics.topics
    text = "\n".join(topics[name] for name in sorted(topics))
    return tokenizer.load(read_model_info(model)).encode(text, add_special_tokens=False)


def make(name: str, ids: Ids) -> list[list[Request]]:
    """All repetitions of one workload. Raises KeyError for a name that is none."""
    if name.startswith("W5r"):
        return [_arrivals(ids, {f"W5r{rate}": rate for rate in RATES}[name], rep) for rep in range(REPETITIONS)]
    makers: dict[str, Callable[[Ids], list[list[Request]]]] = {"W1": _w1, "W2": _w2, "W3": _w3, "W4": _w4}
    return makers[name](ids)


def digest(requests: Sequence[Request]) -> str:
    """Tells whether two machines run the same requests."""
    plain = [[list(request.ids), request.n_out, request.at] for request in requests]
    return hashlib.sha256(json.dumps(plain).encode()).hexdigest()[:16]


def _slice(ids: Ids, rng: random.Random, length: int) -> tuple[int, ...]:
    start = rng.randrange(0, len(ids) - length)
    return tuple(ids[start : start + length])


def _w1(ids: Ids) -> list[list[Request]]:
    rng = random.Random(1)
    return [[Request(_slice(ids, rng, 128), 128)] for _ in range(REPETITIONS)]


def _w2(ids: Ids) -> list[list[Request]]:
    lengths_rng, rng = random.Random(0), random.Random(100)
    lengths = [(lengths_rng.randint(32, 512), lengths_rng.randint(32, 128)) for _ in range(64)]
    return [[Request(_slice(ids, rng, prompt), out) for prompt, out in lengths] for _ in range(REPETITIONS)]


def _w3(ids: Ids) -> list[list[Request]]:
    rng = random.Random(3)
    return [[Request(_slice(ids, rng, 2048), 1)] for _ in range(REPETITIONS)]


def _w4(ids: Ids) -> list[list[Request]]:
    rng = random.Random(4)
    repetitions = []
    for _ in range(REPETITIONS):
        shared = _slice(ids, rng, 1024)
        repetitions.append([Request(shared + _slice(ids, rng, 32), 32) for _ in range(32)])
    return repetitions


def _arrivals(ids: Ids, rate: int, repetition: int) -> list[Request]:
    rng = random.Random(1000 * rate + repetition)
    at, requests = 0.0, []
    for _ in range(40):
        prompt, out = rng.randint(32, 512), rng.randint(32, 128)
        requests.append(Request(_slice(ids, rng, prompt), out, round(at, 6)))
        at += rng.expovariate(rate)
    return requests


def main() -> None:
    parser = argparse.ArgumentParser(description="print one workload as JSON for `pagemill bench --workload`")
    parser.add_argument("name", help="W1, W2, W3, W4, W5r1, W5r2, W5r4 or W5r8")
    parser.add_argument("--repetition", type=int, default=0, choices=range(REPETITIONS))
    parser.add_argument("--model", type=Path, help="whose tokenizer is used; default: the demo model")
    args = parser.parse_args()
    requests = make(args.name, corpus(args.model or find_demo_model()))[args.repetition]
    items = [{"ids": r.ids, "n_out": r.n_out} | ({} if r.at is None else {"at": r.at}) for r in requests]
    json.dump(items, sys.stdout)
    print(f"{len(requests)} requests, digest {digest(requests)}", file=sys.stderr)


if __name__ == "__main__":
    main()
