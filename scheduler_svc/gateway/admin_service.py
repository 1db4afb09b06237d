"""`pagemill.v1.AdminService`: what an operator asks. Served on a port of its own (`server`), never on the clients'."""

from __future__ import annotations

import logging
import time
from typing import Any, NoReturn

from pagemill.engine.v1 import frontend_pb2 as wire
from pagemill.errors import unsupported
from pagemill.logs import kv
from pagemill.v1 import admin_pb2 as pb
from pagemill.v1 import admin_pb2_grpc
from scheduler_svc.gateway.link import Identity
from scheduler_svc.gateway.registry import Registry
from scheduler_svc.gateway.scheduler_client import SchedulerClient

_log = logging.getLogger(__name__)


class AdminService(admin_pb2_grpc.AdminServiceServicer):
    """Looks into this gateway and, through its desk, into the scheduler."""

    def __init__(
        self,
        model_name: str,
        identity: Identity,
        *,
        registry: Registry,
        scheduler: SchedulerClient,
    ) -> None:
        self._model_name = model_name
        self._identity = identity
        self._registry = registry
        self._scheduler = scheduler
        self._desk = scheduler.desk
        self._started_at = time.monotonic()

    async def GetServerInfo(self, request: pb.GetServerInfoRequest, context: Any) -> pb.GetServerInfoResponse:  # noqa: N802
        """Versions, names and state."""
        me, status = self._identity, self._scheduler.status
        return pb.GetServerInfoResponse(
            version=me.version,
            host=me.host,
            incarnation=me.incarnation,
            uptime_ms=int((time.monotonic() - self._started_at) * 1000),
            model=self._model_name,
            model_fingerprint=me.model_fingerprint,
            ready=self._scheduler.ready and not self._registry.draining,
            draining=self._registry.draining,
            scheduler_connected=self._scheduler.connected,
            scheduler_draining=status.draining,
            num_executors=status.num_executors,
            max_model_len=status.max_model_len,
            kv_capacity_tokens=status.kv_capacity_tokens,
        )

    async def GetLoad(self, request: pb.GetLoadRequest, context: Any) -> pb.GetLoadResponse:  # noqa: N802
        """How much is queued, running and stored."""
        load = (await self._desk.ask(wire.ADMIN_OPERATION_GET_LOAD)).load
        return pb.GetLoadResponse(
            live_requests=len(self._registry),
            queue_requests=load.queue_requests,
            queue_tokens=load.queue_tokens,
            running_requests=load.running_requests,
            swapped_requests=load.swapped_requests,
            tiers=[
                pb.TierLoad(
                    tier=tier.tier,
                    total_blocks=tier.total,
                    free_blocks=tier.free,
                    used_blocks=tier.used,
                    cached_blocks=tier.cached,
                    in_flight_blocks=tier.in_flight,
                    reserved_blocks=tier.reserved,
                )
                for tier in load.tiers
            ],
        )

    async def FlushPrefixCache(self, request: pb.FlushPrefixCacheRequest, context: Any) -> pb.FlushPrefixCacheResponse:  # noqa: N802
        """Forget cached prefixes."""
        reply = await self._desk.ask(wire.ADMIN_OPERATION_FLUSH_PREFIX_CACHE)
        _log.info("prefix cache flushed", extra=kv(blocks=reply.num_flushed_blocks))
        return pb.FlushPrefixCacheResponse(num_blocks=reply.num_flushed_blocks)

    async def CheckInvariants(self, request: pb.CheckInvariantsRequest, context: Any) -> pb.CheckInvariantsResponse:  # noqa: N802
        """Check the scheduler's books."""
        reply = await self._desk.ask(wire.ADMIN_OPERATION_CHECK_INVARIANTS)
        return pb.CheckInvariantsResponse(violations=reply.violations, num_violations=reply.num_violations)

    async def ListExecutors(self, request: pb.ListExecutorsRequest, context: Any) -> NoReturn:  # noqa: N802
        """Not yet."""
        raise unsupported("ListExecutors")

    async def DrainExecutor(self, request: pb.DrainExecutorRequest, context: Any) -> NoReturn:  # noqa: N802
        """Not yet."""
        raise unsupported("DrainExecutor")

    async def Drain(self, request: pb.DrainRequest, context: Any) -> NoReturn:  # noqa: N802
        """Not yet."""
        raise unsupported("Drain")
