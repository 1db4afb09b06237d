"""Blocks move between memories, are shared and taken away at any moment, and no id ever changes.

`tests.oracles.direct` drives the real scheduler core against the KV-checking oracle, which computes ids only from what
was written into blocks. Every run here checks every stream against the oracle's own definition of it, every fence, and
the checksum of every block that was copied. The first campaign also runs each seed with a pool that is never short.

`PAGEMILL_KV_SEEDS=500` makes the campaign as long as you like (default 20 seeds, about half a second each).
"""

from __future__ import annotations

import os
import random
from dataclasses import dataclass, replace
from functools import cache

import pytest

from scheduler_svc.core.events import FinishReason
from scheduler_svc.core.params import HostCache, PreemptionMode, SchedulerConfig
from tests.oracles.base import Geometry
from tests.oracles.direct import ACTIONS, DirectRig
from tests.oracles.kv import KvCounts

NUM_SEEDS = int(os.environ.get("PAGEMILL_KV_SEEDS", "20"))
NUM_STREAMS = 200
BLOCK_SIZE = 4
VOCAB = 1000
NUM_SEATS = 16
NEED = NUM_SEATS * 15
"""Blocks that as many streams as have seats use when they are at their longest."""
CONFIG = SchedulerConfig(
    max_num_batched_tokens=64, max_num_seqs=NUM_SEATS, max_prefill_chunk=24, max_skip_ahead=4, watermark=0.0
)


def geometry(num_blocks: int, num_host_blocks: int = 0) -> Geometry:
    """Rates at which neither way of preempting always wins: 8 tokens cost as much as a block there and back."""
    return Geometry(
        block_size=BLOCK_SIZE,
        num_blocks=num_blocks,
        num_host_blocks=num_host_blocks,
        max_rows=NUM_SEATS,
        max_tokens=64,
        num_lanes=NUM_SEATS * 3,
        vocab_size=VOCAB,
        kv_dtype="digest",
        bytes_per_block=1 << 16,
        swap_out_bytes_per_s=1 << 24,
        swap_in_bytes_per_s=1 << 24,
        prefill_tokens_per_s=1024.0,
    )


def submit_workload(rig: DirectRig, seed: int, count: int = NUM_STREAMS) -> None:
    """Prompts that share a few prefixes, of any length around block borders; some are sent twice."""
    rng = random.Random(seed)
    prefixes = [[rng.randrange(VOCAB) for _ in range(rng.randint(3, 24))] for _ in range(6)]
    prompt: list[int] = []
    for _ in range(count):
        if not prompt or rng.random() < 0.9:
            prompt = rng.choice(prefixes) + [rng.randrange(VOCAB) for _ in range(rng.randint(0, 12))]
        stops = frozenset(rng.sample(range(VOCAB), 20)) if rng.random() < 0.3 else frozenset()
        rig.submit(prompt, rng.randint(4, 28), stops=stops, priority=rng.choice([0, 0, 0, 0, 1]))


@dataclass(frozen=True)
class Outcome:
    """What one seed gave."""

    small: dict[int, list[int]]
    large: dict[int, list[int]]
    aborted: frozenset[int]
    counts: KvCounts
    num_steps: int
    num_preemptions: int
    num_forced: int


@cache
def campaign(seed: int) -> Outcome:
    """One seed with 30 % of the blocks and everything going wrong, and with all of them and nothing going wrong."""
    large = DirectRig(CONFIG, geometry(NEED * 4))
    submit_workload(large, seed)
    large.drain()
    rng = random.Random(seed)
    config = replace(
        CONFIG,
        pipeline_depth=rng.choice([1, 2, 2, 3]),
        host_cache=rng.choice(list(HostCache)),
        preemption_mode=rng.choice([PreemptionMode.AUTO, PreemptionMode.SWAP]),
    )
    num_host_blocks = rng.choice([NEED, NEED, NEED // 4, 6])  # the last two are full most of the time
    rig = DirectRig(config, geometry(NEED * 3 // 10, num_host_blocks), seed=seed, most_late=rng.choice([0, 2, 6]))
    submit_workload(rig, seed)
    actions = [ACTIONS[0], ACTIONS[0], *ACTIONS]

    def disturb() -> None:
        if rig.num_steps % 5 == 0:
            rig.force_some(rig.rng.choice(actions))
        if rig.rng.random() < 0.02:
            rig.cancel_some()

    rig.drain(disturb)
    aborted = {n for n, s in rig.streams.items() if s.end is not None and s.end.reason is FinishReason.CANCELLED}
    stats = rig.scheduler.stats()
    return Outcome(
        rig.outputs(),
        large.outputs(),
        frozenset(aborted),
        rig.executor.counts,
        rig.num_steps,
        stats.num_preemptions_total,
        rig.num_forced,
    )


@pytest.mark.parametrize("seed", range(NUM_SEEDS))
def test_streams_under_pressure_equal_those_of_a_large_pool(seed: int) -> None:
    outcome = campaign(seed)
    assert outcome.num_forced > 50, "no pressure, nothing tested"
    for seq_id, ids in outcome.small.items():
        whole = outcome.large[seq_id]
        assert ids == (whole[: len(ids)] if seq_id in outcome.aborted else whole)
