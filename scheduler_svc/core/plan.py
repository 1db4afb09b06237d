"""Step plans and step results: the only values that pass between the scheduler core and an executor.

A plan's fields are in the order in which an executor must act on them, as if one after the other (docs/wire.md):
release, rewind, swap_out, copy, swap_in, admit, append, then the batch. Columns with the same prefix are parallel.

Fence: a lane or block touched by plan M may be given out again only after the result of the last plan that touched it
has been applied. The core keeps this rule; an executor may rely on it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from scheduler_svc.core.params import SamplingSpec

NO_TOKEN = -1
"""In a result: the row gave no token (its prompt is not finished, or the row failed)."""


@dataclass(frozen=True, slots=True)
class Admit:
    """A sequence gets a lane; block tables grow later through `StepPlan.append_*`."""

    lane: int
    generation: int
    token_ids: list[int]
    """All tokens known now: prompt, then (after a preemption or resubmission) output."""
    num_prompt_tokens: int
    num_cached_tokens: int
    """Leading positions whose KV is already in `block_ids`."""
    block_ids: list[int]
    sampling: SamplingSpec
    stop_token_ids: frozenset[int]
    choice_index: int = 0


@dataclass(slots=True)
class StepPlan:
    """One step. Built by `Scheduler.schedule`, not changed afterwards."""

    step_id: int
    release_lanes: list[int] = field(default_factory=list)
    rewind_lanes: list[int] = field(default_factory=list)
    rewind_num_tokens: list[int] = field(default_factory=list)
    rewind_num_blocks: list[int] = field(default_factory=list)
    swap_out_src: list[int] = field(default_factory=list)
    swap_out_dst: list[int] = field(default_factory=list)
    copy_src: list[int] = field(default_factory=list)
    copy_dst: list[int] = field(default_factory=list)
    swap_in_src: list[int] = field(default_factory=list)
    swap_in_dst: list[int] = field(default_factory=list)
    admit: list[Admit] = field(default_factory=list)
    append_lanes: list[int] = field(default_factory=list)
    append_block_ids: list[int] = field(default_factory=list)
    repeat_decode: bool = False
    """The batch has the lanes of the previous plan's batch, in its order, one token each; `row_lanes` is empty."""
    row_lanes: list[int] = field(default_factory=list)
    row_num_tokens: list[int] | None = None
    """Tokens to compute per row, at least 1 each. None: 1 each."""
    num_rows: int = 0
    """Rows in the batch, also when `repeat_decode`."""
    num_tokens: int = 0
    """Tokens in the batch over all rows."""


class StepStatus(Enum):
    """How a step went."""

    OK = 1
    ROW_ERRORS = 2
    FAILED = 3


class RowErrorCode(Enum):
    """Why one row failed."""

    NUMERICAL = 1
    BAD_ROW = 2
    INTERNAL = 3


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one step gave. Results are applied in the order of their step ids, each exactly once."""

    step_id: int
    token_ids: list[int]
    """Ids of all rows in the batch's order, NO_TOKEN where a row gave none."""
    num_tokens: list[int] | None = None
    """Ids per row, at least 1 each. None: 1 each."""
    status: StepStatus = StepStatus.OK
    row_errors: dict[int, RowErrorCode] = field(default_factory=dict)
    """Failed rows by index in the batch."""
    finished_copy_steps: tuple[int, ...] = ()
    """Plans whose copies have all finished since the last result, each reported once."""
