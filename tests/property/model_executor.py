"""A model executor: does exactly what the contract of step plans says, and complains about everything else.

It keeps lanes, block tables and, per physical slot, *what was written there*: the digest of all tokens up to and
including that position. A row computes its next token only by reading its context back through the block table. A
block given out too early, a stale table or a missing slot therefore shows as a wrong digest, not as luck.

The next token is a hash of all tokens before it, so one lost, doubled or swapped token changes everything after it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from scheduler_svc.core.params import ExecutorLimits
from scheduler_svc.core.plan import NO_TOKEN, Admit, RowErrorCode, StepPlan, StepResult, StepStatus

_MASK = (1 << 61) - 1
VOCABULARY = 50


def digest(previous: int, token: int) -> int:
    """The chain over token ids; starts with 0."""
    return ((previous ^ (token + 1)) * 0x9E3779B97F4A7C15 + 0x7F4A7C15) & _MASK


def next_token(chain: int) -> int:
    return (chain >> 17) % VOCABULARY


def oracle(prompt: list[int], num_tokens: int) -> list[int]:
    """The output that follows a prompt."""
    chain = 0
    for token in prompt:
        chain = digest(chain, token)
    output = []
    for _ in range(num_tokens):
        output.append(next_token(chain))
        chain = digest(chain, output[-1])
    return output


@dataclass
class Lane:
    generation: int
    token_ids: list[int]
    block_ids: list[int]
    position: int = 0
    last_step_id: int = 0


@dataclass
class ModelExecutor:
    """Applies plans in order; `run` returns the result that may be handed back later."""

    limits: ExecutorLimits
    max_tokens: int
    max_rows: int
    next_step_id: int
    lanes: dict[int, Lane] = field(default_factory=dict)
    slots: dict[int, int] = field(default_factory=dict)
    last_batch: list[int] = field(default_factory=list)
    generations: dict[int, int] = field(default_factory=dict)
    # Fence bookkeeping: the last plan that touched each block and lane, and the last result that was handed back.
    block_touched: dict[int, int] = field(default_factory=dict)
    lane_touched: dict[int, int] = field(default_factory=dict)
    confirmed_step_id: int = 0
    burst: int = 1
    """Most tokens a sampling row may give, where the block table has room for them."""
    slack: int = 1
    """Positions that a run leaves free in the block table, for rows planned before it was known."""
    num_tokens_computed: int = 0

    def __post_init__(self) -> None:
        self.confirmed_step_id = self.next_step_id - 1

    def confirm(self, step_id: int) -> None:
        """The scheduler has applied this result."""
        self.confirmed_step_id = step_id

    def run(self, plan: StepPlan, faults: dict[int, RowErrorCode] | None = None) -> StepResult:
        assert plan.step_id == self.next_step_id, "step ids are consecutive"
        self.next_step_id += 1
        for lane in plan.release_lanes:
            del self.lanes[lane]
            self.lane_touched[lane] = plan.step_id
        assert not [*plan.rewind_lanes, *plan.copy_src, *plan.swap_in_src, *plan.swap_out_src], "not planned yet"
        for admit in plan.admit:
            self._admit(admit, plan.step_id)
        for lane, block_id in zip(plan.append_lanes, plan.append_block_ids, strict=True):
            self._take_block(block_id, plan.step_id)
            self.lanes[lane].block_ids.append(block_id)
        tables = [block_id for lane in self.lanes.values() for block_id in lane.block_ids]
        assert len(set(tables)) == len(tables), "a block in two tables"
        return self._run_batch(plan, faults or {})

    def _admit(self, admit: Admit, step_id: int) -> None:
        assert 0 <= admit.lane < self.limits.num_lanes
        assert admit.lane not in self.lanes, "the lane is in use"
        touched = self.lane_touched.get(admit.lane, 0)
        assert touched <= self.confirmed_step_id, f"lane {admit.lane} reused before the result of step {touched}"
        assert admit.generation == self.generations.get(admit.lane, 0) + 1
        self.generations[admit.lane] = admit.generation
        assert admit.num_cached_tokens == 0
        assert len(admit.token_ids) >= admit.num_prompt_tokens >= 1
        for block_id in admit.block_ids:
            self._take_block(block_id, step_id)
        self.lanes[admit.lane] = Lane(admit.generation, list(admit.token_ids), list(admit.block_ids))

    def _take_block(self, block_id: int, step_id: int) -> None:
        assert 0 <= block_id < self.limits.num_device_blocks
        touched = self.block_touched.get(block_id, 0)
        assert touched <= self.confirmed_step_id, f"block {block_id} reused before the result of step {touched}"
        self.block_touched[block_id] = step_id
        for offset in range(self.limits.block_size):
            self.slots.pop(block_id * self.limits.block_size + offset, None)

    def _run_batch(self, plan: StepPlan, faults: dict[int, RowErrorCode]) -> StepResult:
        if plan.repeat_decode:
            assert not plan.row_lanes
            assert plan.row_num_tokens is None
            assert self.last_batch, "nothing to repeat"
            batch = self.last_batch
        else:
            batch = plan.row_lanes
        counts = plan.row_num_tokens or [1] * len(batch)
        assert len(batch) == len(counts) == plan.num_rows <= self.max_rows
        assert len(set(batch)) == len(batch), "a lane in two rows"
        assert min(counts, default=1) >= 1
        assert sum(counts) == plan.num_tokens <= self.max_tokens
        self.last_batch = list(batch)
        self.num_tokens_computed += plan.num_tokens
        runs = [self._run_row(plan.step_id, lane, count) for lane, count in zip(batch, counts, strict=True)]
        for row in faults:
            runs[row] = [NO_TOKEN]
        return StepResult(
            step_id=plan.step_id,
            token_ids=[token for run in runs for token in run],
            num_tokens=None if self.burst == 1 else [len(run) for run in runs],
            status=StepStatus.ROW_ERRORS if faults else StepStatus.OK,
            row_errors=faults,
        )

    def _run_row(self, step_id: int, lane_id: int, count: int) -> list[int]:
        lane = self.lanes[lane_id]
        block_size = self.limits.block_size
        end = lane.position + count
        assert end <= len(lane.token_ids), "a row past the known tokens"
        num_slots = len(lane.block_ids) * block_size
        assert end <= num_slots, "a row past the block table"
        for block_id in lane.block_ids:
            self.block_touched[block_id] = step_id
        chain = self._compute(lane, end)
        if end < len(lane.token_ids):
            return [NO_TOKEN]
        run = [next_token(chain)]
        lane.token_ids.append(run[0])
        while len(run) < self.burst and lane.position + 1 + self.slack <= num_slots:
            chain = self._compute(lane, lane.position + 1)
            run.append(next_token(chain))
            lane.token_ids.append(run[-1])
        return run

    def _compute(self, lane: Lane, end: int) -> int:
        """Writes positions up to `end`, each from the one before, read through the table; returns the last."""
        block_size = self.limits.block_size

        def slot(position: int) -> int:
            return lane.block_ids[position // block_size] * block_size + position % block_size

        assert end > lane.position
        chain = self.slots[slot(lane.position - 1)] if lane.position else 0
        expected = 0
        for token in lane.token_ids[: lane.position]:
            expected = digest(expected, token)
        assert chain == expected, "the context in the blocks is not the sequence's"
        for position in range(lane.position, end):
            chain = digest(chain, lane.token_ids[position])
            self.slots[slot(position)] = chain
        lane.position = end
        return chain
