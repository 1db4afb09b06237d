"""How many tokens a second one gateway process carries, and what it costs: a fake scheduler paces N streams.

Three processes: this one is the scheduler (one TokenBatch per step for all streams, over a real socket), the gateway
is the real `python -m scheduler_svc.gateway`, and the clients are a third. Run `python bench/bench_gateway.py`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import grpc

from pagemill import columns
from pagemill.engine.v1 import frontend_pb2 as wire
from pagemill.framing import Channel
from pagemill.links import PeerId
from pagemill.model_files import find_demo_model
from pagemill.v1 import inference_pb2 as pb
from pagemill.v1 import inference_pb2_grpc
from pagemill.zmq_links import GATEWAY_BOUND, ZmqHub, wait

WORDS = [28120, 905, 30, 339, 314, 253, 1135, 282]  # plain tokens of the demo model


class Pacer:
    """The scheduler's end: accepts every stream and sends one token per step to each once all are there."""

    def __init__(self, hub: ZmqHub) -> None:
        self.hub = hub
        self.channel: Channel[wire.FrontendEnvelope] = Channel(wire.FrontendEnvelope)
        self.peer: PeerId | None = None
        self.streams: list[int] = []
        self.full = 0

    def post(self, **body: Any) -> None:
        if self.peer is not None and self.hub.send(self.peer, self.channel.pack(**body)).value != "sent":
            self.channel.sent_seq -= 1
            self.full += 1

    def serve(self, until: float) -> None:
        """Answer what comes until that moment."""
        while (left := until - time.monotonic()) > 0:
            wait([self.hub], min(left, 0.1))
            while (item := self.hub.recv()) is not None:
                self._take(*item)
            self.post(status=wire.SchedulerStatus(ready=True, max_model_len=8192))

    def _take(self, peer: PeerId, frame: bytes) -> None:
        envelope = self.channel.unpack(frame)
        body = envelope.WhichOneof("body") if envelope else None
        if envelope is None:
            return
        if body == "hello":
            self.peer = peer
            self.channel.open(envelope.epoch + int(time.time() * 1000))
            status = wire.SchedulerStatus(ready=True, max_model_len=8192)
            self.post(start=wire.FrontendStart(chosen_protocol=1, lease_ms=10_000, status=status))
        elif body == "submit":
            self.streams.append(envelope.submit.stream)
            self.post(accepted=wire.StreamAccepted(stream=envelope.submit.stream))
        elif body == "cancel":
            gone = set(columns.unpack(envelope.cancel.streams))
            self.streams = [s for s in self.streams if s not in gone]

    def run(self, steps: int, rate: float) -> None:
        """`steps` steps at `rate` a second."""
        start = time.monotonic()
        streams = columns.pack(self.streams)
        for step in range(steps):
            self.serve(start + step / rate)
            count = len(self.streams)
            tokens = columns.pack([WORDS[step % len(WORDS)]] * count)
            self.post(
                tokens=wire.TokenBatch(streams=streams, first_index=columns.pack([step] * count), token_ids=tokens)
            )
        for stream in self.streams:
            self.post(ended=wire.StreamEnded(stream=stream, reason=wire.END_REASON_LENGTH, num_output_tokens=steps))
            if self.full:
                self.serve(time.monotonic() + 0.01)
        self.streams = []


async def client(address: str, streams: int, tokens: int, channels: int) -> dict[str, float]:
    """Read `streams` streams at once; says how many tokens and messages came and how late they were."""
    pool = [grpc.aio.insecure_channel(address, [("grpc.use_local_subchannel_pool", 1)]) for _ in range(channels)]
    totals = {"tokens": 0, "messages": 0, "chars": 0}
    gaps: list[float] = []

    async def one(index: int) -> None:
        api = inference_pb2_grpc.InferenceServiceStub(pool[index % channels])  # type: ignore[no-untyped-call]
        request = pb.GenerateRequest(text="hello")
        request.stopping.max_tokens = tokens
        last = 0.0
        async for event in api.Generate(request):
            if event.WhichOneof("event") == "delta":
                now = time.perf_counter()
                if last:
                    gaps.append(now - last)
                last = now
                totals["tokens"] += len(event.delta.token_ids)
                totals["messages"] += 1
                totals["chars"] += len(event.delta.text)

    await asyncio.gather(*(one(i) for i in range(streams)))
    gaps.sort()
    for channel in pool:
        await channel.close(None)
    return {**totals, "p50_gap_ms": 1e3 * gaps[len(gaps) // 2], "p99_gap_ms": 1e3 * gaps[int(len(gaps) * 0.99)]}


def cpu_seconds(pid: int) -> float:
    """User and system time of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def rss_mib(pid: int) -> float:
    """Resident memory of a process."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def measure(
    pacer: Pacer, gateway: subprocess.Popen[bytes], address: str, *, streams: int, rate: float, steps: int
) -> dict[str, Any]:
    """One run; figures of the gateway process while tokens flow."""
    argv = [sys.executable, __file__, "--client", address, "--streams", str(streams), "--steps", str(steps)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE) as reader:
        while len(pacer.streams) < streams:
            pacer.serve(time.monotonic() + 0.05)
        cpu, start = cpu_seconds(gateway.pid), time.monotonic()
        pacer.run(steps, rate)
        while cpu_seconds(gateway.pid) and reader.poll() is None:
            pacer.serve(time.monotonic() + 0.02)
        wall, used = time.monotonic() - start, cpu_seconds(gateway.pid) - cpu
        assert reader.stdout is not None
        seen = json.loads(reader.stdout.read())
    return {
        "streams": streams,
        "offered_tokens_per_s": round(streams * rate),
        "delivered_tokens_per_s": round(seen["tokens"] / wall),
        "gateway_cpu_share": round(used / wall, 3),
        "gateway_us_per_token": round(1e6 * used / seen["tokens"], 1),
        "tokens_per_message": round(seen["tokens"] / seen["messages"], 2),
        "p50_gap_ms": round(seen["p50_gap_ms"], 1),
        "p99_gap_ms": round(seen["p99_gap_ms"], 1),
        "all_tokens_arrived": seen["tokens"] == streams * steps,
        "gateway_rss_mib": round(rss_mib(gateway.pid)),
        "link_full": pacer.full,
    }


def main() -> None:
    """Parse options, run, print JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--client", help=argparse.SUPPRESS)
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--rate", type=float, default=40.0, help="tokens per second and stream")
    parser.add_argument("--steps", type=int, default=400, help="tokens per stream")
    parser.add_argument("--overload", type=int, default=1024, help="streams of a second, overloaded run; 0: none")
    options = parser.parse_args()
    if options.client:
        channels = max(1, options.streams // 64)
        print(json.dumps(asyncio.run(client(options.client, options.streams, options.steps, channels))))
        return
    with tempfile.TemporaryDirectory(prefix="pm-") as folder:
        endpoint = f"ipc://{folder}/g.sock"
        pacer = Pacer(ZmqHub(endpoint, role="gateway", bound=GATEWAY_BOUND))
        log = Path(folder) / "log"
        argv = [sys.executable, "-m", "scheduler_svc.gateway", "--model", str(find_demo_model()), "--port", "0"]
        argv += ["--metrics-port", "0", "--scheduler-endpoint", endpoint]
        begin = time.monotonic()
        with log.open("wb") as out:
            gateway = subprocess.Popen(argv, stderr=out)
        while not (found := re.search(r"serving host=(\S+) port=(\d+)", log.read_text())):
            time.sleep(0.01)
        while pacer.peer is None:
            pacer.serve(time.monotonic() + 0.01)
        ready_s = time.monotonic() - begin
        try:
            address = f"{found[1]}:{found[2]}"
            runs = [measure(pacer, gateway, address, streams=options.streams, rate=options.rate, steps=options.steps)]
            if options.overload:
                runs.append(measure(pacer, gateway, address, streams=options.overload, rate=options.rate, steps=200))
        finally:
            gateway.kill()
            gateway.wait()
            pacer.hub.close()
    print(json.dumps({"start_to_session_s": round(ready_s, 2), "cores": os.cpu_count(), "runs": runs}, indent=2))


if __name__ == "__main__":
    main()
