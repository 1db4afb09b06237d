"""Drives a runner as a scheduler would: scattered block tables, rows of any size mixed in one batch."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import torch

from executor_svc.batch import Batch
from executor_svc.runner import PagedRunner


@dataclass
class Row:
    ids: list[int]
    blocks: list[int]
    computed: int = 0
    logits: list[torch.Tensor] = field(default_factory=list)


def new_rows(runner: PagedRunner, prompts: list[list[int]], num_outputs: int, rng: random.Random) -> list[Row]:
    """Rows with block tables scattered over a pool that has a few blocks more than they need."""
    counts = [-(-(len(ids) + num_outputs) // runner.block_size) for ids in prompts]
    runner.allocate_kv(sum(counts) + 3)
    free = list(range(runner.num_blocks))
    rng.shuffle(free)
    return [Row(list(ids), [free.pop() for _ in range(n)]) for ids, n in zip(prompts, counts, strict=True)]


def forward(runner: PagedRunner, work: list[tuple[Row, int]]) -> torch.Tensor:
    """Run the next `n` tokens of each row; logits of those that reach the end of their ids."""
    block_size = runner.block_size
    ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    for row, n in work:
        span = range(row.computed, row.computed + n)
        ids += row.ids[row.computed : row.computed + n]
        positions += span
        slots += [row.blocks[p // block_size] * block_size + p % block_size for p in span]
    context_lens = [row.computed + n for row, n in work]
    width = max(-(-n // block_size) for n in context_lens)
    tables = torch.zeros(len(work), width, dtype=torch.int32)
    for i, (row, _) in enumerate(work):
        used = row.blocks[: -(-context_lens[i] // block_size)]
        tables[i, : len(used)] = torch.tensor(used, dtype=torch.int32)
    sample = [i for i, (row, _) in enumerate(work) if context_lens[i] == len(row.ids)]
    batch = Batch(
        torch.tensor(ids),
        torch.tensor(positions),
        torch.tensor(slots),
        [n for _, n in work],
        context_lens,
        tables,
        sample,
    )
    logits = runner.forward(batch)
    assert logits.shape == (len(sample), runner.vocab_size)
    assert logits.dtype == torch.float32
    for row, n in work:
        row.computed += n
    return logits


def greedy(
    runner: PagedRunner,
    prompts: list[list[int]],
    num_outputs: int,
    *,
    seed: int = 0,
    max_chunk: int = 1 << 30,
    max_rows: int = 1 << 30,
    budget: int = 1 << 30,
    keep_logits: bool = False,
) -> list[Row]:
    """Greedy continuations of all prompts in random batches of at most `max_rows` rows and `budget` tokens."""
    rng = random.Random(seed)
    rows = new_rows(runner, prompts, num_outputs, rng)
    ends = [len(row.ids) + num_outputs for row in rows]
    while live := [row for row, end in zip(rows, ends, strict=True) if len(row.ids) < end]:
        rng.shuffle(live)
        work, left = [], budget
        for row in live[:max_rows]:
            missing = len(row.ids) - row.computed
            n = min(missing, left, rng.randint(1, max_chunk) if max_chunk < missing else missing)
            if n > 0:
                work.append((row, n))
                left -= n
        logits = forward(runner, work)
        done = [row for row, _ in work if row.computed == len(row.ids)]
        for row, scores in zip(done, logits, strict=True):
            if keep_logits:
                row.logits.append(scores.clone())
            row.ids.append(int(scores.argmax()))
    return rows
