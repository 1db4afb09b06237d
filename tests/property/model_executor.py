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
    copy_lag: int = 0
    """Plans after its own by which a plan's copies are reported; a plan without rows reports all."""
    host_slots: dict[int, int] = field(default_factory=dict)
    unreported: list[tuple[int, set[int], set[int]]] = field(default_factory=list)
    """Plans whose copies no applied result has reported: id, device blocks, host blocks."""
    reporting: dict[int, list[int]] = field(default_factory=dict)
    """Plans whose copies the result of a plan reports."""
    num_swapped_in: int = 0
    num_cached_tokens: int = 0

    def __post_init__(self) -> None:
        self.confirmed_step_id = self.next_step_id - 1

    def confirm(self, step_id: int) -> None:
        """The scheduler has applied this result."""
        self.confirmed_step_id = step_id
        reported = self.reporting.pop(step_id, [])
        self.unreported = [copies for copies in self.unreported if copies[0] not in reported]

    def run(self, plan: StepPlan, faults: dict[int, RowErrorCode] | None = None) -> StepResult:
        assert plan.step_id == self.next_step_id, "step ids are consecutive"
        self.next_step_id += 1
        for lane in plan.release_lanes:
            del self.lanes[lane]
            self.lane_touched[lane] = plan.step_id
        assert not [*plan.rewind_lanes, *plan.copy_src], "not planned yet"
        self._copy(plan)
        for admit in plan.admit:
            self._admit(admit, plan.step_id)
        for lane, block_id in zip(plan.append_lanes, plan.append_block_ids, strict=True):
            self._take_block(block_id, plan.step_id)
            self.lanes[lane].block_ids.append(block_id)
        return self._run_batch(plan, faults or {})

    def _copy(self, plan: StepPlan) -> None:
        """Swap out, then swap in, as the contract orders them."""
        size = self.limits.block_size
        under_way = [copies[2] for copies in self.unreported]
        for src, dst in zip(plan.swap_out_src, plan.swap_out_dst, strict=True):
            assert 0 <= dst < self.limits.num_host_blocks
            assert not any(dst in blocks for blocks in under_way), f"host block {dst} rewritten before the report"
            for offset in range(size):
                self.host_slots[dst * size + offset] = self.slots.get(src * size + offset, -1)
        for src, dst in zip(plan.swap_in_src, plan.swap_in_dst, strict=True):
            written = [copies for copies in self.unreported if src in copies[2]]
            assert not written or src in plan.swap_in_src, f"host block {src} read before the report"
            assert src not in plan.swap_out_dst, f"host block {src} written and read by one plan"
            self._take_block(dst, plan.step_id)
            for offset in range(size):
                self.slots[dst * size + offset] = self.host_slots[src * size + offset]
        self.num_swapped_in += len(plan.swap_in_src)
        if plan.swap_out_src or plan.swap_in_src:
            device = {*plan.swap_out_src, *plan.swap_in_dst}
            host = {*plan.swap_out_dst, *plan.swap_in_src}
            self.unreported.append((plan.step_id, device, host))

    def _report(self, plan: StepPlan) -> tuple[int, ...]:
        already = {step_id for step_ids in self.reporting.values() for step_id in step_ids}
        due = [copies[0] for copies in self.unreported if copies[0] not in already]
        if plan.num_rows:
            due = [step_id for step_id in due if step_id + self.copy_lag <= plan.step_id]
        if due:
            self.reporting[plan.step_id] = due
        return tuple(due)

    def _admit(self, admit: Admit, step_id: int) -> None:
        assert 0 <= admit.lane < self.limits.num_lanes
        assert admit.lane not in self.lanes, "the lane is in use"
        touched = self.lane_touched.get(admit.lane, 0)
        assert touched <= self.confirmed_step_id, f"lane {admit.lane} reused before the result of step {touched}"
        assert admit.generation == self.generations.get(admit.lane, 0) + 1
        self.generations[admit.lane] = admit.generation
        assert 0 <= admit.num_cached_tokens < len(admit.token_ids)
        assert len(admit.token_ids) >= admit.num_prompt_tokens >= 1
        size = self.limits.block_size
        num_cached_blocks = -(-admit.num_cached_tokens // size)
        for block_id in admit.block_ids[num_cached_blocks:]:
            self._take_block(block_id, step_id)
        chain = 0
        for position, token in enumerate(admit.token_ids[: admit.num_cached_tokens]):
            chain = digest(chain, token)
            block_id = admit.block_ids[position // size]
            assert self.slots.get(block_id * size + position % size) == chain, f"block {block_id} is not the prefix"
            self.block_touched[block_id] = step_id
        self.num_cached_tokens += admit.num_cached_tokens
        lane = Lane(admit.generation, list(admit.token_ids), list(admit.block_ids), admit.num_cached_tokens)
        self.lanes[admit.lane] = lane

    def _take_block(self, block_id: int, step_id: int) -> None:
        assert 0 <= block_id < self.limits.num_device_blocks
        touched = self.block_touched.get(block_id, 0)
        assert touched <= self.confirmed_step_id, f"block {block_id} reused before the result of step {touched}"
        busy = [copies[0] for copies in self.unreported if copies[0] < step_id and block_id in copies[1]]
        assert not busy, f"block {block_id} reused before the copies of steps {busy} were reported"
        owners = [number for number, lane in self.lanes.items() if block_id in lane.block_ids]
        assert not owners, f"block {block_id} given out while lanes {owners} have it"
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
            finished_copy_steps=self._report(plan),
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
            block_id = lane.block_ids[position // block_size]
            sharers = sum(block_id in other.block_ids for other in self.lanes.values())
            assert sharers == 1, f"block {block_id} is written while {sharers} lanes have it"
            chain = digest(chain, lane.token_ids[position])
            self.slots[slot(position)] = chain
        lane.position = end
        return chain
