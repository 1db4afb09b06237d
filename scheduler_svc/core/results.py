"""From a step result to tokens of sequences: append, find ends, and drop what nobody waits for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from scheduler_svc.core.events import FinishedEvent, FinishReason, Refusal, TokensEvent
from scheduler_svc.core.params import SeqId
from scheduler_svc.core.plan import NO_TOKEN, RowErrorCode, StepResult, StepStatus
from scheduler_svc.core.running import InFlight
from scheduler_svc.core.sequence import Sequence, SequenceState


class ResultMismatchError(Exception):
    """A result cannot belong to the plan it names, or skips one: the session must be started anew. Nothing changed."""


@dataclass(slots=True)
class Outcome:
    """What one result brought."""

    tokens: list[TokensEvent]
    """One per group that got tokens."""
    ended: list[tuple[Sequence, FinishReason]] = field(default_factory=list)
    num_tokens: int = 0


def check_shape(record: InFlight, result: StepResult) -> None:
    """Raises ResultMismatchError unless the result has a token, or its run of tokens, for each row of the plan."""
    num_rows = len(record.rows)
    if result.status is StepStatus.FAILED:
        return
    if result.num_tokens is None:
        if len(result.token_ids) != num_rows:
            raise ResultMismatchError(f"step {result.step_id}: {len(result.token_ids)} tokens for {num_rows} rows")
        return
    counts = result.num_tokens
    if len(counts) != num_rows or sum(counts) != len(result.token_ids) or min(counts, default=1) < 1:
        raise ResultMismatchError(
            f"step {result.step_id}: {len(counts)} counts over {len(result.token_ids)} tokens for {num_rows} rows"
        )


def take_result(record: InFlight, result: StepResult) -> Outcome:
    """Appends the result's tokens to its sequences.

    Rows of sequences that have ended meanwhile are dropped: that is the one wasted row behind a stop, or a
    cancellation. A preempted sequence keeps what its rows bring. Rows that failed, or that gave a token when none was
    due or none when one was, end their sequences; the others are not affected.
    """
    columns = _Columns()
    failed = _failed_rows(record, result)
    if result.num_tokens is not None:
        _take_runs(record, result, failed, columns)
    elif failed or record.silent:
        rows = [
            (seq, token)
            for row, (seq, token) in enumerate(zip(record.rows, result.token_ids, strict=True))
            if row not in failed and row not in record.silent
        ]
        _take_single([seq for seq, _ in rows], [token for _, token in rows], columns)
    else:
        _take_single(record.rows, result.token_ids, columns)
    outcome = columns.outcome()
    for row, code in failed.items():
        if record.rows[row].finish_reason is None:
            reason = FinishReason.NUMERICAL if code is RowErrorCode.NUMERICAL else FinishReason.INTERNAL
            outcome.ended.append((record.rows[row], reason))
    return outcome


def finished_event(seq: Sequence, reason: FinishReason, now: float, refusal: Refusal | None) -> FinishedEvent:
    """The end of a sequence, and its bill."""
    started = now if seq.first_run is None else seq.first_run
    return FinishedEvent(
        group=seq.group,
        seq_id=seq.seq_id,
        reason=reason,
        num_output_tokens=seq.num_output_tokens,
        queue_s=max(0.0, started - seq.arrival),
        num_computed_tokens=seq.num_prefilled,
        num_cached_tokens=seq.num_cached_prompt,
        num_preemptions=seq.num_preemptions,
        refusal=refusal,
    )


def _failed_rows(record: InFlight, result: StepResult) -> dict[int, RowErrorCode]:
    """Rows by index that the executor reports, and those whose token is not what their plan asked for."""
    failed = {row: code for row, code in result.row_errors.items() if 0 <= row < len(record.rows)}
    token_ids = result.token_ids
    if not record.silent and (not token_ids or min(token_ids) >= 0):
        return failed
    position = 0
    for row in range(len(record.rows)):
        count = 1 if result.num_tokens is None else result.num_tokens[row]
        run = token_ids[position : position + count]
        position += count
        is_right = run == [NO_TOKEN] if row in record.silent else min(run) >= 0
        if not is_right:
            failed.setdefault(row, RowErrorCode.INTERNAL)
    return failed


class _Columns:
    """Token events under construction, one set of columns per group."""

    __slots__ = ("counts", "ended", "groups", "num_tokens")

    def __init__(self) -> None:
        self.groups: dict[int, tuple[list[SeqId], list[int], list[int]]] = {}
        """Group → sequence ids, first indices, token ids."""
        self.counts: dict[int, list[int]] | None = None
        self.ended: list[tuple[Sequence, FinishReason]] = []
        self.num_tokens = 0

    def outcome(self) -> Outcome:
        """The events; groups in the order in which they first got a token."""
        counts = self.counts
        events = [
            TokensEvent(group, seq_ids, None if counts is None else counts[group], first_index, token_ids)
            for group, (seq_ids, first_index, token_ids) in self.groups.items()
        ]
        return Outcome(events, self.ended, sum(len(event.token_ids) for event in events))


def _take_single(rows: list[Sequence], token_ids: list[int], columns: _Columns) -> None:
    """One token per row. The hot loop of `apply`: no object per row."""
    group: int | None = None
    add_seq: Callable[[SeqId], None]
    add_index: Callable[[int], None]
    add_token: Callable[[int], None]
    for seq, token in zip(rows, token_ids, strict=True):
        if seq.finish_reason is not None:
            continue
        if seq.group != group:
            group = seq.group
            seq_ids, first_index, tokens = columns.groups.setdefault(group, ([], [], []))
            add_seq, add_index, add_token = seq_ids.append, first_index.append, tokens.append
        known = seq.token_ids
        add_seq(seq.seq_id)
        add_index(len(known) - seq.prompt_len)
        add_token(token)
        known.append(token)
        num_known = len(known)
        if token in seq.stop_token_ids and num_known > seq.stop_after:
            columns.ended.append((seq, FinishReason.STOP))
        elif num_known >= seq.token_limit:
            columns.ended.append((seq, FinishReason.LENGTH))


def _take_runs(record: InFlight, result: StepResult, failed: dict[int, RowErrorCode], columns: _Columns) -> None:
    """One or more tokens per row: each run is kept up to its first end, and planning moves on by what it brought."""
    assert result.num_tokens is not None
    counts = columns.counts = {}
    position = 0
    for row, (seq, count) in enumerate(zip(record.rows, result.num_tokens, strict=True)):
        run = result.token_ids[position : position + count]
        position += count
        if seq.finish_reason is not None or row in failed or row in record.silent:
            continue
        seq_ids, first_index, tokens = columns.groups.setdefault(seq.group, ([], [], []))
        seq_ids.append(seq.seq_id)
        first_index.append(seq.num_output_tokens)
        num_kept = _append_run(seq, run, columns)
        tokens.extend(run[:num_kept])
        counts.setdefault(seq.group, []).append(num_kept)
        if seq.state is SequenceState.RUNNING:
            # The plan counted on one token. The executor computed a position for each that it gave.
            seq.num_planned += num_kept - 1


def _append_run(seq: Sequence, run: list[int], columns: _Columns) -> int:
    """Appends tokens until the sequence ends; returns how many."""
    for num_kept, token in enumerate(run, start=1):
        seq.token_ids.append(token)
        reason = seq.end_reason()
        if reason is not None:
            columns.ended.append((seq, reason))
            return num_kept
    return len(run)
