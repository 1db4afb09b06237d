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
from typing import Any

import pytest

from cache_svc.blocks.hashing import extend_chain
from pagemill.engine.v1 import executor_pb2 as pb
from scheduler_svc.core.events import FinishReason
from scheduler_svc.core.params import HostCache, PreemptionMode, SchedulerConfig
from tests.oracles.base import Geometry
from tests.oracles.direct import ACTIONS, TURN_S, DirectRig
from tests.oracles.kv import KvCounts

NUM_SEEDS = int(os.environ.get("PAGEMILL_KV_SEEDS", "20"))
NUM_STREAMS = 200
BLOCK_SIZE = 4
VOCAB = 1000
NUM_SEATS = 16
NEED = NUM_SEATS * 19
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
        rig.submit(prompt, rng.randint(4, 40), stops=stops, priority=rng.choice([0, 0, 0, 0, 1]))


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
        growth_reserve=rng.choice([0.0, 1.0]),
        prefix_cache=rng.random() < 0.4,  # without it whatever was swapped out must come back from there
        pipeline_depth=rng.choice([1, 2, 2, 3]),
        host_cache=rng.choice(list(HostCache)),
        preemption_mode=rng.choice([PreemptionMode.AUTO, PreemptionMode.SWAP]),
    )
    num_host_blocks = rng.choice([NEED, NEED, NEED // 4, 6])  # the last two are full most of the time
    rig = DirectRig(config, geometry(NEED * 3 // 10, num_host_blocks), seed=seed, most_late=rng.choice([0, 2, 6]))
    submit_workload(rig, seed)
    last_forced = 0

    def disturb() -> None:
        nonlocal last_forced
        if rig.num_steps - last_forced >= 5:
            last_forced = rig.num_steps
            for action in ("swap", "swap", rig.rng.choice(ACTIONS)):
                rig.force_some(action)
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


def test_ten_thousand_swaps_without_a_mismatch() -> None:
    """Blocks, counted at their return: each with the checksum that it had when it left."""
    outcomes = [campaign(seed) for seed in range(NUM_SEEDS)]
    assert all(outcome.counts.num_mismatches == 0 for outcome in outcomes)
    for what in ("num_swapped_in", "num_swapped_out", "num_cached_reads"):
        assert sum(getattr(outcome.counts, what) for outcome in outcomes) >= 500 * NUM_SEEDS, what


# Controls: what the campaign relies on must be able to fail


def disturbed(rig: DirectRig) -> None:
    submit_workload(rig, 1, 100)
    rig.drain(lambda: rig.force_some("swap") if rig.num_steps % 5 == 0 else None)


@pytest.mark.parametrize("gone", ["the scheduler's fence", "the executor's fence"])
def test_control_without_a_fence_ids_or_checks_fail(gone: str) -> None:
    """Copies that are reported before they have happened, or a batch that does not wait for those it depends on."""
    rig = DirectRig(CONFIG, geometry(NEED * 3 // 10, NEED), most_late=6, reports_early=gone == "the scheduler's fence")
    rig.executor.waits_for_copies = gone != "the executor's fence"
    with pytest.raises(AssertionError, match=r"before the copies|reads block|copied other bytes"):
        disturbed(rig)


def test_control_with_fences_the_same_run_passes() -> None:
    disturbed(DirectRig(CONFIG, geometry(NEED * 3 // 10, NEED), most_late=6))


# Preemption


@pytest.mark.parametrize("action", ACTIONS)
@pytest.mark.parametrize("depth", [1, 2])
def test_preemption_at_every_length(action: str, depth: int) -> None:
    """While its prompt is computed, at each border of a block, and with its last token in flight."""
    config = replace(CONFIG, max_prefill_chunk=3, pipeline_depth=depth, watermark=0.0)
    for length in range(1, 24):
        rig = DirectRig(config, geometry(40, 40), seed=length, most_late=3)
        target = rig.submit(range(9), 14)
        rig.submit(range(9), 20)
        rig.submit(range(50, 57), 20)
        done = False
        while target.end is None:
            rig.turn()
            seq = rig.scheduler._sequences.get(target.spec.seq_id)
            if not done and seq is not None and seq.seq_id in rig.running() and seq.num_planned >= length:
                rig.force(seq.seq_id, action)
                done = True
        rig.drain()
        assert done or length > 22 - depth


@pytest.mark.parametrize("share", [100, 60, 30])
@pytest.mark.parametrize("mode", PreemptionMode)
def test_b60_sixty_four_streams_on_a_part_of_the_pool(share: int, mode: PreemptionMode) -> None:
    config = replace(CONFIG, preemption_mode=mode)
    rig = DirectRig(config, geometry(NEED * share // 100, NEED), most_late=2)
    submit_workload(rig, 60, 64)
    rig.drain(lambda: rig.force_some(ACTIONS[rig.num_steps % len(ACTIONS)]) if rig.num_steps % 7 == 0 else None)
    assert rig.num_forced > 5
    assert all(stream.end is not None and stream.end.num_preemptions <= 2 for stream in rig.streams.values())


@pytest.mark.parametrize("mode", PreemptionMode)
@pytest.mark.parametrize("host_cache", HostCache)
def test_preemption_by_need_when_admission_leaves_no_room(mode: PreemptionMode, host_cache: HostCache) -> None:
    """Without the reserve for growth the scheduler itself must choose victims, all the time."""
    for seed in range(2):
        config = replace(CONFIG, preemption_mode=mode, host_cache=host_cache, growth_reserve=0.0)
        rig = DirectRig(config, geometry(NEED // 5, [NEED, 20][seed]), seed=seed, most_late=3)
        submit_workload(rig, seed, 60)
        rig.drain()
        assert rig.scheduler.stats().num_preemptions_total > 10
        assert all(stream.end is not None and stream.end.num_preemptions <= 2 for stream in rig.streams.values())


@pytest.mark.parametrize("num_host_blocks", [0, 3, 12])
def test_b66_four_choices_of_long_requests_on_a_small_host_pool(num_host_blocks: int) -> None:
    """Ten requests of four choices each whose prompts take chunks; the host pool is full or not there at all."""
    config = replace(CONFIG, preemption_mode=PreemptionMode.SWAP)
    rig = DirectRig(config, geometry(30, num_host_blocks), most_late=4)
    for request in range(10):
        for choice in range(4):
            rig.submit([request, *range(40)], 24, choice_index=choice)
    rig.drain(lambda: rig.force_some("swap") if rig.num_steps % 3 == 0 else None)
    stats = rig.scheduler.stats()
    assert stats.recomputed_tokens_total > 0 or num_host_blocks == 12
    assert (stats.swapped_in_blocks_total > 0) == (num_host_blocks == 12), "3 blocks hold none of these requests"


def test_preemption_before_the_first_row() -> None:
    """Admitted by a plan that had no tokens left for it: there is nothing to copy, and nothing to wait for."""
    rig = DirectRig(replace(CONFIG, max_num_batched_tokens=8, max_prefill_chunk=8), geometry(NEED, NEED))
    num_preempted = 0

    def disturb() -> None:
        nonlocal num_preempted
        for seq in list(rig.scheduler._sequences.values()):
            if seq.seq_id in rig.running() and seq.num_planned == 0:
                rig.force(seq.seq_id, "swap")
                num_preempted += 1

    for number in range(40):
        rig.submit([number] * (5 + number % 7), 3, priority=number % 3)
        rig.turn()
        disturb()
    rig.drain(disturb)
    assert num_preempted > 0


def test_b65_each_tier_adds_up_after_every_plan() -> None:
    """Evictions to the host tier, swaps and returns: `check_invariants` wants free + used + … = total of both."""
    rig = DirectRig(CONFIG, geometry(NEED * 3 // 10, NEED // 3), most_late=6, check_every=1)
    submit_workload(rig, 65, 60)
    rig.drain(lambda: rig.force_some("swap") if rig.num_steps % 5 == 0 else None)
    stats = rig.scheduler.stats()
    assert min(stats.evictions_total, stats.swapped_out_blocks_total, stats.swapped_in_blocks_total) > 0


def test_b68_the_preempted_do_not_starve_under_a_steady_flow() -> None:
    rig = DirectRig(CONFIG, geometry(40, 40), most_late=2)
    old = [rig.submit(range(n, n + 20), 28) for n in range(4)]
    for _ in range(400):
        rig.submit([rig.rng.randrange(VOCAB) for _ in range(6)], 6)
        rig.turn()
        if rig.num_steps in (8, 16, 24):
            for seq_id in set(rig.running()) & {stream.spec.seq_id for stream in old}:
                rig.force(seq_id, ACTIONS[rig.num_steps // 8 % len(ACTIONS)])
        if all(stream.end is not None for stream in old):
            break
    assert all(stream.end is not None for stream in old), "an old one still waits after 400 newer ones"
    rig.drain()


@pytest.mark.parametrize("mode", PreemptionMode)
@pytest.mark.parametrize("num_blocks", [26, NEED])
def test_b67_a_higher_priority_has_its_first_token_within_three_plans(mode: PreemptionMode, num_blocks: int) -> None:
    """Whether seats or blocks are short, whatever becomes of the victims; equals never push each other out."""
    config = replace(CONFIG, max_num_seqs=4, preemption_mode=mode)
    rig = DirectRig(config, geometry(num_blocks, NEED))
    low = [rig.submit([number, *range(8)], 28) for number in range(8)]
    for _ in range(8):
        rig.turn()
    assert rig.scheduler.stats().num_preemptions_total == 0, "equals"
    high = rig.submit([99, *range(70, 78)], 4, priority=5)
    begin = rig.num_steps
    while not high.ids:
        assert rig.turn()
    sampled_by = rig.num_steps - rig.scheduler.num_inflight_plans
    assert sampled_by - begin <= 3
    rig.drain()
    assert sum(stream.end.num_preemptions for stream in low if stream.end is not None) >= 1


# The executor dies


@pytest.mark.parametrize("seed", range(4))
def test_executor_killed_in_the_middle_of_copies(seed: int) -> None:
    """Whatever had been copied is gone with it: nothing of either tier may be read again."""
    rig = DirectRig(CONFIG, geometry(NEED * 3 // 10, NEED), seed=seed, most_late=6)
    submit_workload(rig, seed, 100)
    kills = 0

    def disturb() -> None:
        nonlocal kills
        if rig.num_steps % 4 == 0:
            rig.force_some("swap")
        if kills < 6 and rig.num_steps > 40 * (kills + 1) and rig.executor.copies.pending:
            kills += 1
            rig.kill()

    rig.drain(disturb)
    assert kills >= 3
    assert rig.executor.counts.num_killed_copies > 0


# Prefix cache


def test_prefix_cache_on_and_off_give_the_same_ids() -> None:
    outputs = []
    for is_on in (True, False):
        config = replace(CONFIG, prefix_cache=is_on)
        rig = DirectRig(config, geometry(NEED * 3 // 10, NEED), most_late=3)
        submit_workload(rig, 3, 100)
        rig.drain()
        outputs.append(rig.outputs())
        hits = sum(stream.cached for stream in rig.streams.values())
        assert hits > 0 if is_on else hits == 0
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize("blocks", [1, 2, 5])
@pytest.mark.parametrize("more", [-1, 0, 1])
def test_b50_b54_a_prompt_sent_again_has_all_but_its_last_token_cached(blocks: int, more: int) -> None:
    """Lengths at block borders, together and one after another; a restarted executor is cold."""
    length = blocks * BLOCK_SIZE + more
    rig = DirectRig(CONFIG, geometry(NEED))
    for _ in range(2):
        cold = rig.submit(range(length), 6)
        rig.drain()
        warm = [rig.submit(range(length), 6) for _ in range(3)]
        rig.drain()
        assert cold.cached == 0
        assert [stream.cached for stream in warm] == [(length - 1) // BLOCK_SIZE * BLOCK_SIZE] * 3
        rig.kill()


def test_a_prefix_asked_for_by_many_at_once_is_computed_once() -> None:
    rig = DirectRig(CONFIG, geometry(NEED * 2))
    prefix = list(range(40))
    for number in range(NUM_SEATS):
        rig.submit([*prefix, 100 + number], 4)
    rig.drain()
    computed = sum(stream.end.num_computed_tokens for stream in rig.streams.values() if stream.end is not None)
    assert computed == len(prefix) + NUM_SEATS


def test_b48_a_request_that_must_not_read_the_cache_does_not() -> None:
    rig = DirectRig(CONFIG, geometry(NEED))
    for length in (BLOCK_SIZE - 1, BLOCK_SIZE, BLOCK_SIZE + 1, 3 * BLOCK_SIZE):
        rig.submit(range(length), 3)
        rig.drain()
        again = rig.submit(range(length), 3, reads_prefix_cache=False)
        rig.drain()
        assert again.cached == 0
        assert again.end is not None
        assert again.end.num_computed_tokens == length


def test_b59_two_tenants_never_hit_each_other() -> None:
    """The tokens are alike, so only the tags of who wrote a block can tell; hits within a tenant go on."""
    rig = DirectRig(CONFIG, geometry(NEED))
    cached: dict[str, list[int]] = {"a": [], "b": []}
    for tenant in ("a", "b", "a", "b"):
        stream = rig.submit(range(30), 6, tenant=tenant)
        rig.drain()
        cached[tenant].append(stream.cached)
    assert cached == {"a": [0, 28], "b": [0, 28]}
    assert rig.executor.counts.num_foreign_reads == 0


@pytest.mark.parametrize("seed", range(2))
def test_b59_two_tenants_under_pressure_in_both_tiers(seed: int) -> None:
    rig = DirectRig(CONFIG, geometry(NEED * 3 // 10, NEED), seed=seed, most_late=4)
    rng = random.Random(seed)
    for _ in range(100):
        rig.submit([*range(rng.choice([8, 16, 24])), rng.randrange(VOCAB)], rng.randint(4, 20), tenant=rng.choice("ab"))
    rig.drain(lambda: rig.force_some("swap") if rig.num_steps % 5 == 0 else None)
    assert rig.executor.counts.num_foreign_reads == 0
    for tenant in "ab":
        assert sum(stream.cached for stream in rig.streams.values() if stream.tenant == tenant) > 0


class Colliding(bytes):
    """A key whose `hash()` is that of every other."""

    def __hash__(self) -> int:
        return 7


def test_b55_forged_collisions_of_hash_are_harmless(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every key has the same `hash()`: dictionaries degrade, and still nobody gets another's block."""
    made = []

    def extend(keys: list[bytes], *args: Any) -> None:
        before = len(keys)
        extend_chain(keys, *args)
        keys[before:] = map(Colliding, keys[before:])
        made.extend(keys[before:])

    monkeypatch.setattr("scheduler_svc.core.prefix.extend_chain", extend)
    rig = DirectRig(CONFIG, geometry(NEED // 2, NEED // 2), most_late=2)
    for seed in range(2):
        submit_workload(rig, seed, 30)
    rig.submit([2**31 - 1] * 9, 4, tenant="")
    rig.submit([2**31 - 1] * 9, 4, tenant="\0")
    rig.drain()
    assert len(set(map(hash, made))) == 1
    assert len(set(made)) > 50
    assert sum(stream.cached for stream in rig.streams.values()) > 0


def test_a_row_that_fails_spoils_nothing_for_those_that_share_its_prefix() -> None:
    """Its blocks hold garbage from there on: nobody may find them, those included that waited for them."""
    rig = DirectRig(CONFIG, geometry(NEED, NEED), most_late=2)
    doomed = {seq_id for seq_id in range(1, 41) if seq_id % 4 == 1}
    rig.executor.fault = lambda lane: (
        pb.ROW_ERROR_CODE_NUMERICAL if lane.seed in doomed and lane.position >= 8 + lane.seed % 16 else None
    )
    for number in range(40):
        rig.submit([number // 4, *range(28)], 8)
    rig.drain()
    for seq_id, stream in rig.streams.items():
        assert stream.end is not None
        assert (stream.end.reason is FinishReason.NUMERICAL) == (seq_id in doomed)


# Aborts


@pytest.mark.parametrize("kind", ["abort", "deadline"])
def test_b71_b75_b78_an_end_at_every_moment_gives_everything_back(kind: str) -> None:
    """Queued, in its first chunk, decoding, going out, swapped, coming in: one run for each turn of a life."""
    phases: set[str] = set()
    config = replace(CONFIG, max_prefill_chunk=6, max_num_seqs=4)
    for turn in range(60):
        rig = DirectRig(config, geometry(24, 24), seed=turn, most_late=4)
        deadline = (turn + 0.5) * TURN_S if kind == "deadline" else None
        for number in range(6):
            rig.submit([*range(9), number], 12, deadline=deadline if number == 4 else None)
        target = rig.streams[5]
        for now in range(turn):
            rig.turn()
            if now % 6 == 5 and target.spec.seq_id in rig.running():
                rig.force(target.spec.seq_id, "swap")
        if target.end is None:
            seq = rig.scheduler._sequences[target.spec.seq_id]
            copies = " with copies" if rig.executor.copies.pending else ""
            phases.add(f"{seq.state.value}{copies}")
            known = len(target.ids)
            if kind == "abort":
                rig.cancel(target)
            rig.drain()
            assert len(target.ids) == known
            assert target.end is not None
            assert target.end.reason is (FinishReason.CANCELLED if kind == "abort" else FinishReason.DEADLINE)
        rig.drain()
    assert {"waiting", "running"} <= phases
    assert any(phase.startswith("swapped") for phase in phases), phases
    assert any(phase.endswith("with copies") for phase in phases), phases


def test_b74_aborts_beside_a_long_prefill() -> None:
    rig = DirectRig(CONFIG, geometry(NEED, 20), most_late=3)
    for number in range(50):
        long = rig.submit([number, *range(100, 220)], 2)
        doomed = rig.submit([number, 1, 2], 20)
        for _ in range(number % 6):
            rig.turn()
        if doomed.end is None:
            rig.cancel(doomed)
        while long.end is None:
            assert rig.turn()
    rig.drain()
    assert all(stream.end is not None for stream in rig.streams.values())


def test_b57_b58_accounts_are_exact_after_a_mixed_load_goes_idle() -> None:
    """256 requests with shared prefixes of exact block multiples; every block is free or cached at the end."""
    rig = DirectRig(CONFIG, geometry(NEED // 2, 40), most_late=3, check_every=4)
    for number in range(256):
        rig.submit([*range(BLOCK_SIZE * (number % 5)), *range(500 + number % 7, 500 + number % 7 + BLOCK_SIZE)], 8)
    rig.drain()
    assert rig.scheduler.stats().blocks_cached > 0
