"""A gateway over a loopback link, and a scripted scheduler on the other end that speaks the frontend protocol."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import grpc

from pagemill import columns
from pagemill.engine.v1 import frontend_pb2 as wire
from pagemill.errors import Reason
from pagemill.framing import Channel
from pagemill.links import PeerId, SendOutcome
from pagemill.loopback import LoopbackHub, LoopbackPeer
from pagemill.model_files import ModelFormat, ModelInfo
from pagemill.v1 import inference_pb2 as pb
from pagemill.v1 import inference_pb2_grpc, model_pb2_grpc
from scheduler_svc.gateway.config import GatewaySettings
from scheduler_svc.gateway.link import Identity
from scheduler_svc.gateway.server import Gateway
from scheduler_svc.gateway.tokenizer import TextTokenizer
from tests.unit.gateway.tiny_tokenizer import CHATML, EOS, byte_level_tokenizer

MAX_MODEL_LEN = 128
DEADLINE_S = 60.0


class LoopbackAsync:
    """A loopback peer as the gateway's `AsyncLink`."""

    def __init__(self, peer: LoopbackPeer) -> None:
        self._peer = peer
        self._news = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._fd = peer.fileno()
        self._loop.add_reader(self._fd, self._news.set)
        self.send_outcomes: list[SendOutcome] = []
        self._closed = False

    def send(self, frame: bytes) -> SendOutcome:
        return self.send_outcomes.pop() if self.send_outcomes else self._peer.send(frame)

    async def recv(self) -> bytes:
        while True:
            frame = self.recv_nowait()
            if frame is not None:
                return frame
            self._news.clear()
            await self._news.wait()
            if self._closed:
                raise ConnectionAbortedError

    def recv_nowait(self) -> bytes | None:
        return None if self._closed else self._peer.recv()

    def close(self, linger_s: float = 0.0) -> None:
        if not self._closed:
            self._closed = True
            self._loop.remove_reader(self._fd)
            self._peer.close()
            self._news.set()


Script = Callable[["FakeStream"], Any]
"""Coroutine function: what the scheduler does with one stream."""


@dataclass
class FakeStream:
    """One submitted stream as the fake scheduler sees it."""

    scheduler: FakeScheduler
    submit: wire.Submit
    cancelled: asyncio.Event = field(default_factory=asyncio.Event)
    sent: int = 0

    @property
    def stream(self) -> int:
        return self.submit.stream

    @property
    def prompt_ids(self) -> list[int]:
        return columns.unpack(self.submit.prompt_ids)

    def __post_init__(self) -> None:
        self.sent = len(columns.unpack(self.submit.emitted_ids))

    def accept(self) -> None:
        self.scheduler.post(accepted=wire.StreamAccepted(stream=self.stream))

    def reject(self, error: int, message: str = "", retry_after_ms: int | None = None) -> None:
        rejected = wire.StreamRejected(stream=self.stream, error=error, message=message)  # type: ignore[arg-type]
        if retry_after_ms is not None:
            rejected.retry_after_ms = retry_after_ms
        self.scheduler.post(rejected=rejected)

    def tokens(self, ids: list[int], first_index: int | None = None) -> None:
        first = self.sent if first_index is None else first_index
        self.sent = first + len(ids)
        self.scheduler.post(
            tokens=wire.TokenBatch(
                streams=columns.pack([self.stream]),
                counts=columns.pack([len(ids)]) if len(ids) != 1 else b"",
                first_index=columns.pack([first]),
                token_ids=columns.pack(ids),
            )
        )

    def end(
        self,
        reason: int = wire.END_REASON_LENGTH,
        error: int = 0,
        message: str = "",
        retry_after_ms: int | None = None,
        cached_tokens: int = 0,
    ) -> None:
        self.scheduler.post(
            ended=wire.StreamEnded(
                stream=self.stream,
                reason=reason,  # type: ignore[arg-type]
                error=error,  # type: ignore[arg-type]
                message=message,
                num_output_tokens=self.sent,
                queue_ms=7,
                cached_tokens=cached_tokens,
                computed_tokens=len(self.prompt_ids) - cached_tokens,
                retry_after_ms=retry_after_ms,
            )
        )
        self.scheduler.live.pop(self.stream, None)


def emit(ids: list[int], per_step: int = 1, reason: int | None = None) -> Script:
    """Accept, send `ids` so many per step, end as a real scheduler would (stop ids, max_tokens, cancellation)."""

    async def script(stream: FakeStream) -> None:
        stream.accept()
        stops = set(columns.unpack(stream.submit.sampling.stop_token_ids))
        done = stream.sent
        todo = ids[done : stream.submit.max_tokens]
        for start in range(0, len(todo), per_step):
            if stream.cancelled.is_set():
                break
            part = todo[start : start + per_step]
            stop = next((i for i, t in enumerate(part) if t in stops), None)
            if stop is not None and per_step == 1:
                stream.tokens(part[: stop + 1])
                stream.end(wire.END_REASON_STOP)
                return
            stream.tokens(part)
            await asyncio.sleep(0)
        if reason is not None:
            stream.end(reason)
        elif len(ids) >= stream.submit.max_tokens and not stream.cancelled.is_set():
            stream.end(wire.END_REASON_LENGTH)
        else:
            await stream.cancelled.wait()
            stream.end(wire.END_REASON_CANCELLED)

    return script


class FakeScheduler:
    """Answers hellos, submits and cancels; runs a script per stream. `script` may be replaced at any time."""

    def __init__(self, hub: LoopbackHub) -> None:
        self._hub = hub
        self._channel = Channel(wire.FrontendEnvelope)
        self._peer: PeerId | None = None
        self._epochs = itertools.count(1000)
        self.script: Script = emit([])
        self.live: dict[int, FakeStream] = {}
        self.submits: list[wire.Submit] = []
        self.hellos = 0
        self.answers_hello = True
        self.silent = False
        self.questions: list[int] = []
        """Operations of the admin requests that came."""
        self.answer: Callable[[wire.AdminRequest], wire.AdminReply | None] = lambda _: None
        self.status = wire.SchedulerStatus(ready=True, max_model_len=MAX_MODEL_LEN, kv_capacity_tokens=4096)
        self._tasks: set[asyncio.Task[Any]] = set()
        self.tokens_after_cancel = 0

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        news = asyncio.Event()
        loop.add_reader(self._hub.fileno(), news.set)
        beat = 0.0
        try:
            while True:
                while (item := self._hub.recv()) is not None:
                    self._take(*item)
                if loop.time() >= beat and self._peer is not None and not self.silent:
                    beat = loop.time() + 0.1
                    self.post(status=self.status)
                news.clear()
                with suppress(TimeoutError):
                    async with asyncio.timeout(0.05):  # wait_for may swallow the cancellation that ends a test
                        await news.wait()
        finally:
            loop.remove_reader(self._hub.fileno())
            for task in self._tasks:
                task.cancel()

    def post(self, **body: Any) -> None:
        if self._peer is not None:
            self._hub.send(self._peer, self._channel.pack(**body))

    def skip_a_number(self) -> None:
        """As if one frame had been lost."""
        self._channel.sent_seq += 1

    def restart(self) -> None:
        """As a killed scheduler: it knows nothing and says nothing until a hello."""
        for task in self._tasks:
            task.cancel()
        self.live.clear()
        self._peer = None

    def _take(self, peer: PeerId, frame: bytes) -> None:
        envelope = self._channel.unpack(frame)
        if envelope is None or self.silent:
            return
        body = envelope.WhichOneof("body")
        if body == "hello":
            self.hellos += 1
            if self.answers_hello:
                self._start(peer, envelope)
        elif self._peer is None:
            return
        elif body == "submit":
            stream = FakeStream(self, envelope.submit)
            self.submits.append(envelope.submit)
            self.live[stream.stream] = stream
            task = asyncio.get_running_loop().create_task(self.script(stream))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        elif body == "admin_request":
            self.questions.append(envelope.admin_request.operation)
            reply = self.answer(envelope.admin_request)
            if reply is not None:
                reply.id = envelope.admin_request.id
                self.post(admin_reply=reply)
        elif body == "cancel":
            for number in columns.unpack(envelope.cancel.streams):
                if number in self.live:
                    self.live[number].cancelled.set()

    def _start(self, peer: PeerId, envelope: wire.FrontendEnvelope) -> None:
        for task in self._tasks:
            task.cancel()
        self.live.clear()
        self._peer = peer
        self._channel.open(max(envelope.epoch + 1, next(self._epochs)))
        self._channel.received_seq = 0
        self.post(start=wire.FrontendStart(chosen_protocol=1, lease_ms=1000, status=self.status))


@cache
def tiny() -> TextTokenizer:
    return TextTokenizer(byte_level_tokenizer())


def tiny_info(chat_template: str | None = CHATML, max_model_len: int = MAX_MODEL_LEN) -> ModelInfo:
    return ModelInfo(
        path=Path("tiny"),
        format=ModelFormat.HF_DIRECTORY,
        name="tiny",
        architecture="llama",
        config={},
        vocab_size=tiny().vocab_size,
        max_model_len=max_model_len,
        eos_token_ids=(EOS,),
        bos_token_id=None,
        add_bos_token=False,
        special_tokens={"eos_token": "<|im_end|>"},
        chat_template=chat_template,
        fingerprint="f" * 64,
        tokenizer_hash="t" * 64,
        gguf=None,
        tensors=None,
    )


@dataclass
class Rig:
    """A running gateway, its fake scheduler, and a client."""

    gateway: Gateway
    scheduler: FakeScheduler
    channel: Any
    """A `grpc.aio.Channel`; its published stubs are older than the library."""

    @property
    def api(self) -> inference_pb2_grpc.InferenceServiceStub:
        return inference_pb2_grpc.InferenceServiceStub(self.channel)  # type: ignore[no-untyped-call]

    @property
    def models(self) -> model_pb2_grpc.ModelServiceStub:
        return model_pb2_grpc.ModelServiceStub(self.channel)  # type: ignore[no-untyped-call]

    async def generate(self, request: pb.GenerateRequest, timeout: float = DEADLINE_S) -> Answer:
        return await collect(self.api.Generate(request, timeout=timeout))

    async def probe(self) -> None:
        """The server still answers, rightly, and nothing is left behind by earlier calls."""
        await self.probe_beside()
        await until(lambda: len(self.gateway.registry) == 0)
        assert self.gateway.scheduler.num_streams == 0

    async def probe_beside(self) -> None:
        """The server still answers, rightly, whatever else it does."""
        before, self.scheduler.script = self.scheduler.script, emit([*b"probe answer"])
        request = pb.GenerateRequest(text="probe")
        request.stopping.max_tokens = 12
        answer = await self.generate(request)
        assert answer.text == "probe answer"
        assert answer.token_ids == [*b"probe answer"]
        self.scheduler.script = before


@dataclass
class Answer:
    """All of one stream; checks the contract of the stream while it is collected."""

    accepted: pb.Accepted
    deltas: list[pb.OutputDelta]
    finished: pb.Finished

    @property
    def text(self) -> str:
        return "".join(d.text for d in self.deltas)

    @property
    def token_ids(self) -> list[int]:
        return [i for d in self.deltas for i in d.token_ids]


async def collect(call: Any) -> Answer:
    events = [event async for event in call]
    kinds = [event.WhichOneof("event") for event in events]
    assert kinds[0] == "accepted"
    assert kinds[-1] == "finished"
    assert set(kinds[1:-1]) <= {"delta"}
    deltas = [event.delta for event in events[1:-1]]
    expected = 0
    for delta in deltas:
        assert delta.text or delta.token_ids, "empty delta"
        if delta.token_ids:
            assert delta.first_index == expected
        expected += len(delta.token_ids)
    return Answer(events[0].accepted, deltas, events[-1].finished)


EOF: Any = vars(grpc.aio)["EOF"]


def connect(port: int, *options: tuple[str, int]) -> Any:
    """A channel with a connection of its own."""
    own = ("grpc.use_local_subchannel_pool", 1)
    return grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=[own, *options])


async def rest_of(call: Any) -> list[pb.GenerateResponse]:
    """What is left of a stream that was begun with `read`."""
    events = []
    while (event := await call.read()) is not EOF:
        events.append(event)
    return events


async def until(condition: Callable[[], bool], timeout_s: float = DEADLINE_S) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.005)


def reason_of(error: grpc.aio.AioRpcError) -> Reason | None:
    """Reason in the status details, the way any client library reads it."""
    from grpc_status import rpc_status  # noqa: PLC0415

    status = rpc_status.from_call(error)  # type: ignore[arg-type]
    if status is None:
        return None
    from google.rpc import error_details_pb2  # type: ignore[import-untyped]  # noqa: PLC0415

    for detail in status.details:
        info = error_details_pb2.ErrorInfo()
        if detail.Unpack(info):
            assert info.domain == "pagemill"
            return Reason(info.reason)
    return None


def violations_of(error: grpc.aio.AioRpcError) -> list[str]:
    from google.rpc import error_details_pb2  # noqa: PLC0415
    from grpc_status import rpc_status  # noqa: PLC0415

    status = rpc_status.from_call(error)  # type: ignore[arg-type]
    bad = error_details_pb2.BadRequest()
    return [v.field for d in (status.details if status else []) if d.Unpack(bad) for v in bad.field_violations]


@asynccontextmanager
async def running_gateway(
    info: ModelInfo | None = None, tokenizer: TextTokenizer | None = None, **settings: Any
) -> AsyncIterator[Rig]:
    hub = LoopbackHub(bound=10_000)
    link = LoopbackAsync(hub.connect(PeerId(b"gateway/test/1")))
    scheduler = FakeScheduler(hub)
    mine: dict[str, Any] = {"model": Path("tiny"), "port": 0, "metrics_port": 0, "admin_port": 0}
    options = GatewaySettings(**mine | settings)
    info = info or tiny_info()
    identity = Identity("test", "1", "localhost", info.fingerprint)
    gateway = Gateway(options, info, tokenizer or tiny(), link, identity)
    running = asyncio.create_task(scheduler.run())
    await gateway.start()
    channel = connect(gateway.port)
    try:
        await until(lambda: gateway.scheduler.ready or not scheduler.answers_hello)
        yield Rig(gateway, scheduler, channel)
    finally:
        await channel.close()
        await gateway.stop()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        hub.close()
