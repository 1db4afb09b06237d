"""Runs one decoded plan: copies, state operations, forward, sampling, result. The fault barrier is here.

Copies only begin here; the batch waits for those it depends on, a plan without rows for all of them (`kv.copy_engine`).

Whatever goes wrong is contained as narrowly as it can be: a row that does not fit fails with BAD_ROW, logits that are
not finite with NUMERICAL, an exception (out of memory included) fails the rows that raise it alone with INTERNAL. Only
when no row can be vouched for is the step FAILED; the executor then answers FAILED until a new session begins.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field

import numpy as np
import torch

from executor_svc.batch import ModelRunner, build_batch
from executor_svc.kv.checksums import BlockChecksums
from executor_svc.kv.copy_engine import CopyEngine, CopyError
from executor_svc.lanes import Int64s, LaneMirror
from executor_svc.plans import NO_TOKEN, DecodedPlan, Int32s, MirrorError, PlanError, StepOutcome
from executor_svc.sampling import NumericalError, Sampler, SamplingParams, argmax_rows
from pagemill.engine.v1 import executor_pb2 as pb
from pagemill.logs import kv

log = logging.getLogger(__name__)

MAX_LONE_FAILURES = 3
"""Steps in a row in which the only row raised, until that is taken for the device's fault and not the rows'."""


@dataclass(slots=True)
class _Rows:
    """The batch of one step while it runs; columns are parallel over all rows of the plan."""

    lanes: Int32s
    num_tokens: Int64s
    token_ids: Int32s
    errors: dict[int, pb.RowErrorCode] = field(default_factory=dict)
    copy_wait_s: float = 0.0


class StepExecutor:
    """Owns the mirror, drives the runner and the copies. One thread at a time."""

    def __init__(self, runner: ModelRunner, mirror: LaneMirror, copies: CopyEngine) -> None:
        self._runner = runner
        self._mirror = mirror
        self._copies = copies
        self._sampler = Sampler(runner.vocab_size)
        self._last_lanes = np.zeros(0, np.int32)
        self._void = False
        self._num_lone_failures = 0

    def reset(self) -> None:
        """Begin a new session: no lanes, no host blocks with content, no copy of the old one at work."""
        self._copies.reset()
        self._mirror.clear()
        self._last_lanes = np.zeros(0, np.int32)
        self._void = False
        self._num_lone_failures = 0

    def hurry(self) -> None:
        """The running step is wanted no more, or soon: its copies are not slowed down. From any thread."""
        self._copies.hurry()

    def close(self) -> None:
        """End the copies; nothing may be executed afterwards."""
        self._copies.close()

    def execute(self, plan: DecodedPlan | PlanError, step_id: int) -> StepOutcome:
        """Run one plan. Never raises: what fails is in the outcome."""
        started = time.perf_counter()
        try:
            outcome = self._execute(plan, step_id)
        except Exception as error:
            if not self._void:
                trace = None if isinstance(error, PlanError | CopyError) else error
                log.error("step failed", extra=kv(step_id=step_id, reason=_reason(error)), exc_info=trace)
            self._void = True
            outcome = StepOutcome(step_id=step_id, failed=True)
            if isinstance(error, MirrorError):
                outcome.state_digest = error.digest
        outcome.execute_us = min(int((time.perf_counter() - started) * 1e6), 0xFFFFFFFF)
        outcome.num_mapped_blocks = self._mirror.num_mapped_blocks
        return outcome

    def _execute(self, plan: DecodedPlan | PlanError, step_id: int) -> StepOutcome:
        if isinstance(plan, PlanError):
            raise plan
        if self._void:
            raise PlanError("an earlier step of this session failed")
        self._check_digest(plan)
        copies = self._copies
        if plan.has_copies:  # first: they may run while the mirror follows
            copies.submit(step_id, plan.swap_out, plan.copy, plan.swap_in)
        self._mirror.apply(plan)
        rows = self._rows(plan)
        if rows.lanes.size:
            self._run(rows)
        elif copies.busy:
            rows.copy_wait_s = copies.drain()
        return StepOutcome(
            step_id=step_id,
            token_ids=rows.token_ids,
            row_errors=rows.errors,
            copies=copies.report() if copies.has_news else None,
            copy_wait_us=int(rows.copy_wait_s * 1e6),
        )

    def _check_digest(self, plan: DecodedPlan) -> None:
        if plan.state_digest is None:
            return
        digest = self._mirror.digest()
        if digest is not None and digest != plan.state_digest:
            raise MirrorError(plan.state_digest, digest)

    def _rows(self, plan: DecodedPlan) -> _Rows:
        lanes = self._last_lanes if plan.repeat_decode else plan.row_lanes
        self._last_lanes = lanes
        if plan.row_num_tokens is None:
            num_tokens = np.ones(lanes.size, np.int64)
        else:
            num_tokens = plan.row_num_tokens.astype(np.int64)
        return _Rows(lanes, num_tokens, np.full(lanes.size, NO_TOKEN, np.int32))

    def _run(self, rows: _Rows) -> None:
        fits = self._mirror.rows_that_fit(rows.lanes, rows.num_tokens)
        for row in np.flatnonzero(~fits).tolist():
            self._fail(rows, row, pb.ROW_ERROR_CODE_BAD_ROW, "does not fit the mirror")
        runnable = np.flatnonzero(fits)
        if self._copies.busy:
            blocks = self._mirror.blocks_of(rows.lanes[runnable], rows.num_tokens[runnable])
            rows.copy_wait_s = self._copies.before_batch(blocks.read, blocks.written)
        num_bad = 0
        if self._copies.checksums is not None:
            good = self._without_bad_blocks(rows, runnable, self._copies.checksums)
            num_bad, runnable = runnable.size - good.size, good
        if not runnable.size:
            return
        self._forward(rows, runnable)
        raised = sum(code == pb.ROW_ERROR_CODE_INTERNAL for code in rows.errors.values()) - num_bad
        if raised < runnable.size:
            self._num_lone_failures = 0
            return
        self._num_lone_failures += 1
        if raised > 1 or self._num_lone_failures >= MAX_LONE_FAILURES:
            raise RuntimeError(f"all of {raised} rows raised")

    def _without_bad_blocks(self, rows: _Rows, chosen: Int64s, checksums: BlockChecksums) -> Int64s:
        """The chosen rows that read no block whose bytes a copy has changed; the others fail."""
        if not checksums.any_bad:
            return chosen
        tables, cached = self._mirror.cached_blocks(rows.lanes[chosen])
        hit = (checksums.are_bad(tables) & cached).any(axis=1)
        for row in chosen[hit].tolist():
            self._fail(rows, row, pb.ROW_ERROR_CODE_INTERNAL, "a copied block is not what it was")
        good = chosen[~hit]
        checksums.overwritten(self._mirror.new_blocks(rows.lanes[good], rows.num_tokens[good]))
        return good

    def _forward(self, rows: _Rows, chosen: Int64s) -> None:
        """Run the chosen rows together; if that raises, halve until the guilty rows are alone.

        Running a row again is safe: it writes the same KV to the same slots.
        """
        lanes, num_tokens = rows.lanes[chosen], rows.num_tokens[chosen]
        try:
            batch = build_batch(self._mirror, lanes, num_tokens)
            logits = self._runner.forward(batch)
            if logits.shape != (len(batch.sample_rows), self._runner.vocab_size):
                raise RuntimeError(f"Got logits of shape {tuple(logits.shape)}")
        except Exception as error:
            if chosen.size == 1:
                self._fail(rows, int(chosen[0]), pb.ROW_ERROR_CODE_INTERNAL, _reason(error), error)
                return
            log.warning("batch raised, halving it", extra=kv(rows=chosen.size, reason=_reason(error)))
            half = chosen.size // 2
            self._forward(rows, chosen[:half])
            self._forward(rows, chosen[half:])
            return
        sampling = chosen[batch.sample_rows]
        if sampling.size:
            self._sample(rows, sampling, logits)
        good = (
            chosen
            if not rows.errors
            else np.array([row for row in chosen.tolist() if row not in rows.errors], np.int64)
        )
        sampled = good[rows.token_ids[good] != NO_TOKEN]
        self._mirror.commit(rows.lanes[good], rows.num_tokens[good], rows.lanes[sampled], rows.token_ids[sampled])

    def _sample(self, rows: _Rows, chosen: Int64s, logits: torch.Tensor) -> None:
        """Fill `token_ids` of the chosen rows, one row of logits each. Greedy rows cost no Python loop."""
        values = logits.detach().to("cpu", torch.float32).numpy()
        best, finite = argmax_rows(values)
        greedy = self._mirror.greedy[rows.lanes[chosen]]
        taken = greedy & finite
        rows.token_ids[chosen[taken]] = best[taken]
        for i in np.flatnonzero(~taken).tolist():
            row = int(chosen[i])
            if not finite[i]:
                self._fail(rows, row, pb.ROW_ERROR_CODE_NUMERICAL, "logits are not finite")
                continue
            try:
                rows.token_ids[row] = self._choose(int(rows.lanes[row]), values[i])
            except NumericalError as error:
                self._fail(rows, row, pb.ROW_ERROR_CODE_NUMERICAL, str(error))
            except Exception as error:
                self._fail(rows, row, pb.ROW_ERROR_CODE_INTERNAL, _reason(error), error)

    def _choose(self, lane: int, logits: np.ndarray[tuple[int], np.dtype[np.float32]]) -> int:
        mirror = self._mirror
        sampling = mirror.sampling[lane]
        assert sampling is not None, "a live lane has its parameters"
        position = int(mirror.num_tokens[lane])
        generated = position - int(mirror.num_prompt[lane])
        held_back = sampling.stop_token_ids.astype(np.int64) if generated < sampling.min_tokens else None
        params = SamplingParams(sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p)
        return self._sampler.choose(
            logits,
            params,
            seed=sampling.seed,
            choice=int(mirror.choice[lane]),
            position=position,
            held_back=held_back,
        )

    def _fail(self, rows: _Rows, row: int, code: pb.RowErrorCode, reason: str, error: Exception | None = None) -> None:
        rows.errors[row] = code
        lane = int(rows.lanes[row])
        if code != pb.ROW_ERROR_CODE_BAD_ROW:  # that is logged where its lane broke, and again for no row after it
            name = pb.RowErrorCode.Name(code)
            log.warning("row failed", extra=kv(row=row, lane=lane, code=name, reason=reason), exc_info=error)
        self._mirror.break_lane(lane, reason)


def _reason(error: Exception) -> str:
    """One line for the log; exceptions of torch span many."""
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:300]
