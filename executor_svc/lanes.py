"""The mirror: what the executor remembers of each lane, as columns that a step can gather from.

Everything that changes a lane is in this file: `LaneMirror.apply` (a plan's state operations, in their order) and
`LaneMirror.commit` (what a step computed and sampled). All arrays are allocated once; no plan makes them grow.

A lane is FREE, LIVE or BROKEN. An operation that does not fit breaks its lane and changes nothing else; the rows of a
broken or free lane fail with BAD_ROW, and only a release makes the lane free again. So one wrong operation costs one
sequence, and nothing it says is ever used as an index.
"""

from __future__ import annotations

import logging
import zlib
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from executor_svc.plans import AdmitOp, DecodedPlan, Int32s, LaneSampling
from pagemill.logs import kv

log = logging.getLogger(__name__)

Int64s = NDArray[np.int64]
Bools = NDArray[np.bool_]


class LaneState(IntEnum):
    """See the head of this file."""

    FREE = 0
    LIVE = 1
    BROKEN = 2


@dataclass(frozen=True, slots=True)
class BatchBlocks:
    """Device blocks that a batch touches; a block may be named more than once."""

    read: Int32s
    """All that hold a position of a row, those that the batch computes included."""
    written: Int32s


class LaneMirror:
    """All lanes. `num_tokens` counts tokens known, `position` those whose KV is computed: position <= num_tokens."""

    def __init__(self, *, num_lanes: int, block_size: int, num_blocks: int, max_model_len: int) -> None:
        self.num_lanes = num_lanes
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.max_model_len = max_model_len
        self.max_blocks = -(-max_model_len // block_size)
        self.tables: Int32s = np.zeros((num_lanes, self.max_blocks), np.int32)
        """(num_lanes, max_blocks); zero behind a lane's blocks."""
        self.tokens: Int32s = np.zeros((num_lanes, max_model_len + 1), np.int32)
        """(num_lanes, max_model_len + 1): the last column takes the token of a wasted row at the very end."""
        self.state = np.zeros(num_lanes, np.uint8)
        self.generation: Int64s = np.zeros(num_lanes, np.int64)
        self.table_len: Int64s = np.zeros(num_lanes, np.int64)
        self.position: Int64s = np.zeros(num_lanes, np.int64)
        self.num_tokens: Int64s = np.zeros(num_lanes, np.int64)
        self.num_prompt: Int64s = np.zeros(num_lanes, np.int64)
        self.choice: Int64s = np.zeros(num_lanes, np.int64)
        self.greedy: Bools = np.zeros(num_lanes, np.bool_)
        """Temperature 0 and no stop ids to hold back: an arg-max and nothing else."""
        self.sampling: list[LaneSampling | None] = [None] * num_lanes
        self._refs: Int32s = np.zeros(num_blocks, np.int32)
        self.num_mapped_blocks = 0
        """Distinct device blocks in the tables of all lanes."""

    def clear(self) -> None:
        """Drop all lanes, for a new session: generations start again too."""
        for lane in np.flatnonzero(self.state):
            self._release(int(lane))
        self.generation[:] = 0

    def apply(self, plan: DecodedPlan) -> None:
        """Release, rewind, admit, append, in this order; bytes are the copies' and the runner's.

        Never raises for a decoded plan.
        """
        for lane in plan.release_lanes.tolist():
            self._release(lane)
        if plan.rewind_lanes.size:
            self._rewind(plan)
        for admit in plan.admit:
            self._admit(admit)
        if plan.append_lanes.size:
            self._append(plan.append_lanes, plan.append_block_ids)

    def rows_that_fit(self, lanes: Int32s, num_tokens: Int64s) -> Bools:
        """Which rows can run: each lane live and named once, tokens known and blocks there for all its positions."""
        ends = self.position[lanes] + num_tokens
        fits: Bools = (
            (self.state[lanes] == LaneState.LIVE)
            & (num_tokens >= 1)
            & (ends <= self.num_tokens[lanes])
            & (ends <= self.table_len[lanes] * self.block_size)
            & (ends <= self.max_model_len)
        )
        first = np.unique(lanes, return_index=True)[1]
        if first.size != lanes.size:  # a lane twice: its first row may run
            once = np.zeros(lanes.size, np.bool_)
            once[first] = True
            fits &= once
        return fits

    def blocks_of(self, lanes: Int32s, num_tokens: Int64s) -> BatchBlocks:
        """The blocks that a batch of rows that fit touches."""
        starts = self.position[lanes]
        begin, end = starts // self.block_size, -(-(starts + num_tokens) // self.block_size)
        index = np.arange(int(end.max(initial=0)))
        tables = self.tables[:, : index.size][lanes]
        read = index < end[:, None]
        return BatchBlocks(tables[read], tables[read & (index >= begin[:, None])])

    def cached_blocks(self, lanes: Int32s) -> tuple[Int32s, Bools]:
        """(rows, width) block tables, and which of their entries hold positions computed before this step."""
        used = -(-self.position[lanes] // self.block_size)
        index = np.arange(int(used.max(initial=0)))
        return self.tables[:, : index.size][lanes], index < used[:, None]

    def new_blocks(self, lanes: Int32s, num_tokens: Int64s) -> Int32s:
        """Blocks that a batch of rows that fit writes from their first position on."""
        starts = self.position[lanes]
        begin, end = -(-starts // self.block_size), -(-(starts + num_tokens) // self.block_size)
        index = np.arange(int(end.max(initial=0)))
        tables = self.tables[:, : index.size][lanes]
        return tables[(index >= begin[:, None]) & (index < end[:, None])]

    def commit(self, lanes: Int32s, num_tokens: Int64s, sampled_lanes: Int32s, sampled_ids: Int32s) -> None:
        """Positions of `lanes` are computed, and `sampled_lanes` got a token each. All are rows that fitted."""
        self.position[lanes] += num_tokens
        self.tokens[sampled_lanes, self.num_tokens[sampled_lanes]] = sampled_ids
        self.num_tokens[sampled_lanes] += 1

    def is_live(self, lane: int) -> bool:
        """Whether rows of the lane may run."""
        return bool(self.state[lane] == LaneState.LIVE)

    def break_lane(self, lane: int, reason: str) -> None:
        """Nothing runs on the lane until it is released; its blocks stay mapped until then."""
        if self.is_live(lane):
            log.warning("lane broken", extra=kv(lane=lane, generation=int(self.generation[lane]), reason=reason))
            self.state[lane] = LaneState.BROKEN

    def digest(self) -> int | None:
        """CRC-32 over (lane, generation, position, number of blocks, blocks) of each live lane as little-endian int32.

        In the order of lanes. It leaves out tokens, which the scheduler does not know while results are in flight.
        None while a lane is broken: the scheduler hears of that in a result that may still be on its way.
        """
        if (self.state == LaneState.BROKEN).any():
            return None
        lanes = np.flatnonzero(self.state)
        counts = self.table_len[lanes]
        width = int(counts.max(initial=0))
        head = np.stack([lanes, self.generation[lanes], self.position[lanes], counts], axis=1)
        columns = np.concatenate([head, self.tables[lanes, :width]], axis=1).astype("<u4")
        used = np.arange(head.shape[1] + width) < (head.shape[1] + counts)[:, None]
        return zlib.crc32(columns[used].tobytes())

    def _release(self, lane: int) -> None:
        count = int(self.table_len[lane])
        self._unmap(self.tables[lane, :count])
        self.tables[lane, :count] = 0
        self.table_len[lane] = self.position[lane] = self.num_tokens[lane] = 0
        self.sampling[lane] = None
        self.state[lane] = LaneState.FREE

    def _rewind(self, plan: DecodedPlan) -> None:
        columns = (plan.rewind_lanes, plan.rewind_num_tokens, plan.rewind_num_blocks)
        for lane, position, count in zip(*(column.tolist() for column in columns), strict=True):
            if self.state[lane] != LaneState.LIVE:
                continue
            most = min(int(self.position[lane]), count * self.block_size)
            if not (0 <= count <= self.table_len[lane] and 0 <= position <= most):
                self.break_lane(lane, f"rewind to {position} tokens and {count} blocks")
                continue
            old = int(self.table_len[lane])
            self._unmap(self.tables[lane, count:old])
            self.tables[lane, count:old] = 0
            self.table_len[lane] = count
            self.position[lane] = position

    def _admit(self, op: AdmitOp) -> None:
        lane = op.lane
        fault = op.fault or self._admit_fault(op)
        self.generation[lane] = op.generation
        if fault is not None:
            log.warning("admission refused", extra=kv(lane=lane, generation=op.generation, reason=fault))
            self.state[lane] = LaneState.BROKEN
            return
        count = op.token_ids.size
        self.tokens[lane, :count] = op.token_ids
        self.num_tokens[lane] = count
        self.num_prompt[lane] = op.num_prompt_tokens
        self.position[lane] = op.num_cached_tokens
        self.tables[lane, : op.block_ids.size] = op.block_ids
        self.table_len[lane] = op.block_ids.size
        self._map(op.block_ids)
        self.sampling[lane] = op.sampling
        self.choice[lane] = op.choice_index
        holds_back = op.sampling.min_tokens > 0 and op.sampling.stop_token_ids.size > 0
        self.greedy[lane] = op.sampling.temperature == 0.0 and not holds_back
        self.state[lane] = LaneState.LIVE

    def _admit_fault(self, op: AdmitOp) -> str | None:
        if self.state[op.lane] != LaneState.FREE:
            return "the lane was not released"
        if op.generation <= self.generation[op.lane]:
            return f"generation {op.generation} after {int(self.generation[op.lane])}"
        if op.block_ids.size > self.max_blocks:
            return f"{op.block_ids.size} blocks, at most {self.max_blocks}"
        if op.num_cached_tokens > op.block_ids.size * self.block_size:
            return f"{op.num_cached_tokens} cached tokens in {op.block_ids.size} blocks"
        return None

    def _append(self, lanes: Int32s, block_ids: Int32s) -> None:
        index = self.table_len[lanes] + _rank_within(lanes)
        fits = (index < self.max_blocks) & (block_ids >= 0) & (block_ids < self.num_blocks)
        for lane in np.unique(lanes[~fits]).tolist():
            self.break_lane(lane, "an appended block does not fit")
        live = self.state[lanes] == LaneState.LIVE
        lanes, block_ids, index = lanes[live], block_ids[live], index[live]
        self.tables[lanes, index] = block_ids
        np.add.at(self.table_len, lanes, 1)
        self._map(block_ids)

    def _map(self, block_ids: Int32s) -> None:
        self.num_mapped_blocks += int((self._refs[np.unique(block_ids)] == 0).sum())
        np.add.at(self._refs, block_ids, 1)

    def _unmap(self, block_ids: Int32s) -> None:
        np.subtract.at(self._refs, block_ids, 1)
        self.num_mapped_blocks -= int((self._refs[np.unique(block_ids)] == 0).sum())


def _rank_within(lanes: Int32s) -> Int64s:
    """How many earlier entries name the same lane, per entry."""
    order = np.argsort(lanes, kind="stable")
    ordered = lanes[order]
    starts = np.flatnonzero(np.r_[True, ordered[1:] != ordered[:-1]])
    counts = np.diff(np.r_[starts, lanes.size])
    rank = np.empty(lanes.size, np.int64)
    rank[order] = np.arange(lanes.size) - np.repeat(starts, counts)
    return rank
