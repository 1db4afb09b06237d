"""What the scheduler answers to the questions that gateways pass on from operators."""

from __future__ import annotations

from pagemill.engine.v1 import frontend_pb2 as pb
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.stats import SchedulerStats

MAX_LINES = 64
"""Findings in one reply; its number tells of the others."""
MAX_LINE_CHARS = 300


def found(violations: list[str]) -> pb.AdminReply:
    """The reply with the findings of a check."""
    lines = [line[:MAX_LINE_CHARS] for line in violations[:MAX_LINES]]
    return pb.AdminReply(violations=lines, num_violations=len(violations))


def flushed(core: Scheduler) -> pb.AdminReply:
    """Flush the prefix cache; the reply with what that was."""
    return pb.AdminReply(num_flushed_blocks=core.flush_prefix_cache())


def load(stats: SchedulerStats) -> pb.AdminReply:
    """The reply with what there is to do."""
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
