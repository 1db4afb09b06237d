"""What the scheduler answers to the questions that gateways pass on from operators."""

from __future__ import annotations

from pagemill.engine.v1 import frontend_pb2 as pb
from scheduler_svc.audit import Audit
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.stats import SchedulerStats

MAX_LINES = 64
"""Findings in one reply; its number tells of the others."""
MAX_LINE_CHARS = 300


def answer(operation: int, core: Scheduler, audit: Audit, now: float) -> pb.AdminReply:
    """The reply to a question of any number; without its id."""
    if operation == pb.ADMIN_OPERATION_CHECK_INVARIANTS:
        return _found(audit.check_unless_fresh(core, now))
    if operation == pb.ADMIN_OPERATION_FLUSH_PREFIX_CACHE:
        return pb.AdminReply(num_flushed_blocks=core.flush_prefix_cache())
    if operation == pb.ADMIN_OPERATION_GET_LOAD:
        return _load(core.stats())
    return pb.AdminReply(error="this scheduler does not know the operation")


def _found(violations: list[str]) -> pb.AdminReply:
    """With the findings of a check."""
    lines = [line[:MAX_LINE_CHARS] for line in violations[:MAX_LINES]]
    return pb.AdminReply(violations=lines, num_violations=len(violations))


def _load(stats: SchedulerStats) -> pb.AdminReply:
    """With what there is to do."""
    report = pb.SchedulerLoad(
        queue_requests=stats.queue_requests,
        queue_tokens=stats.queue_tokens,
        running_requests=stats.running,
        swapped_requests=stats.swapped,
    )
    report.tiers.extend(tiers(stats))
    return pb.AdminReply(load=report)


def tiers(stats: SchedulerStats) -> list[pb.TierBlocks]:
    """The blocks of each tier that the executor has; of the device also without an executor, all 0."""
    device = pb.TierBlocks(
        tier="device",
        total=stats.blocks_total,
        free=stats.blocks_free,
        used=stats.blocks_used,
        cached=stats.blocks_cached,
        in_flight=stats.blocks_in_flight,
        reserved=stats.blocks_reserved,
    )
    if not stats.host_blocks_total:
        return [device]
    in_flight = stats.host_blocks_total - stats.host_blocks_free - stats.host_blocks_used - stats.host_blocks_cached
    host = pb.TierBlocks(
        tier="host",
        total=stats.host_blocks_total,
        free=stats.host_blocks_free,
        used=stats.host_blocks_used,
        cached=stats.host_blocks_cached,
        in_flight=max(0, in_flight),
    )
    return [device, host]
