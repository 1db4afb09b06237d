"""`Sequence`: one growing token list, and the only file that moves a sequence's state.

    WAITING ──start──► RUNNING ──requeue──► WAITING          (recompute: preempted, or its executor is gone)
       │                 │  ▲ └──swap_out──► SWAPPED         (preempted; its blocks are in the host tier)
       │                 │  └─────start────────┘ └─requeue─► WAITING   (the host tier is gone with its executor)
       └──────finish─────┴────────────► FINISHED             (from any state, once)

One number drives everything: `num_planned`, the positions that plans have covered, catches up with the tokens. There is
no prefill mode. A row covers `[num_planned, num_planned + n)` and samples iff it reaches the end of the tokens known
or expected: while `num_planned < prefill_len` that end is `prefill_len` (all tokens known when it got its lane, which
after a recompute is more than the prompt); from then on each row covers one position and brings the token behind it,
so `num_planned + 1` tokens are known or in flight and a plan need not wait for the result before it.

`horizon` is where planning must stop for now: the smaller of the positions that have slots and `position_limit`, the
position whose row would bring a token too many. One comparison in the hot loop answers both.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import Enum

from cache_svc.blocks.table import BlockTable
from scheduler_svc.core.copies import Transfer
from scheduler_svc.core.costs import Forecast
from scheduler_svc.core.events import FinishReason
from scheduler_svc.core.params import SequenceSpec

NO_LANE = -1


@dataclass(frozen=True, slots=True)
class Stash:
    """What a swapped sequence has in the host tier: one reference to each block."""

    host_ids: list[int]
    """The blocks of its leading positions, all of them."""
    num_positions: int
    """Positions whose keys and values are in the blocks."""
    num_copied: int
    """Blocks that had to be copied; the host tier had the others."""
    transfer: Transfer
    """The copies; the blocks may be read once they are done."""


@dataclass(slots=True)
class PrefixState:
    """What the prefix index knows of a sequence."""

    keys: list[bytes] = field(default_factory=list)
    """Keys of its leading full blocks, made when needed."""
    made_for: tuple[str, str, int] | None = None
    """For which model, type of keys and values and size of block the keys hold: an executor with others may come."""
    num_published: int = 0
    """Leading blocks that are known under their keys, or were found."""
    num_expected: int = 0
    """Leading blocks that others wait for instead of computing them."""
    stopped_at: int | None = None
    """Index of the block that it waits for another one to compute."""


class SequenceState(Enum):
    """Where a sequence is."""

    WAITING = "waiting"
    RUNNING = "running"
    SWAPPED = "swapped"
    FINISHED = "finished"


MOVES: dict[SequenceState, frozenset[SequenceState]] = {
    SequenceState.WAITING: frozenset({SequenceState.RUNNING, SequenceState.FINISHED}),
    SequenceState.RUNNING: frozenset({SequenceState.WAITING, SequenceState.SWAPPED, SequenceState.FINISHED}),
    SequenceState.SWAPPED: frozenset({SequenceState.RUNNING, SequenceState.WAITING, SequenceState.FINISHED}),
    SequenceState.FINISHED: frozenset(),
}
"""The legal moves; everything else raises and changes nothing."""


class IllegalMoveError(Exception):
    """A sequence was asked to make a move that `MOVES` does not have: a bug in the scheduler."""


class Sequence:
    """One sequence from submission to its end. WAITING and FINISHED ones own no lane, no block and no reservation."""

    __slots__ = (
        "_state",
        "arrival",
        "finish_reason",
        "first_row_step_id",
        "first_run",
        "forecast",
        "front_rank",
        "group",
        "horizon",
        "in_front",
        "lane",
        "last_step_id",
        "num_cached_prompt",
        "num_computed",
        "num_failed_steps",
        "num_found",
        "num_known_at_failure",
        "num_lost",
        "num_planned",
        "num_preemptions",
        "num_prefilled",
        "num_queued",
        "num_reserved",
        "num_skipped",
        "position_limit",
        "prefill_len",
        "prefix",
        "priority",
        "prompt_len",
        "seq_id",
        "service",
        "spec",
        "stash",
        "stop_after",
        "stop_token_ids",
        "table",
        "token_ids",
        "token_limit",
    )

    def __init__(self, spec: SequenceSpec, *, priority: int) -> None:
        self._state = SequenceState.WAITING
        self.spec = spec
        self.seq_id = spec.seq_id
        self.group = spec.group
        self.priority = priority
        self.arrival = spec.arrival
        self.prompt_len = len(spec.prompt_ids)
        self.token_ids = [*spec.prompt_ids, *spec.emitted_ids]
        """Prompt, then all output that is known."""
        self.service = len(self.token_ids)
        """Positions it had to compute before its next token when it joined the queue."""
        self.stop_token_ids = spec.stop_token_ids
        self.stop_after = self.prompt_len + spec.sampling.min_tokens
        """A stop id counts only when more tokens than this are known with it."""
        self.token_limit = 0
        self.position_limit = 0
        self.horizon = 0
        self.num_planned = 0
        self.prefill_len = len(self.token_ids)
        self.lane = NO_LANE
        self.table: BlockTable | None = None
        self.num_reserved = self.num_found = self.num_queued = 0
        """Free blocks of the pool that are promised to this sequence."""
        self.last_step_id = 0
        """The last plan that touched its lane or blocks; later ones than the last result are in flight."""
        self.first_row_step_id = 0
        """The first plan that may run it: the one after its admission when that brings blocks back from the host."""
        self.num_computed = 0
        """Positions whose results are in, as far as they belong to chunks; see `num_settled`."""
        self.num_lost = 0
        """Positions that were planned when it last lost its lane; those behind what it gets back are computed again."""
        self.num_cached_prompt = 0
        """Prompt tokens that its first start found in a tier."""
        self.stash: Stash | None = None
        self.forecast: Forecast | None = None
        """What its last preemption was expected to cost, until it has cost it."""
        self.prefix = PrefixState()
        self.in_front = False
        """Whether it is ahead of its priority and not to be passed: preempted, or passed too often."""
        self.front_rank = 0
        """Its place among those in front; the queue gives it."""
        self.num_skipped = 0
        """Sequences admitted past it while it was next and did not fit."""
        self.num_preemptions = 0
        self.num_prefilled = 0
        """Prompt and recomputed positions that were planned, over its life."""
        self.num_failed_steps = self.num_known_at_failure = 0
        self.first_run: float | None = None
        self.finish_reason: FinishReason | None = None
        self.limit_tokens(None)

    @property
    def state(self) -> SequenceState:
        """Where the sequence is; moved by `start`, `swap_out`, `requeue` and `finish` only."""
        return self._state

    @property
    def num_slots(self) -> int:
        """Positions of a running sequence that have slots; 0 for others."""
        return 0 if self.table is None else self.table.num_slots

    @property
    def num_brought(self) -> int:
        """Blocks of a running sequence that were not there already when it started (`num_found` were)."""
        return 0 if self.table is None else len(self.table.block_ids) - self.num_found

    @property
    def num_settled(self) -> int:
        """Leading positions of a running sequence whose results are in.

        Behind its prefill each known token but the last has been through a row whose result is in.
        """
        return (
            max(self.num_computed, len(self.token_ids) - 1)
            if self.num_computed >= self.prefill_len
            else self.num_computed
        )

    @property
    def num_output_tokens(self) -> int:
        """Output tokens that are known, those of before a resubmission included."""
        return len(self.token_ids) - self.prompt_len

    def continuation(self) -> SequenceSpec:
        """What to submit elsewhere so that it goes on behind its known tokens."""
        return replace(
            self.spec,
            emitted_ids=self.token_ids[self.prompt_len :],
            queue_deadline=self.spec.queue_deadline if self.first_run is None else None,
        )

    def limit_tokens(self, most: int | None) -> None:
        """Sets how many tokens it may have in all: prompt and max_tokens, and at most `most` (None: unknown)."""
        limit = self.prompt_len + self.spec.max_tokens
        self.token_limit = limit if most is None else min(limit, most)
        self.position_limit = self.token_limit - 1

    def end_reason(self) -> FinishReason | None:
        """Why no further token may follow the known ones; None when one may."""
        num_known = len(self.token_ids)
        if num_known > max(self.stop_after, self.prompt_len) and self.token_ids[-1] in self.stop_token_ids:
            return FinishReason.STOP
        return FinishReason.LENGTH if num_known >= self.token_limit else None

    def start(self, lane: int, table: BlockTable, num_reserved: int, num_cached: int, now: float) -> None:
        """WAITING or SWAPPED → RUNNING with a lane and the blocks for all known tokens.

        `num_cached` leading positions, fewer than tokens are known, need no computing.
        """
        self._move(SequenceState.RUNNING)
        self.lane = lane
        self.table = table
        self.num_reserved = num_reserved
        self.num_planned = self.num_computed = num_cached
        self.prefill_len = len(self.token_ids)
        self.horizon = min(table.num_slots, self.position_limit)
        self.in_front = False
        self.front_rank = 0
        self.num_skipped = 0
        if self.first_run is None:
            self.first_run = now

    def grow(self, block_ids: list[int]) -> None:
        """Adds blocks to the table of a running sequence."""
        assert self.table is not None
        self.table.extend(block_ids)
        self.horizon = min(self.table.num_slots, self.position_limit)

    def requeue(self) -> None:
        """RUNNING or SWAPPED → WAITING, in front, to be recomputed. What it held must have been taken."""
        self._move(SequenceState.WAITING)
        self._let_go()
        self.in_front = True
        self.service = len(self.token_ids)

    def swap_out(self, stash: Stash) -> None:
        """RUNNING → SWAPPED, in front, with its positions in the host tier. What it held must have been taken."""
        self._move(SequenceState.SWAPPED)
        self._let_go()
        self.stash = stash
        self.in_front = True
        self.service = max(1, len(self.token_ids) - stash.num_positions)

    def finish(self, reason: FinishReason) -> None:
        """Any state → FINISHED. Its lane, blocks and reservation must have been taken."""
        self._move(SequenceState.FINISHED)
        self._let_go()
        self.finish_reason = reason

    def _move(self, state: SequenceState) -> None:
        if state not in MOVES[self._state]:
            raise IllegalMoveError(f"sequence {self.seq_id}: {self._state.name} -> {state.name}")
        self._state = state

    def _let_go(self) -> None:
        self.lane = NO_LANE
        self.table = None
        self.num_reserved = 0
        self.stash = None
        if self.num_planned:
            self.num_lost = self.num_planned
        self.num_planned = self.num_computed = 0
        self.horizon = 0
