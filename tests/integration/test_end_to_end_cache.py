"""Prefix cache and admin service through a real stack: what clients are billed, and what an operator sees and does."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import grpc
import pytest

from pagemill.v1 import admin_pb2 as pb
from pagemill.v1 import admin_pb2_grpc
from pagemill_client import AsyncClient, Generation
from tests.integration.serve_process import SMALL, ServeProcess

pytestmark = [pytest.mark.model, pytest.mark.timeout(180)]

PROMPT = "one two three four five six seven eight nine ten " * 20


@pytest.fixture(scope="module")
def admin_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="module")
def service(admin_port: int) -> Iterator[ServeProcess]:
    options = [*SMALL, f"--admin-port={admin_port}"]
    with ServeProcess("--model", "demo", "--executor.dtype=float32", *options) as service:
        assert service.target
        yield service


async def greedy(client: AsyncClient, salt: str = "") -> Generation:
    return await client.generate(PROMPT, temperature=0.0, max_tokens=8, ignore_eos=True, cache_salt=salt).collect()


def cached(generation: Generation) -> int:
    assert generation.finished is not None
    usage, bill = generation.finished.usage, generation.finished.bill
    assert usage.cached_tokens < usage.prompt_tokens
    assert bill.computed_tokens >= usage.prompt_tokens - usage.cached_tokens
    return usage.cached_tokens


async def test_a_prompt_seen_before_is_billed_as_cached_and_only_under_its_salt(
    service: ServeProcess, admin_port: int
) -> None:
    async with AsyncClient(service.target) as client, grpc.aio.insecure_channel(f"127.0.0.1:{admin_port}") as channel:
        admin = admin_pb2_grpc.AdminServiceStub(channel)  # type: ignore[no-untyped-call]
        first, again = await greedy(client), await greedy(client)
        assert first.token_ids == again.token_ids
        assert cached(first) == 0
        assert cached(again) > 150
        other = await greedy(client, "a-salt-of-its-own")
        assert cached(other) == 0
        assert cached(await greedy(client, "a-salt-of-its-own")) > 150
        assert other.token_ids == first.token_ids

        load = await admin.GetLoad(pb.GetLoadRequest(), timeout=30)
        device = next(tier for tier in load.tiers if tier.tier == "device")
        assert device.cached_blocks > 0
        assert (load.live_requests, load.running_requests, device.used_blocks) == (0, 0, 0)
        assert list((await admin.CheckInvariants(pb.CheckInvariantsRequest(), timeout=30)).violations) == []
        flushed = await admin.FlushPrefixCache(pb.FlushPrefixCacheRequest(), timeout=30)
        assert flushed.num_blocks >= device.cached_blocks
        after = await admin.GetLoad(pb.GetLoadRequest(), timeout=30)
        assert next(tier for tier in after.tiers if tier.tier == "device").cached_blocks == 0
        assert cached(await greedy(client)) == 0
        info = await admin.GetServerInfo(pb.GetServerInfoRequest(), timeout=30)
        assert (info.ready, info.scheduler_connected, info.num_executors) == (True, True, 1)
        assert info.model_fingerprint
