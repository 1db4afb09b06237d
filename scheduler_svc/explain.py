"""Steps and preemptions in words: one debug line each, with the numbers that explain it."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from pagemill.columns import unpack
from pagemill.engine.v1 import executor_pb2 as pb
from pagemill.logs import STEP_ID, kv
from scheduler_svc.core.preemption import Action, Reason
from scheduler_svc.core.stats import SchedulerStats
from scheduler_svc.executor_session import SentPlan

log = logging.getLogger(__name__)


def explain(plan: SentPlan, result: pb.StepResult, stats: SchedulerStats, now: float) -> dict[str, Any]:
    """What one step did, and what is left; the plan's side and the result's side of it in one line."""
    message = plan.message
    return {
        STEP_ID: plan.step_id,
        "tokens": plan.num_tokens,
        "rows": plan.num_rows,
        "admitted": len(message.admit),
        "released": len(unpack(message.release_lanes)),
        "swapped_out": len(unpack(message.swap_out_src)),
        "swapped_in": len(unpack(message.swap_in_src)),
        "running": stats.running,
        "waiting": stats.queue_requests,
        "swapped": stats.swapped,
        "free_blocks": stats.blocks_free,
        "cached_blocks": stats.blocks_cached,
        "preemptions": stats.num_preemptions_total,
        "ms": round((now - plan.sent_at) * 1000, 3),
        "execute_ms": result.execute_us / 1000,
    }


def explain_preemptions(
    step_id: int, stats: SchedulerStats, before: Mapping[tuple[Action, Reason], int]
) -> dict[tuple[Action, Reason], int]:
    """Logs the preemptions of the plan by action and reason, those that `before` does not count; returns the new."""
    for (action, reason), total in stats.preemptions_total.items():
        count = total - before.get((action, reason), 0)
        if count > 0:
            log.debug(
                "preempted",
                extra=kv(
                    **{STEP_ID: step_id},
                    count=count,
                    action=action.value,
                    reason=reason.value,
                    waiting=stats.queue_requests,
                    swapped=stats.swapped,
                    free_blocks=stats.blocks_free,
                    cached_blocks=stats.blocks_cached,
                ),
            )
    return dict(stats.preemptions_total)
