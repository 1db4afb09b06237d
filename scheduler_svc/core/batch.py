"""The rows of one plan: decode rows first, then chunks, within the token budget."""

from __future__ import annotations

from scheduler_svc.core.pace import NUM_MIXED
from scheduler_svc.core.params import SeqId
from scheduler_svc.core.plan import StepPlan
from scheduler_svc.core.running import InFlight, RunningSet
from scheduler_svc.core.sequence import Sequence


class BatchBuilder:
    """Adds rows to a plan and moves `num_planned` of their sequences along.

    `max_seqs` is at most the budget and at most the rows an executor takes, so decode rows always fit.
    """

    __slots__ = (
        "_chunk_ends",
        "_chunked",
        "_counts",
        "_is_cut",
        "_plan",
        "_running",
        "_silent",
        "num_prefill_tokens",
        "num_tokens_left",
        "rows",
    )

    def __init__(self, running: RunningSet, plan: StepPlan) -> None:
        self._running = running
        self._plan = plan
        self.rows: list[Sequence] = []
        self._counts: list[int] = []
        """Tokens of the rows behind the decode rows."""
        self._silent: set[int] = set()
        self._chunked: set[SeqId] = set()
        self._chunk_ends: list[tuple[Sequence, int]] = []
        self._is_cut = False
        self.num_tokens_left = 0
        """Prompt tokens that the step has room and time for; to be had behind the decode rows."""
        self.num_prefill_tokens = 0

    def add_decodes(self) -> None:
        """One row for each decoding sequence that has a slot for its next position and may have another token."""
        step_id = self._plan.step_id
        limits = self._running.limits
        self.rows = rows = [seq for seq in self._running.decoding if seq.num_planned < seq.horizon]
        for seq in rows:
            seq.num_planned += 1
            seq.last_step_id = step_id
        self.num_tokens_left = self._num_prompt_tokens(limits.max_tokens - len(rows))

    def _num_prompt_tokens(self, num_tokens: int) -> int:
        """What the pace leaves of so many prompt tokens; none where a step without is due, see `NUM_MIXED`."""
        running, num_decodes = self._running, len(self.rows)
        if running.num_mixed >= NUM_MIXED and num_decodes:
            return 0
        allowed = running.limits.pace.num_prompt_tokens(num_decodes, num_tokens)
        self._is_cut = allowed < num_tokens
        return allowed

    def add_chunks(self, at_least: int | None) -> None:
        """A row for each prefilling sequence of at least that priority (None: any), as long as tokens are left.

        Each gets one chunk per plan, whoever asks twice.
        """
        max_chunk, step_id = self._running.limits.max_chunk, self._plan.step_id
        for seq in self._running.prefilling:
            if not self.num_tokens_left or (at_least is not None and seq.priority < at_least):
                break
            if seq.seq_id in self._chunked or seq.first_row_step_id > step_id:
                continue
            self._chunked.add(seq.seq_id)
            count = min(self.num_tokens_left, max_chunk, seq.prefill_len - seq.num_planned)
            seq.num_planned += count
            seq.num_prefilled += count
            seq.last_step_id = step_id
            self._chunk_ends.append((seq, seq.num_planned))
            self._running.memory.prefix.expect(seq, seq.num_planned + max_chunk)
            if seq.num_planned < seq.prefill_len:
                self._silent.add(len(self.rows))
            self.rows.append(seq)
            self._counts.append(count)
            self.num_tokens_left -= count
            self.num_prefill_tokens += count

    def close(self) -> InFlight:
        """Writes the batch into the plan and returns the record of it for the result."""
        plan, running = self._plan, self._running
        num_decodes = len(self.rows) - len(self._counts)
        lanes = [seq.lane for seq in self.rows]
        plan.num_rows = len(lanes)
        plan.num_tokens = num_decodes + self.num_prefill_tokens
        is_mixed = bool(num_decodes and self.num_prefill_tokens)
        running.num_mixed = running.num_mixed + 1 if is_mixed and self._is_cut and not self.num_tokens_left else 0
        is_all_single = plan.num_tokens == plan.num_rows
        plan.repeat_decode = bool(lanes) and is_all_single and lanes == running.last_row_lanes
        if not plan.repeat_decode:
            plan.row_lanes = lanes
            plan.row_num_tokens = None if is_all_single else [1] * num_decodes + self._counts
        running.last_row_lanes = lanes
        return InFlight(plan.step_id, self.rows, frozenset(self._silent), self._chunk_ends)
