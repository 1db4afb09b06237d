"""`check`: the scheduler's books against each other. Called when idle in production and after every step in tests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from cache_svc.blocks.invariants import check_conservation, check_pool
from scheduler_svc.core.memory import KvMemory
from scheduler_svc.core.params import SeqId
from scheduler_svc.core.queues import WaitingQueue
from scheduler_svc.core.running import RunningSet
from scheduler_svc.core.sequence import NO_LANE, Sequence, SequenceState


def check(
    sequences: Mapping[SeqId, Sequence], waiting: WaitingQueue, running: RunningSet | None, pipeline_depth: int
) -> list[str]:
    """What is wrong, one line each; empty when nothing is. Changes nothing."""
    problems: list[str] = []
    by_state = Counter(seq.state for seq in sequences.values())
    if by_state[SequenceState.FINISHED]:
        problems.append(f"{by_state[SequenceState.FINISHED]} finished sequences are still known")
    queued = [seq for seq in sequences.values() if seq.state in (SequenceState.WAITING, SequenceState.SWAPPED)]
    if len(queued) != len(waiting):
        problems.append(f"{len(queued)} sequences wait, {len(waiting)} are queued")
    if by_state[SequenceState.SWAPPED] != waiting.num_swapped:
        problems.append(f"{by_state[SequenceState.SWAPPED]} sequences are swapped, {waiting.num_swapped} are counted")
    problems.extend(f"sequence {s.seq_id}: {s.state.name} and {s.stash = }" for s in queued if _is_stash_odd(s))
    if sum(seq.service for seq in queued) != waiting.num_tokens:
        problems.append(f"{waiting.num_tokens} tokens are counted as waiting")
    problems.extend(f"waiting sequence {s.seq_id} holds something" for s in queued if _holds_something(s))
    num_running = 0 if running is None else running.num_running
    if by_state[SequenceState.RUNNING] != num_running:
        problems.append(f"{by_state[SequenceState.RUNNING]} sequences run, {num_running} are counted")
    if running is not None:
        stashes = [seq.stash.host_ids for seq in queued if seq.stash is not None]
        problems.extend(_check_running(running, pipeline_depth, stashes))
        problems.extend(_check_owners(running.memory, sequences.values()))
    return problems


def check_counts(memory: KvMemory) -> list[str]:
    """What is wrong with the counts of both tiers; O(1)."""
    problems = check_conservation(memory.device)
    if memory.host is not None:
        problems += [f"host tier: {problem}" for problem in check_conservation(memory.host)]
    return problems


def _holds_something(seq: Sequence) -> bool:
    return seq.lane != NO_LANE or seq.table is not None or bool(seq.num_reserved)


def _is_stash_odd(seq: Sequence) -> bool:
    return (seq.stash is not None) != (seq.state is SequenceState.SWAPPED)


def _check_running(running: RunningSet, pipeline_depth: int, stashes: list[list[int]]) -> list[str]:
    listed = list(running)
    problems = [problem for seq in listed for problem in _check_sequence(seq)]
    if len(listed) != running.num_running or len({seq.seq_id for seq in listed}) != len(listed):
        problems.append(f"{len(listed)} running sequences are listed, {running.num_running} are counted")
    if running.num_running > running.limits.max_seqs:
        problems.append(f"{running.num_running} sequences run, the limit is {running.limits.max_seqs}")
    if len(running.inflight) > pipeline_depth:
        problems.append(f"{len(running.inflight)} plans are in flight, the limit is {pipeline_depth}")
    memory = running.memory
    tables = [seq.table.block_ids for seq in listed if seq.table is not None]
    problems.extend(check_pool(running.pool, [*tables, memory.copies.device_refs()], running.fences.held_blocks()))
    if memory.host is not None:
        of_host = check_pool(memory.host, [*stashes, memory.copies.host_refs()], ())
        problems.extend(f"host tier: {problem}" for problem in of_host)
    elif stashes:
        problems.append(f"{len(stashes)} sequences are swapped without a host tier")
    waited_for = {seq.seq_id for seq in memory.prefix.expected_by()}
    if not waited_for <= {seq.seq_id for seq in listed}:
        problems.append(f"others wait for the blocks of sequences that do not run: {sorted(waited_for)}")
    num_reserved = sum(seq.num_reserved for seq in listed)
    if num_reserved != running.pool.num_reserved:
        problems.append(f"{running.pool.num_reserved} blocks are reserved, {num_reserved} explained")
    problems.extend(_check_lanes(running, listed))
    return problems


def _check_sequence(seq: Sequence) -> Iterable[str]:
    """A running sequence has a lane and slots for all that is planned."""
    if seq.lane == NO_LANE or seq.table is None:
        yield f"running sequence {seq.seq_id} has no lane or table"
    elif seq.num_planned > seq.table.num_slots:
        yield f"sequence {seq.seq_id}: {seq.num_planned} positions planned, {seq.table.num_slots} slots"
    if len(seq.token_ids) >= seq.token_limit:
        yield f"sequence {seq.seq_id}: {len(seq.token_ids)} tokens and still running, the limit is {seq.token_limit}"


def _check_owners(memory: KvMemory, sequences: Iterable[Sequence]) -> Iterable[str]:
    """What a sequence holds in either tier counts for its salt."""
    for seq in sequences:
        salt = seq.spec.cache_salt
        held = [] if seq.table is None else [memory.device.owner_of(block_id) for block_id in seq.table.block_ids]
        if memory.host is not None and seq.stash is not None:
            held += [memory.host.owner_of(block_id) for block_id in seq.stash.host_ids]
        if memory.device.shares is not None and held.count(salt) != len(held):
            yield f"sequence {seq.seq_id}: some of its blocks count for another salt"


def _check_lanes(running: RunningSet, listed: list[Sequence]) -> Iterable[str]:
    """Every lane is free, owned or held, once."""
    lanes = Counter([*running.lanes.free_lanes(), *running.fences.held_lanes(), *(seq.lane for seq in listed)])
    if lanes != Counter(range(running.limits.num_lanes)):
        yield f"lanes are not each in one place: {sorted(lanes.items())}"
