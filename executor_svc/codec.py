"""Step plans from the wire into checked numpy columns, and step results back.

Two kinds of wrong are told apart. What cannot be read at all (columns that do not match, counts above the limits of
the hello, abilities this executor does not have) raises `PlanError`: nothing can be said about any row. What reads
well but does not fit one lane (an unknown block, a token outside the vocabulary) is left to the mirror, which fails
that lane's rows only. Every count is checked against the length of the frame and the limits before anything is
allocated for it.
"""

from __future__ import annotations

import numpy as np

from executor_svc.kv.copy_engine import Pairs
from executor_svc.plans import (
    EMPTY,
    NO_PAIRS,
    AdmitOp,
    DecodedPlan,
    Int32s,
    LaneSampling,
    PlanError,
    PlanLimits,
    StepOutcome,
)
from pagemill.engine.v1 import executor_pb2 as pb

_MAX_UINT32 = 0xFFFFFFFF


def decode_plan(plan: pb.StepPlan, limits: PlanLimits) -> DecodedPlan:
    """Checked columns of a plan. Raises PlanError; see the head of this file."""
    _refuse_unsupported(plan)
    lanes = limits.num_lanes
    release = _lanes(plan.release_lanes, "release_lanes", lanes)
    rewind = _lanes(plan.rewind_lanes, "rewind_lanes", lanes)
    append = _lanes(plan.append_lanes, "append_lanes", lanes)
    rows = _lanes(plan.row_lanes, "row_lanes", lanes)
    if plan.repeat_decode and (rows.size or plan.row_num_tokens):
        raise PlanError("repeat_decode together with rows")
    if rows.size > limits.max_rows:
        raise PlanError(f"{rows.size} rows, at most {limits.max_rows}")
    num_tokens = _beside(plan.row_num_tokens, "row_num_tokens", rows) if plan.row_num_tokens else None
    wanted = rows.size if num_tokens is None else int(np.maximum(num_tokens, 0).sum(dtype=np.int64))
    if wanted > limits.max_tokens:
        raise PlanError(f"{wanted} tokens, at most {limits.max_tokens}")
    if len(plan.admit) > lanes:
        raise PlanError(f"{len(plan.admit)} admitted lanes, at most {lanes}")
    return DecodedPlan(
        step_id=plan.step_id,
        release_lanes=release,
        rewind_lanes=rewind,
        rewind_num_tokens=_beside(plan.rewind_num_tokens, "rewind_num_tokens", rewind),
        rewind_num_blocks=_beside(plan.rewind_num_blocks, "rewind_num_blocks", rewind),
        swap_out=_pairs(plan, "swap_out", limits.num_blocks, limits.num_host_blocks),
        copy=_pairs(plan, "copy", limits.num_blocks, limits.num_blocks),
        swap_in=_pairs(plan, "swap_in", limits.num_host_blocks, limits.num_blocks),
        admit=tuple(_admit(admit, limits) for admit in plan.admit),
        append_lanes=append,
        append_block_ids=_beside(plan.append_block_ids, "append_block_ids", append),
        repeat_decode=plan.repeat_decode,
        row_lanes=rows,
        row_num_tokens=num_tokens,
        deadline_ms=plan.deadline_ms,
        state_digest=plan.state_digest if plan.HasField("state_digest") else None,
    )


def _refuse_unsupported(plan: pb.StepPlan) -> None:
    """Raise for what this executor cannot do and did not offer in its hello: never run a plan half understood."""
    for name in ("draft_ids", "num_drafts", "want_logprobs", "mask_follows"):
        if getattr(plan, name):
            raise PlanError(f"unsupported: {name}")


def _column(data: bytes, name: str) -> Int32s:
    if len(data) % 4:
        raise PlanError(f"{name}: {len(data)} bytes are not a column of int32")
    return np.frombuffer(data, "<i4").astype(np.int32, copy=False) if data else EMPTY


def _beside(data: bytes, name: str, beside: Int32s) -> Int32s:
    column = _column(data, name)
    _same_length(beside, column, name)
    return column


def _same_length(a: Int32s, b: Int32s, name: str) -> None:
    if a.size != b.size:
        raise PlanError(f"{name}: parallel columns of {a.size} and {b.size} entries")


def _lanes(data: bytes, name: str, num_lanes: int) -> Int32s:
    return _in_range(_column(data, name), name, num_lanes)


def _pairs(plan: pb.StepPlan, name: str, num_src: int, num_dst: int) -> Pairs:
    """The columns `name`_src and `name`_dst, checked so that the order of the pairs does not matter."""
    src_data: bytes = getattr(plan, f"{name}_src")
    dst_data: bytes = getattr(plan, f"{name}_dst")
    if not src_data and not dst_data:
        return NO_PAIRS
    if not (num_src and num_dst):
        raise PlanError(f"unsupported: {name} (this executor has no host blocks)")
    src = _in_range(_column(src_data, f"{name}_src"), f"{name}_src", num_src)
    dst = _in_range(_column(dst_data, f"{name}_dst"), f"{name}_dst", num_dst)
    _same_length(src, dst, name)
    written = np.zeros(num_dst, np.bool_)
    written[dst] = True
    if np.count_nonzero(written) != dst.size:
        raise PlanError(f"{name}_dst: a block twice")
    if name == "copy" and written[src].any():
        raise PlanError("copy: a block is source and destination")
    return src, dst


def _in_range(column: Int32s, name: str, bound: int) -> Int32s:
    if column.size and not 0 <= int(column.min()) <= int(column.max()) < bound:
        raise PlanError(f"{name}: {int(column.min())}..{int(column.max())}, expected 0..{bound - 1}")
    return column


def _admit(admit: pb.Admit, limits: PlanLimits) -> AdmitOp:
    if admit.lane >= limits.num_lanes:
        raise PlanError(f"admit: lane {admit.lane}, expected 0..{limits.num_lanes - 1}")
    sampling = admit.sampling
    op = AdmitOp(
        lane=admit.lane,
        generation=admit.generation,
        token_ids=_column(admit.token_ids, "admit.token_ids"),
        num_prompt_tokens=admit.num_prompt_tokens,
        num_cached_tokens=admit.num_cached_tokens,
        block_ids=_column(admit.block_ids, "admit.block_ids"),
        sampling=LaneSampling(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
            seed=sampling.seed,
            min_tokens=sampling.min_tokens,
            stop_token_ids=_column(sampling.stop_token_ids, "admit.sampling.stop_token_ids"),
        ),
        choice_index=admit.choice_index,
    )
    fault = _admit_fault(op, admit, limits)
    if fault is None:
        return op
    return AdmitOp(admit.lane, admit.generation, EMPTY, 0, 0, EMPTY, op.sampling, 0, fault)


def _admit_fault(op: AdmitOp, admit: pb.Admit, limits: PlanLimits) -> str | None:
    """Why this sequence cannot run here, without its tokens (prompts are never logged); None if it can."""
    if admit.adapter or admit.flags:
        return "adapters and flags are unsupported"
    return _ids_fault(op, limits) or _blocks_fault(op, limits) or check_sampling(op.sampling, limits.vocab_size)


def _ids_fault(op: AdmitOp, limits: PlanLimits) -> str | None:
    ids = op.token_ids
    if not 1 <= ids.size <= limits.max_model_len:
        return f"{ids.size} tokens, expected 1..{limits.max_model_len}"
    if int(ids.min()) < 0 or int(ids.max()) >= limits.vocab_size:
        return "a token outside the vocabulary"
    if not 1 <= op.num_prompt_tokens <= ids.size:
        return f"{op.num_prompt_tokens} prompt tokens of {ids.size}"
    return None


def _blocks_fault(op: AdmitOp, limits: PlanLimits) -> str | None:
    blocks = op.block_ids
    if blocks.size > limits.num_blocks:
        return f"{blocks.size} blocks, at most {limits.num_blocks}"
    if blocks.size and not 0 <= int(blocks.min()) <= int(blocks.max()) < limits.num_blocks:
        return "a block outside the pool"
    if op.num_cached_tokens >= op.token_ids.size:
        return f"{op.num_cached_tokens} cached tokens of {op.token_ids.size}"
    return None


def check_sampling(sampling: LaneSampling, vocab_size: int) -> str | None:
    """Why these parameters cannot be used; None if they can. NaN fails every comparison, so it is caught too."""
    if not 0.0 <= sampling.temperature <= 100.0:
        return f"temperature {sampling.temperature}"
    if not 0.0 < sampling.top_p <= 1.0:
        return f"top_p {sampling.top_p}"
    if not 0.0 <= sampling.min_p <= 1.0:
        return f"min_p {sampling.min_p}"
    stop = sampling.stop_token_ids
    if stop.size and not 0 <= int(stop.min()) <= int(stop.max()) < vocab_size:
        return "a stop token outside the vocabulary"
    return None


def encode_result(outcome: StepOutcome) -> pb.StepResult:
    """The message for an outcome."""
    if outcome.failed:
        status = pb.STEP_STATUS_FAILED
    else:
        status = pb.STEP_STATUS_ROW_ERRORS if outcome.row_errors else pb.STEP_STATUS_OK
    copies = outcome.copies
    return pb.StepResult(
        step_id=outcome.step_id,
        status=status,
        token_ids=outcome.token_ids.astype("<i4", copy=False).tobytes(),
        row_errors=[pb.RowError(row=row, code=code) for row, code in sorted(outcome.row_errors.items())],
        wait_us=outcome.wait_us,
        execute_us=outcome.execute_us,
        finished_copy_steps=[] if copies is None else copies.steps,
        copy_us=0 if copies is None else min(int(sum(copy.seconds for copy in copies.done) * 1e6), _MAX_UINT32),
        state_digest=outcome.state_digest,
    )
