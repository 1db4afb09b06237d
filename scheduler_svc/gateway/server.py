"""Puts a gateway together, serves, and takes it down in order.

Drain: readiness goes off, new work is refused with DRAINING (over the open port, so that clients hear the reason),
running streams get their time, what is left then ends with DRAINING, and the process leaves with status 0.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass, field

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from pagemill.logs import kv
from pagemill.model_files import ModelInfo
from pagemill.v1 import admin_pb2_grpc, inference_pb2_grpc, model_pb2_grpc
from scheduler_svc.gateway.admin_service import AdminService
from scheduler_svc.gateway.chat import ChatTemplate
from scheduler_svc.gateway.config import GatewaySettings
from scheduler_svc.gateway.limits import LIMITS
from scheduler_svc.gateway.link import AsyncLink, Identity
from scheduler_svc.gateway.metrics import GatewayMetrics
from scheduler_svc.gateway.models_service import ModelService
from scheduler_svc.gateway.ports import listen
from scheduler_svc.gateway.prompts import PromptEncoder
from scheduler_svc.gateway.registry import Registry, draining
from scheduler_svc.gateway.scheduler_client import SchedulerClient
from scheduler_svc.gateway.service import InferenceService, ServedModel
from scheduler_svc.gateway.status import ErrorInterceptor
from scheduler_svc.gateway.tokenizer import TextTokenizer, TokenizerPool

_log = logging.getLogger(__name__)

READINESS_SERVICE = "pagemill.v1.InferenceService"
_MAX_METADATA_BYTES = 16 * 1024
_HANDSHAKE_TIMEOUT_S = 10.0
"""How long a new connection may take to begin HTTP/2 (gRPC's default is two minutes)."""
_LAST_WORD_S = 2.0
_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


def server_options(settings: GatewaySettings) -> list[tuple[str, int]]:
    """Options of the gRPC server. A misspelt name is ignored silently by grpc, so a test looks each one up."""
    return [
        ("grpc.so_reuseport", 0),  # otherwise a second process could bind the same port unnoticed
        ("grpc.max_receive_message_length", settings.max_message_bytes),
        ("grpc.max_send_message_length", settings.max_message_bytes),
        ("grpc.max_metadata_size", _MAX_METADATA_BYTES),
        ("grpc.absolute_max_metadata_size", _MAX_METADATA_BYTES),
        ("grpc.max_concurrent_streams", settings.max_streams_per_connection),
        ("grpc.max_allowed_incoming_connections", settings.connection_limit),
        ("grpc.server_handshake_timeout_ms", int(_HANDSHAKE_TIMEOUT_S * 1000)),
        # Calls that came and were not looked at yet. By default gRPC begins to refuse at random behind 1,000 of them,
        # with no reason that a client could read: a burst is for the registry to judge, which knows what is alive.
        ("grpc.server.max_pending_requests", settings.max_live_requests),
        ("grpc.server.max_pending_requests_hard_limit", 2 * settings.max_live_requests),
        # Clients may ping a quiet stream every 10 s (load balancers cut idle connections); the default allows 5 min.
        ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.keepalive_time_ms", 60_000),
        ("grpc.keepalive_timeout_ms", 20_000),
        ("grpc.max_connection_idle_ms", 3_600_000),
    ]


def admin_options() -> list[tuple[str, int]]:
    """Options of the admin server: a few operators with small messages."""
    return [
        ("grpc.so_reuseport", 0),
        ("grpc.max_receive_message_length", 64 * 1024),
        ("grpc.max_metadata_size", _MAX_METADATA_BYTES),
        ("grpc.absolute_max_metadata_size", _MAX_METADATA_BYTES),
        ("grpc.max_concurrent_streams", 16),
        ("grpc.max_allowed_incoming_connections", 16),
        ("grpc.server_handshake_timeout_ms", int(_HANDSHAKE_TIMEOUT_S * 1000)),
    ]


@dataclass
class Gateway:
    """A gateway over a link to a scheduler. `start`, then `drain` or `stop`."""

    settings: GatewaySettings
    info: ModelInfo
    tokenizer: TextTokenizer
    link: AsyncLink
    identity: Identity
    metrics: GatewayMetrics = field(default_factory=GatewayMetrics)
    port: int = 0
    """Port that gRPC is served on, once started."""

    async def start(self) -> None:
        """Serve. Raises TemplateCompileError, or EndpointError when the port cannot be had."""
        model = ServedModel(
            self.settings.model_name or self.info.name,
            self.info,
            min(self.info.max_model_len, self.settings.max_model_len or self.info.max_model_len),
        )
        self._health = health.aio.HealthServicer()  # type: ignore[attr-defined]
        self._background: set[asyncio.Task[object]] = set()
        self.registry = Registry(self.metrics, max_live=self.settings.max_live_requests)
        self.scheduler = SchedulerClient(
            self.link,
            self.identity,
            self.metrics,
            self._on_ready,
            session_wait_s=self.settings.session_wait_s,
            answer_timeout_s=self.settings.answer_timeout_s,
            resume_timeout_s=self.settings.resume_timeout_s,
        )
        self.pool = TokenizerPool(self.tokenizer, LIMITS.prompt_bytes_per_token * model.max_model_len)
        self._chat = self._chat_template()
        self.inference = InferenceService(
            model,
            pool=self.pool,
            prompts=PromptEncoder(self.pool, self._chat),
            scheduler=self.scheduler,
            registry=self.registry,
            metrics=self.metrics,
        )
        self._server = self._build_server(ModelService(model, self.inference, self.scheduler))
        self._admin = self._build_admin(model)
        await self._health.set("", _SERVING)
        await self._health.set(READINESS_SERVICE, _NOT_SERVING)
        self._link_task = asyncio.create_task(self.scheduler.run())  # its hello travels while the worker starts
        if self._chat is not None:
            await self._chat.start()
        await self._server.start()
        if self._admin is not None:
            await self._admin.start()
        self._sweep_task = asyncio.create_task(self._sweep())
        _log.info("serving", extra=kv(host=self.settings.host, port=self.port, model=model.name))

    async def run(self) -> None:
        """Until the link to the scheduler ends, which it only does by raising (SchedulerRejectedError, in a group)."""
        await self._link_task

    async def drain(self) -> None:
        """Finish what runs, refuse what comes, stop."""
        _log.info("draining", extra=kv(calls=len(self.registry)))
        self.registry.draining = True
        await self._health.set(READINESS_SERVICE, _NOT_SERVING)
        if not await self.registry.wait_empty(self.settings.drain_timeout_s):
            self.registry.end_all(draining())
            await self.registry.wait_empty(_LAST_WORD_S)
        await self.stop(grace_s=_LAST_WORD_S)

    async def stop(self, grace_s: float = 0.0) -> None:
        """Stop now; calls that still run get `grace_s` seconds."""
        self.registry.draining = True
        await self._server.stop(grace_s)
        if self._admin is not None:  # last: an operator may watch the drain
            await self._admin.stop(0)
        for task in (self._link_task, self._sweep_task, *self._background):
            task.cancel()
        await asyncio.gather(self._link_task, self._sweep_task, *self._background, return_exceptions=True)
        self.scheduler.close()
        if self._chat is not None:
            await self._chat.close()
        self.pool.close()
        _log.info("stopped")

    def _chat_template(self) -> ChatTemplate | None:
        if self.info.chat_template is None:
            return None
        controls = [control.text for control in self.tokenizer.controls]
        return ChatTemplate(
            self.info.chat_template, self.info.special_tokens, controls, timeout_s=self.settings.chat_render_timeout_s
        )

    def _build_server(self, models: ModelService) -> grpc.aio.Server:
        server = grpc.aio.server(interceptors=[ErrorInterceptor()], options=server_options(self.settings))
        inference_pb2_grpc.add_InferenceServiceServicer_to_server(self.inference, server)  # type: ignore[no-untyped-call]
        model_pb2_grpc.add_ModelServiceServicer_to_server(models, server)  # type: ignore[no-untyped-call]
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        if self.settings.reflection:
            _add_reflection(server)
        self.port = listen(server, self.settings.host, self.settings.port, what="gRPC", options="--host, --port")
        return server

    def _build_admin(self, model: ServedModel) -> grpc.aio.Server | None:
        """The admin service, on a server and a port of its own: no client of `--port` can reach it."""
        settings = self.settings
        if not settings.admin_port:
            return None
        server = grpc.aio.server(interceptors=[ErrorInterceptor()], options=admin_options())
        service = AdminService(model.name, self.identity, registry=self.registry, scheduler=self.scheduler)
        admin_pb2_grpc.add_AdminServiceServicer_to_server(service, server)  # type: ignore[no-untyped-call]
        where = "--admin-host, --admin-port"
        listen(server, settings.admin_host, settings.admin_port, what="the admin service", options=where)
        return server

    def _on_ready(self, ready: bool) -> None:
        status = _SERVING if ready and not self.registry.draining else _NOT_SERVING
        task = asyncio.get_running_loop().create_task(self._health.set(READINESS_SERVICE, status))
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def _sweep(self) -> None:
        """Look for clients that do not read, several times per timeout but at most once a second."""
        pause = min(1.0, self.settings.slow_client_timeout_s / 4)
        while True:
            before = time.monotonic()
            await asyncio.sleep(pause)
            if time.monotonic() - before > 2 * pause + 1:
                continue  # this process was stopped or starved: give clients the time that it did not have
            cut = self.registry.cut_slow(self.settings.slow_client_timeout_s)
            if cut:
                _log.warning("slow clients cut", extra=kv(calls=cut))


def _add_reflection(server: grpc.aio.Server) -> None:
    from grpc_reflection.v1alpha import reflection  # noqa: PLC0415 (costs start-up time, seldom wanted)

    names = ("pagemill.v1.InferenceService", "pagemill.v1.ModelService", "grpc.health.v1.Health")
    reflection.enable_server_reflection((*names, reflection.SERVICE_NAME), server)
