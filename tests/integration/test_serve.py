"""`pagemill serve` and `pagemill demo` as an operator meets them: failing starts, draining, the end."""

from __future__ import annotations

import asyncio
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pagemill_client import Accepted, AsyncClient, Finished, PagemillError, UnavailableError
from pagemill_client.aio import AsyncGenerateStream
from tests.integration.serve_process import SMALL, ServeProcess

pytestmark = [pytest.mark.model, pytest.mark.timeout(150)]


async def ending(stream: AsyncGenerateStream) -> str:
    """The one terminal event of a stream."""
    try:
        events = [event async for event in stream]
    except PagemillError as error:
        return error.reason or error.status
    assert isinstance(events[-1], Finished)
    return events[-1].reason.name


async def abort_beside_a_long_prefill(client: AsyncClient, times: int) -> None:
    """The other request gets its tokens, however many leave meanwhile (B74)."""
    neighbour = client.generate([7] * 400, max_tokens=2, ignore_eos=True)
    assert isinstance(await anext(neighbour), Accepted)
    for i in range(times):
        async with client.generate(f"Nobody reads {i}", max_tokens=1000, ignore_eos=True) as stream:
            assert isinstance(await anext(stream), Accepted)
    assert len((await neighbour.collect()).token_ids) == 2


async def test_b74_sigterm_drains_in_order_and_every_stream_ends() -> None:
    with ServeProcess("--model", "demo", *SMALL) as service:
        async with AsyncClient(service.target) as client:
            await abort_beside_a_long_prefill(client, 50)
            streams = [client.generate(f"Story {i}:", max_tokens=48, ignore_eos=True) for i in range(6)]
            firsts = [await anext(stream) for stream in streams]
            assert len(firsts) == 6
            endings = [asyncio.create_task(ending(stream)) for stream in streams]
            service.stop()
            async with asyncio.timeout(10):
                while await client.ready():
                    await asyncio.sleep(0.01)
            with pytest.raises(UnavailableError):
                await client.generate("too late", max_tokens=1).collect()
            assert await asyncio.gather(*endings) == ["LENGTH"] * 6
        assert await asyncio.to_thread(service.status, 60) == 0
        assert service.lines[-1] != ""
        stops = [line for line in service.lines if " stopped" in line or "executor ends" in line]
        assert [line.split()[2] for line in stops] == ["gateway", "scheduler", "executor"]


async def test_a_second_signal_ends_everything_at_once() -> None:
    with ServeProcess("--model", "demo", *SMALL) as service:
        async with AsyncClient(service.target) as client:
            stream = client.generate("On and on", max_tokens=2000, ignore_eos=True)
            await anext(stream)
            end = asyncio.create_task(ending(stream))
            service.stop(signal.SIGINT)
            await asyncio.to_thread(service.wait_for, lambda: service.count("serve: stopping"), 10)
            start = time.monotonic()
            service.stop(signal.SIGINT)
            assert await asyncio.to_thread(service.status, 20) == 1
            assert time.monotonic() - start < 10  # and not the 30 s of a drain
            assert await end == "UNAVAILABLE"


def test_a_taken_port_is_refused_before_anything_starts() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        options = [*SMALL, "--port", str(taken.getsockname()[1])]
        with ServeProcess("--model", "demo", *options) as service:
            assert service.status(60) == 2
            assert len(service.lines) == 1
            assert service.count("pagemill serve: --port: cannot listen on 127.0.0.1:") == 1


def test_a_broken_model_file_ends_in_one_clear_line(tmp_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF" + b"\xff" * 100)
    with ServeProcess("--model", str(broken), *SMALL) as service:
        assert service.status(60) == 1
        assert service.count("ended before it was ready") == 1
        assert service.count("Traceback") == 0


def test_the_demo_answers_and_stops() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pagemill_client.cli", "demo", "--max-tokens", "24"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout
    assert "Traceback" not in done.stderr
