"""`RunningSet`: what one executor has been told, and what of it is still in flight.

One per executor session. It owns the executor's blocks, lanes and fences, the sequences that run there and the plans
whose results are not in. It decides nothing: who is admitted, grows or makes room is decided by `admission` and
`growth`. Losing the executor is dropping this object.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass

from cache_svc.blocks.geometry import blocks_for
from cache_svc.blocks.pool import BlockPool
from cache_svc.blocks.table import BlockTable
from scheduler_svc.core.fences import Fences, LanePool
from scheduler_svc.core.limits import StepLimits
from scheduler_svc.core.params import SeqId
from scheduler_svc.core.plan import Admit, StepPlan
from scheduler_svc.core.preemption import is_immune
from scheduler_svc.core.sequence import Sequence, SequenceState


@dataclass(frozen=True, slots=True)
class InFlight:
    """A plan whose result is not in."""

    step_id: int
    rows: list[Sequence]
    """In the batch's order. One that has ended meanwhile is recognised by its `finish_reason`."""
    silent: frozenset[int]
    """Rows that give no token, because their prompt goes on."""


class RunningSet:
    """The sequences of one executor. A running sequence is in `decoding` or `prefilling`; others there are leftovers.

    Leftovers (sequences that ended or were preempted) are swept out before the next batch, because taking each out of
    the middle of a list at once would cost more than a decode step when hundreds end together. A sequence never starts
    in the plan that preempts it, so none is in the lists twice.
    """

    def __init__(self, limits: StepLimits, applied_step_id: int) -> None:
        self.limits = limits
        self.pool = BlockPool(limits.num_blocks)
        self.lanes = LanePool(limits.num_lanes)
        self.fences = Fences(self.pool, self.lanes, applied_step_id)
        self.decoding: list[Sequence] = []
        self.prefilling: list[Sequence] = []
        self.inflight: deque[InFlight] = deque()
        self.num_running = 0
        self.last_victim: SeqId | None = None
        self.last_row_lanes: list[int] = []
        """The lanes of the last plan's batch, which `repeat_decode` refers to."""
        self._priorities: Counter[int] = Counter()
        self._has_leftovers = False

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

    def is_settled(self, seq: Sequence) -> bool:
        """Whether no plan in flight has touched the sequence."""
        return seq.last_step_id <= self.fences.applied_step_id

    def blocks_to_start(self, seq: Sequence) -> tuple[int, int]:
        """Blocks that the sequence needs when it starts, and those to reserve for its growth.

        At the start it gets blocks for all known tokens and the first one after, so that a prompt which has begun can
        always be computed to its end, however it is cut into chunks.
        """
        block_size = self.limits.block_size
        at_start = blocks_for(min(len(seq.token_ids) + 1, seq.position_limit), block_size)
        at_end = blocks_for(seq.position_limit, block_size) if is_immune(seq) else at_start
        return at_start, at_end - at_start

    def start(self, seq: Sequence, step_id: int, now: float) -> Admit:
        """Gives a waiting sequence a lane and its blocks, both of which must be there; returns what to tell."""
        num_blocks, num_reserved = self.blocks_to_start(seq)
        block_ids = self.pool.allocate(num_blocks)
        assert block_ids is not None
        assert self.pool.reserve(num_reserved)
        lane, generation = self.lanes.take()
        table = BlockTable(self.limits.block_size)
        table.extend(block_ids)
        seq.start(lane, table, num_reserved, now)
        seq.last_step_id = step_id
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
            num_cached_tokens=0,
            block_ids=block_ids,
            sampling=spec.sampling,
            stop_token_ids=spec.stop_token_ids,
            choice_index=spec.choice_index,
        )

    def grow(self, seq: Sequence, plan: StepPlan) -> bool:
        """Gives a running sequence the blocks for its next position; False, changing nothing, when there are none."""
        assert seq.table is not None
        num_blocks = seq.table.num_missing(seq.num_planned + 1)
        if seq.num_reserved:
            block_ids = self.pool.allocate(num_blocks, reserved=True)
            seq.num_reserved -= num_blocks
        else:
            block_ids = self.pool.allocate(num_blocks)
        if block_ids is None:
            return False
        seq.grow(block_ids)
        seq.last_step_id = plan.step_id
        plan.append_lanes.extend([seq.lane] * num_blocks)
        plan.append_block_ids.extend(block_ids)
        return True

    def take_away(self, seq: Sequence) -> None:
        """Takes lane, blocks and reservation of a running sequence that is about to be requeued or to finish."""
        assert seq.table is not None
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
