"""Why a submitted sequence is not queued."""

from __future__ import annotations

from scheduler_svc.core.events import Refusal, RefusalReason
from scheduler_svc.core.limits import StepLimits, refuse_length
from scheduler_svc.core.params import SchedulerConfig, SequenceSpec
from scheduler_svc.core.queues import WaitingQueue


def refuse(
    config: SchedulerConfig, waiting: WaitingQueue, limits: StepLimits | None, spec: SequenceSpec
) -> Refusal | None:
    """None when the sequence may be queued; `limits` are the executor's, None without one.

    A resubmission is not new: it has room beside a full queue. Its tokens may already be all that can be; then it ends
    with LENGTH rather than being refused.
    """
    refusal = None if limits is None else refuse_length(limits, len(spec.prompt_ids))
    if refusal is not None:
        return refusal
    max_requests = config.max_queue_requests + (config.max_num_seqs if spec.emitted_ids else 0)
    if len(waiting) >= max_requests:
        return Refusal(RefusalReason.QUEUE_FULL, f"{len(waiting)} requests are waiting, the limit")
    num_tokens = len(spec.prompt_ids) + len(spec.emitted_ids)
    if not spec.emitted_ids and len(waiting) and waiting.num_known_tokens + num_tokens > config.max_queue_tokens:
        return Refusal(
            RefusalReason.QUEUE_FULL,
            f"{waiting.num_known_tokens} prompt tokens are waiting, {num_tokens} more exceed the limit "
            f"of {config.max_queue_tokens}",
        )
    return None
