"""The admin service: on its own port, with what the gateway and the scheduler know of themselves."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from pydantic import ValidationError

from pagemill.engine.v1 import frontend_pb2 as wire
from pagemill.errors import Reason
from pagemill.v1 import admin_pb2 as pb
from pagemill.v1 import admin_pb2_grpc, inference_pb2
from scheduler_svc.gateway.config import GatewaySettings
from scheduler_svc.gateway.server import admin_options
from tests.integration.gateway_fixture import DEADLINE_S, FakeStream, Rig, connect, reason_of, running_gateway, until


@asynccontextmanager
async def with_admin(free_port: Callable[[], int], **settings: Any) -> AsyncIterator[tuple[Rig, Any]]:
    port = free_port()
    async with running_gateway(admin_port=port, **settings) as rig, connect(port) as channel:
        yield rig, admin_pb2_grpc.AdminServiceStub(channel)  # type: ignore[no-untyped-call]


async def waits(stream: FakeStream) -> None:
    stream.accept()
    await stream.cancelled.wait()
    stream.end(3)


async def test_server_info_tells_who_answers_and_in_what_state(free_port: Callable[[], int]) -> None:
    async with with_admin(free_port, model_name="mine") as (rig, admin):
        rig.scheduler.status.num_executors = 2
        await until(lambda: rig.gateway.scheduler.status.num_executors == 2)
        info = await admin.GetServerInfo(pb.GetServerInfoRequest(), timeout=20)
        assert (info.version, info.incarnation, info.host) == ("test", "1", "localhost")
        assert (info.model, info.model_fingerprint) == ("mine", "f" * 64)
        assert (info.ready, info.draining, info.scheduler_connected, info.scheduler_draining) == (
            True, False, True, False,
        )  # fmt: skip
        assert (info.num_executors, info.max_model_len, info.kv_capacity_tokens) == (2, 128, 4096)
        again = await admin.GetServerInfo(pb.GetServerInfoRequest(), timeout=20)
        assert again.uptime_ms >= info.uptime_ms


async def test_server_info_needs_no_scheduler_and_load_does(free_port: Callable[[], int]) -> None:
    async with with_admin(free_port) as (rig, admin):
        rig.scheduler.answers_hello = False
        rig.scheduler.restart()
        await until(lambda: not rig.gateway.scheduler.connected)
        info = await admin.GetServerInfo(pb.GetServerInfoRequest(), timeout=20)
        assert (info.ready, info.scheduler_connected) == (False, False)
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await admin.GetLoad(pb.GetLoadRequest(), timeout=20)
        assert error.value.code() is grpc.StatusCode.UNAVAILABLE
        assert reason_of(error.value) is Reason.NOT_READY


async def test_load_counts_calls_here_and_requests_and_blocks_there(free_port: Callable[[], int]) -> None:
    tiers = [
        wire.TierBlocks(tier="device", total=100, free=40, used=30, cached=20, in_flight=4, reserved=6),
        wire.TierBlocks(tier="host", total=7, free=7),
    ]
    theirs = wire.SchedulerLoad(queue_requests=3, queue_tokens=700, running_requests=5, swapped_requests=2, tiers=tiers)
    async with with_admin(free_port) as (rig, admin):
        rig.scheduler.script = waits
        rig.scheduler.answer = lambda _: wire.AdminReply(load=theirs)
        call = rig.api.Generate(inference_pb2.GenerateRequest(text="x"), timeout=20)
        await call.read()
        load = await admin.GetLoad(pb.GetLoadRequest(), timeout=20)
        assert rig.scheduler.questions == [wire.ADMIN_OPERATION_GET_LOAD]
        assert load == pb.GetLoadResponse(
            live_requests=1,
            queue_requests=3,
            queue_tokens=700,
            running_requests=5,
            swapped_requests=2,
            tiers=[
                pb.TierLoad(
                    tier="device",
                    total_blocks=100,
                    free_blocks=40,
                    used_blocks=30,
                    cached_blocks=20,
                    in_flight_blocks=4,
                    reserved_blocks=6,
                ),
                pb.TierLoad(tier="host", total_blocks=7, free_blocks=7),
            ],
        )
        call.cancel()


async def test_flush_and_check_are_the_schedulers(free_port: Callable[[], int]) -> None:
    async with with_admin(free_port) as (rig, admin):
        rig.scheduler.answer = lambda _: wire.AdminReply(
            num_flushed_blocks=12, violations=["block 3 in two places"], num_violations=70
        )
        assert (await admin.FlushPrefixCache(pb.FlushPrefixCacheRequest(), timeout=20)).num_blocks == 12
        checked = await admin.CheckInvariants(pb.CheckInvariantsRequest(), timeout=20)
        assert (list(checked.violations), checked.num_violations) == (["block 3 in two places"], 70)
        assert rig.scheduler.questions == [
            wire.ADMIN_OPERATION_FLUSH_PREFIX_CACHE,
            wire.ADMIN_OPERATION_CHECK_INVARIANTS,
        ]


async def test_a_question_that_the_scheduler_cannot_answer_says_why(free_port: Callable[[], int]) -> None:
    async with with_admin(free_port) as (rig, admin):
        rig.scheduler.answer = lambda _: wire.AdminReply(error="no executor is connected")
        with pytest.raises(grpc.aio.AioRpcError, match="no executor is connected") as error:
            await admin.CheckInvariants(pb.CheckInvariantsRequest(), timeout=20)
        assert reason_of(error.value) is Reason.NOT_READY


async def test_a_question_ends_with_the_session_and_is_not_asked_again(free_port: Callable[[], int]) -> None:
    async with with_admin(free_port) as (rig, admin):
        flushing = asyncio.ensure_future(admin.FlushPrefixCache(pb.FlushPrefixCacheRequest(), timeout=10))
        await until(lambda: len(rig.scheduler.questions) == 1)
        rig.scheduler.restart()
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await flushing
        assert reason_of(error.value) is Reason.NOT_READY
        await until(lambda: rig.gateway.scheduler.ready)
        await rig.probe()
        assert len(rig.scheduler.questions) == 1
        assert len(rig.gateway.scheduler.desk) == 0


@pytest.mark.parametrize("method", ["ListExecutors", "DrainExecutor", "Drain"])
async def test_what_is_to_come_is_refused_by_name(free_port: Callable[[], int], method: str) -> None:
    async with with_admin(free_port) as (rig, admin):
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await getattr(admin, method)(getattr(pb, f"{method}Request")(), timeout=20)
        assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert reason_of(error.value) is Reason.UNSUPPORTED_FEATURE
        assert method in str(error.value.details())
        await rig.probe()


async def test_s10_the_clients_port_has_no_admin_service_and_the_admin_port_nothing_else(
    free_port: Callable[[], int],
) -> None:
    async with with_admin(free_port) as (rig, _):
        stub = admin_pb2_grpc.AdminServiceStub(rig.channel)  # type: ignore[no-untyped-call]
        async with connect(rig.gateway.settings.admin_port) as channel:
            for call in (
                stub.GetServerInfo(pb.GetServerInfoRequest(), timeout=20),
                channel.unary_unary("/pagemill.v1.ModelService/ListModels")(b"", timeout=20),
            ):
                with pytest.raises(grpc.aio.AioRpcError) as error:
                    await call
                assert error.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_the_drain_can_be_watched(free_port: Callable[[], int]) -> None:
    async with with_admin(free_port, drain_timeout_s=10) as (rig, admin):
        rig.scheduler.script = waits
        rig.scheduler.answer = lambda _: wire.AdminReply()
        call = rig.api.Generate(inference_pb2.GenerateRequest(text="x"), timeout=20)
        await call.read()
        drain = asyncio.create_task(rig.gateway.drain())
        await until(lambda: rig.gateway.registry.draining)
        info = await admin.GetServerInfo(pb.GetServerInfoRequest(), timeout=20)
        assert (info.ready, info.draining) == (False, True)
        assert (await admin.GetLoad(pb.GetLoadRequest(), timeout=20)).live_requests == 1
        call.cancel()
        await asyncio.wait_for(drain, DEADLINE_S)


def test_s10_without_authentication_it_stays_on_this_machine() -> None:
    model = Path("x")
    assert GatewaySettings(model=model).admin_host == "127.0.0.1"
    with pytest.raises(ValidationError, match=r"--admin-host '10\.0\.0\.1' is not a loopback address"):
        GatewaySettings(model=model, admin_host="10.0.0.1")
    # A public port for clients does not take the admin port with it.
    assert GatewaySettings(model=model, host="0.0.0.0", insecure=True).admin_host == "127.0.0.1"
    assert GatewaySettings(model=model, admin_host="10.0.0.1", insecure=True).admin_host == "10.0.0.1"


def test_admin_option_names_exist_in_this_grpc() -> None:
    library = Path(str(sys.modules["grpc._cython.cygrpc"].__file__)).read_bytes()
    for name, _ in admin_options():
        assert name.encode() + b"\0" in library, name
