"""Times attention alone, as the runner calls it: `begin`, then `write` and `attend` in each of SmolLM2's 30 layers.

Shapes are those that W2 and W4 bring (`workloads.py`), keys and values are random, block tables scattered. Each shape
is timed --rounds times; shapes and backends alternate, so that all see the same machine. Milliseconds per step, median
[least]. Where other processes compute too, only CPU time with --threads 1 says something: two threads that wait for
each other and for a CPU take ten times as long.

    python -m bench.bench_attention                      # bfloat16
    python -m bench.bench_attention --kv-dtype int8 --shape w4-decode
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from executor_svc.attention.base import AttentionBackend
from executor_svc.attention.native import NativeBackend
from executor_svc.attention.sdpa import SdpaBackend
from executor_svc.batch import Batch
from executor_svc.kv.geometry import KvGeometry
from executor_svc.kv.pool import KvPool
from executor_svc.native.library import load
from executor_svc.runner import BACKENDS, DTYPES, KV_DTYPES

LAYERS, HEADS, KV_HEADS, HEAD_DIM = 30, 9, 3, 64


@dataclass
class Row:
    """`query` new tokens of a row that then has `context`; the first `shared` positions are those of its `family`."""

    query: int
    context: int
    shared: int = 0
    family: int = 0


def shapes() -> dict[str, list[Row]]:
    """By name. Contexts of W2 in mid-flight are spread evenly over what its prompts and outputs allow."""
    w2 = [Row(1, 48 + 560 * i // 53) for i in range(54)]
    own = [1056 + 1 + i % 32 for i in range(32)]
    return {
        "w2-decode": w2,
        "w2-mixed": [*w2[:40], Row(256, 256), Row(200, 400)],
        "w4-decode": [Row(1, context, 1024) for context in own],
        "w4-prefill": [Row(32, 1056, 1024) for _ in range(16)],
        "w4-apart": [Row(1, context) for context in own],
        "families": [Row(1, context, 512, i % 4) for i, context in enumerate(own)],
        "system-prompt": [Row(1, 100 + 10 * i, 64) for i in range(32)],
        "one-long": [Row(1, 2000)],
    }


def make_batch(rows: Sequence[Row], block_size: int) -> tuple[Batch, int]:
    """The batch and the number of blocks its pool needs."""
    rng = random.Random(0)
    own = [-(-row.context // block_size) - row.shared // block_size for row in rows]
    heads = {row.family: row.shared // block_size for row in rows if row.shared}
    free = list(range(sum(own) + sum(heads.values())))
    num_blocks = len(free)
    rng.shuffle(free)
    families = {family: [free.pop() for _ in range(count)] for family, count in heads.items()}
    tables = [
        (families[row.family] if row.shared else []) + [free.pop() for _ in range(count)]
        for row, count in zip(rows, own, strict=True)
    ]
    width = max(map(len, tables))
    positions = [range(row.context - row.query, row.context) for row in rows]
    slots = [
        table[p // block_size] * block_size + p % block_size
        for table, span in zip(tables, positions, strict=True)
        for p in span
    ]
    return Batch(
        torch.zeros(len(slots), dtype=torch.int64),
        torch.tensor([p for span in positions for p in span]),
        torch.tensor(slots),
        [row.query for row in rows],
        [row.context for row in rows],
        torch.tensor([table + [0] * (width - len(table)) for table in tables], dtype=torch.int32),
        [],
    ), num_blocks


@dataclass
class Case:
    """One shape with its pool, and the seconds of each round."""

    batch: Batch
    pool: KvPool
    query: torch.Tensor
    kv: torch.Tensor
    begin_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)
    step_s: list[float] = field(default_factory=list)

    def run(self, backend: AttentionBackend) -> None:
        """One step, timed."""
        started, cpu = time.perf_counter(), time.process_time()
        step = backend.begin(self.batch, self.pool)
        self.begin_s.append(time.perf_counter() - started)
        for layer in range(LAYERS):
            step.write(layer, self.kv)
            step.attend(layer, self.query)
        self.step_s.append(time.perf_counter() - started)
        self.cpu_s.append(time.process_time() - cpu)


def make_case(rows: Sequence[Row], block_size: int, dtype: torch.dtype, kv_dtype: torch.dtype) -> Case:
    torch.manual_seed(0)
    batch, num_blocks = make_batch(rows, block_size)
    pool = KvPool(KvGeometry(LAYERS, KV_HEADS, HEAD_DIM, block_size, kv_dtype), num_blocks)
    slots = torch.arange(num_blocks * block_size)
    index = pool.blocks.store_index(slots)
    for layer in range(LAYERS):
        pool.blocks.store(layer, index, torch.randn(slots.numel(), 2, KV_HEADS, HEAD_DIM, dtype=dtype))
    num_tokens = batch.token_ids.numel()
    query = torch.randn(num_tokens, HEADS, HEAD_DIM, dtype=dtype)
    return Case(batch, pool, query, torch.randn(num_tokens, 2, KV_HEADS, HEAD_DIM, dtype=dtype))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", action="append", choices=list(shapes()), help="default: all")
    parser.add_argument("--dtype", default="bfloat16", choices=list(DTYPES))
    parser.add_argument("--kv-dtype", choices=list(KV_DTYPES), help="default: as --dtype")
    parser.add_argument("--attention", action="append", choices=list(BACKENDS), help="default: all")
    parser.add_argument("--block-size", type=int, default=16, help="positions per block")
    parser.add_argument("--rounds", type=int, default=15, help="steps per shape")
    parser.add_argument("--threads", type=int, help="default: torch's")
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    dtype, kv_dtype = DTYPES[args.dtype], KV_DTYPES[args.kv_dtype or args.dtype]
    backends: dict[str, AttentionBackend] = {"sdpa": SdpaBackend(), "native": NativeBackend(load())}
    with torch.inference_mode():
        cases = {
            (name, backend): make_case(rows, args.block_size, dtype, kv_dtype)
            for name, rows in shapes().items()
            if not args.shape or name in args.shape
            for backend in args.attention or BACKENDS
        }
        for number in range(args.rounds + 2):
            for (_, backend), case in cases.items():
                if number == 2:  # oneDNN builds its kernels in the first rounds
                    case.begin_s, case.cpu_s, case.step_s = [], [], []
                case.run(backends[backend])
    for (name, backend), case in cases.items():
        parts = {"step": case.step_s, "CPU": case.cpu_s, "of these begin": case.begin_s}
        said = (f"{part} {statistics.median(s) * 1e3:.2f} [{min(s) * 1e3:.2f}]" for part, s in parts.items())
        print(f"{name}, {backend}: {', '.join(said)} ms")
    print(json.dumps({**vars(args), "threads": torch.get_num_threads(), "isa": load().isa, "torch": torch.__version__}))


if __name__ == "__main__":
    main()
