"""`RunningSet`: what one executor has been told, and what of it is still in flight.

One per executor session. It owns the executor's blocks, lanes and fences, the sequences that run there and the plans
whose results are not in. It decides nothing: who is admitted, grows or makes room is decided by `admission` and
`growth`. Losing the executor is dropping this object.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, replace

from cache_svc.blocks.geometry import blocks_for
from cache_svc.blocks.residency import ResidencySampler
from cache_svc.blocks.table import BlockTable
from scheduler_svc.core.costs import BlockCosts
from scheduler_svc.core.fences import Fences, LanePool
from scheduler_svc.core.limits import StepLimits
from scheduler_svc.core.memory import KvMemory
from scheduler_svc.core.pace import StepPace
from scheduler_svc.core.params import SeqId
from scheduler_svc.core.plan import Admit, StepPlan
from scheduler_svc.core.preemption import Victim, is_immune
from scheduler_svc.core.sequence import Sequence, SequenceState


@dataclass(frozen=True, slots=True)
class InFlight:
    """A plan whose result is not in."""

    step_id: int
    rows: list[Sequence]
    """In the batch's order. One that has ended meanwhile is recognised by its `finish_reason`."""
    silent: frozenset[int]
    """Rows that give no token, because their prompt goes on."""
    chunk_ends: list[tuple[Sequence, int]]
    """Sequences with a chunk in the plan, and the positions they have computed with it."""


@dataclass(frozen=True, slots=True)
class Need:
    """What a waiting sequence takes when it starts now."""

    num_blocks: int
    """Blocks of its table."""
    num_taken: int
    """Allocatable blocks that go: new ones, and kept ones that it uses again."""
    num_reserved: int
    """Further blocks that are promised to it."""
    num_cached: int
    """Leading positions that it need not compute."""
    device_ids: list[int | None]
    """Its leading blocks that are there; None: to be brought from the host tier."""
    host_ids: list[int]
    """For each None, in order."""
    should_wait: bool
    """Whether another sequence is computing what it would compute next."""


class RunningSet:
    """The sequences of one executor. A running sequence is in `decoding` or `prefilling`; others there are leftovers.

    Leftovers (sequences that ended or were preempted) are swept out before the next batch, because taking each out of
    the middle of a list at once would cost more than a decode step when hundreds end together. A sequence never starts
    in the plan that preempts it, so none is in the lists twice.
    """

    def __init__(self, limits: StepLimits, applied_step_id: int, residency: ResidencySampler | None = None) -> None:
        self.limits = limits
        self.memory = KvMemory(limits, residency)
        self.pool = self.memory.device
        self.lanes = LanePool(limits.num_lanes)
        self.fences = Fences(self.pool, self.lanes, applied_step_id)
        self.decoding: list[Sequence] = []
        self.prefilling: list[Sequence] = []
        self.inflight: deque[InFlight] = deque()
        self.num_running = 0
        self.last_victim: SeqId | None = None
        self.last_row_lanes: list[int] = []
        """The lanes of the last plan's batch, which `repeat_decode` refers to."""
        self.num_mixed = 0
        """Plans in a row with decode rows and prompts that the pace cut; see `pace.NUM_MIXED`."""
        self._priorities: Counter[int] = Counter()
        self._has_leftovers = False

    def reprice(self, costs: BlockCosts, pace: StepPace) -> None:
        """Copying and computing cost this from now on."""
        self.limits = replace(self.limits, costs=costs, pace=pace)
        self.memory.reprice(self.limits)

    def __iter__(self) -> Iterator[Sequence]:
        """Every running sequence once."""
        for seq in self.decoding:
            if seq.state is SequenceState.RUNNING:
                yield seq
        for seq in self.prefilling:
            if seq.state is SequenceState.RUNNING:
                yield seq

    @property
    def lowest_priority(self) -> int | None:
        """The lowest priority that runs; None when nothing does."""
        return min(self._priorities) if self._priorities else None

    @property
    def num_leaving(self) -> int:
        """Blocks that nobody uses any more but that a plan or a copy in flight may still touch."""
        return self.pool.num_in_flight + self.memory.copies.num_leaving()

    def is_settled(self, seq: Sequence) -> bool:
        """Whether no plan in flight has touched the sequence."""
        return seq.last_step_id <= self.fences.applied_step_id

    def need(self, seq: Sequence) -> Need:
        """What the sequence takes when it starts now.

        It gets blocks for all known tokens and the first one after, so that a prompt which has begun can always be
        computed to its end, however it is cut into chunks.
        """
        block_size = self.limits.block_size
        at_start = blocks_for(min(len(seq.token_ids) + 1, seq.position_limit), block_size)
        at_end = blocks_for(seq.position_limit, block_size) if is_immune(seq) else at_start
        match = self.memory.prefix.match(seq)
        device_ids, host_ids = match.device_ids, match.host_ids
        num_cached = len(device_ids) * block_size
        if seq.stash is not None:
            lead = device_ids[: device_ids.index(None)] if None in device_ids else device_ids
            host_ids = seq.stash.host_ids[len(lead) :]
            device_ids = [*lead, *[None] * len(host_ids)]
            num_cached = max(len(lead) * block_size, seq.stash.num_positions)
        hits = [block_id for block_id in device_ids if block_id is not None]
        return Need(
            num_blocks=at_start,
            num_taken=at_start - len(hits) + self.pool.num_cached_in(hits),
            num_reserved=at_end - at_start,
            num_cached=min(num_cached, len(seq.token_ids) - 1),
            device_ids=device_ids,
            host_ids=host_ids,
            should_wait=match.should_wait and seq.stash is None,
        )

    def start(self, seq: Sequence, need: Need, step_id: int, now: float) -> Admit:
        """Gives a waiting sequence a lane and its blocks, all of which must be there; returns what to tell.

        Blocks that come from the host tier are copied by this plan, while its batch runs; the sequence's own rows
        begin with the next one.
        """
        table = self._fill_table(seq, need)
        assert self.pool.reserve(need.num_reserved)
        lane, generation = self.lanes.take()
        seq.start(lane, table, need.num_reserved, need.num_cached, now)
        seq.last_step_id = step_id
        seq.first_row_step_id = step_id + 1 if need.host_ids else step_id
        seq.num_found = sum(1 for block_id in need.device_ids if block_id is not None)
        seq.prefix.num_published = need.num_cached // self.limits.block_size
        self.memory.prefix.expect(seq, need.num_cached + self.limits.max_chunk)
        self.num_running += 1
        self._priorities[seq.priority] += 1
        self.prefilling.append(seq)
        self.prefilling.sort(key=_rank)
        spec = seq.spec
        return Admit(
            lane=lane,
            generation=generation,
            token_ids=seq.token_ids.copy(),
            num_prompt_tokens=seq.prompt_len,
            num_cached_tokens=need.num_cached,
            block_ids=table.block_ids.copy(),
            sampling=spec.sampling,
            stop_token_ids=spec.stop_token_ids,
            choice_index=spec.choice_index,
        )

    def _fill_table(self, seq: Sequence, need: Need) -> BlockTable:
        """A table of the blocks that are there and new ones, with copies queued into the latter from the host tier."""
        memory = self.memory
        hits = [block_id for block_id in need.device_ids if block_id is not None]
        memory.use_again(hits)
        if memory.host is not None and seq.stash is None:
            memory.host.retain(need.host_ids)  # before blocks are taken: that may evict in the host tier
        new = memory.allocate(need.num_blocks - len(hits), owner=seq.spec.cache_salt)
        assert new is not None
        fresh, sources = iter(new), iter(need.host_ids)
        table = BlockTable(self.limits.block_size)
        table.extend([next(fresh) if block_id is None else block_id for block_id in need.device_ids])
        table.extend(list(fresh))
        for index, block_id in enumerate(need.device_ids):
            if block_id is None:
                assert memory.host is not None
                source = next(sources)
                memory.copies.swap_in(source, table.block_ids[index], memory.host.key_of(source))
        if memory.host is not None:
            memory.host.release(need.host_ids if seq.stash is None else seq.stash.host_ids)
        seq.stash = None
        return table

    def grow(self, seq: Sequence, plan: StepPlan) -> bool:
        """Gives a running sequence the blocks for its next position; False, changing nothing, when there are none."""
        assert seq.table is not None
        self.memory.publish(seq, seq.num_settled)
        num_blocks = seq.table.num_missing(seq.num_planned + 1)
        if seq.num_reserved:
            block_ids = self.memory.allocate(num_blocks, reserved=True, owner=seq.spec.cache_salt)
            seq.num_reserved -= num_blocks
        else:
            block_ids = self.memory.allocate(num_blocks, owner=seq.spec.cache_salt)
        if block_ids is None:
            return False
        seq.grow(block_ids)
        seq.last_step_id = plan.step_id
        plan.append_lanes.extend([seq.lane] * num_blocks)
        plan.append_block_ids.extend(block_ids)
        return True

    def victim(self, seq: Sequence) -> Victim:
        """The figures of a running sequence that is to make room."""
        assert seq.table is not None
        pool, host = self.pool, self.memory.host
        block_ids = seq.table.block_ids
        num_planned = seq.table.num_blocks(seq.num_planned)
        num_there = 0
        if host is not None:
            keys = (pool.key_of(block_id) for block_id in block_ids[:num_planned])
            num_there = sum(1 for key in keys if key is not None and host.lookup(key) is not None)
        num_freed = sum(1 for block_id in block_ids if pool.num_refs(block_id) == 1)
        return Victim(num_planned, num_freed, num_planned - num_there)

    def settle_chunks(self, record: InFlight, failed: set[SeqId]) -> None:
        """The plan's result is in: what its chunks filled becomes known."""
        for seq, num_positions in record.chunk_ends:
            if seq.state is SequenceState.RUNNING and seq.seq_id not in failed:
                seq.num_computed = num_positions
                self.memory.publish(seq, num_positions)

    def take_away(self, seq: Sequence, *, is_sound: bool = True) -> None:
        """Takes lane, blocks and reservation of a running sequence that is about to be requeued or to finish.

        What it has computed stays findable, unless it is not sound.
        """
        assert seq.table is not None
        if is_sound:
            self.memory.publish(seq, seq.num_settled)
        self.memory.prefix.leave(seq)
        self.fences.drop_blocks(seq.table.clear(), seq.last_step_id)
        self.fences.drop_lane(seq.lane)
        self.pool.unreserve(seq.num_reserved)
        self.num_running -= 1
        self._priorities[seq.priority] -= 1
        if not self._priorities[seq.priority]:
            del self._priorities[seq.priority]
        self._has_leftovers = True

    def sweep(self) -> bool:
        """Drops leftovers from the lists and moves sequences whose whole prompt is planned to `decoding`.

        Returns whether there were leftovers.
        """
        had_leftovers = self._has_leftovers
        if had_leftovers:
            self._has_leftovers = False
            running = SequenceState.RUNNING
            self.decoding = [s for s in self.decoding if s.state is running]
            self.prefilling = [s for s in self.prefilling if s.state is running]
        if self.prefilling:
            self.decoding += [s for s in self.prefilling if s.num_planned >= s.prefill_len]
            self.prefilling = [s for s in self.prefilling if s.num_planned < s.prefill_len]
        return had_leftovers


def _rank(seq: Sequence) -> int:
    return -seq.priority
