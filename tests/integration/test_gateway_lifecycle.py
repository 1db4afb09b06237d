"""Cancellation, deadlines, slow clients, drain, readiness, and sessions that come and go."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pagemill import columns
from pagemill.engine.v1 import frontend_pb2 as wire
from pagemill.errors import PUSHBACK_KEY, Reason
from pagemill.links import SendOutcome
from pagemill.v1 import inference_pb2 as pb
from pagemill.v1 import inference_pb2_grpc
from pagemill_client.channel import channel_options
from scheduler_svc.gateway.server import READINESS_SERVICE, server_options
from tests.integration.gateway_fixture import (
    DEADLINE_S,
    EOF,
    FakeStream,
    Rig,
    collect,
    connect,
    emit,
    reason_of,
    rest_of,
    running_gateway,
    until,
)

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


def request(max_tokens: int = 100, text: str = "x", request_id: str = "") -> pb.GenerateRequest:
    made = pb.GenerateRequest(text=text, request_id=request_id)
    made.stopping.max_tokens = max_tokens
    return made


async def health(rig: Rig, service: str = READINESS_SERVICE) -> int:
    stub = health_pb2_grpc.HealthStub(rig.channel)
    return int((await stub.Check(health_pb2.HealthCheckRequest(service=service))).status)


async def endless(stream: FakeStream, pause_s: float = 0.002) -> None:
    """A token every few milliseconds until it is cancelled."""
    stream.accept()
    for i in range(stream.sent, stream.submit.max_tokens):
        if stream.cancelled.is_set():
            break
        stream.tokens([97 + i % 26])
        await asyncio.sleep(pause_s)
    stream.end(wire.END_REASON_CANCELLED if stream.cancelled.is_set() else wire.END_REASON_LENGTH)


async def unhurried(stream: FakeStream) -> None:
    """Will not end by itself within a test."""
    await endless(stream, pause_s=0.5)


async def never_accept(stream: FakeStream) -> None:
    await stream.cancelled.wait()
    stream.end(wire.END_REASON_CANCELLED)


async def accept_only(stream: FakeStream) -> None:
    stream.accept()
    await stream.cancelled.wait()
    stream.end(wire.END_REASON_CANCELLED)


# ---- cancel ----


@pytest.mark.parametrize("script", [never_accept, accept_only, unhurried], ids=["queued", "prefill", "decode"])
@pytest.mark.parametrize("how", ["cancel", "deadline", "close"])
async def test_b70_b71_b78_a_client_that_leaves_frees_everything(script: Any, how: str) -> None:
    async with running_gateway() as rig:
        rig.scheduler.script = script
        channel = connect(rig.gateway.port)
        stub = channel.unary_stream("/pagemill.v1.InferenceService/Generate")
        call = stub(request().SerializeToString(), timeout=0.3 if how == "deadline" else DEADLINE_S)
        await until(lambda: len(rig.scheduler.live) == 1)
        (stream,) = rig.scheduler.live.values()
        if how == "cancel":
            call.cancel()
        elif how == "close":
            await channel.close()
        async with asyncio.timeout(2):
            await stream.cancelled.wait()
        if how == "deadline":
            assert await call.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await until(lambda: not rig.scheduler.live and len(rig.gateway.registry) == 0)
        await channel.close()
        await rig.probe()


async def test_b78_a_deadline_that_has_passed_schedules_nothing() -> None:
    async with running_gateway() as rig:
        call = rig.api.Generate(request(), timeout=1e-6)
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await collect(call)
        assert error.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await rig.probe()
        assert len(rig.scheduler.submits) == 1  # the probe's


async def test_b74_fifty_cancelled_streams_leave_their_neighbour_alone() -> None:
    async with running_gateway() as rig:
        rig.scheduler.script = endless
        neighbour = asyncio.create_task(rig.generate(request(120)))
        for _ in range(50):
            call = rig.api.Generate(request(), timeout=DEADLINE_S)
            await call.read()
            call.cancel()
        answer = await neighbour
        assert answer.token_ids == [97 + i % 26 for i in range(120)]
        await rig.probe()


async def test_cancel_ends_the_other_call_with_finished() -> None:
    async with running_gateway() as rig:
        rig.scheduler.script = endless
        call = rig.api.Generate(request(1000, request_id="mine"), timeout=DEADLINE_S)
        await call.read()
        await call.read()
        assert (await rig.api.Cancel(pb.CancelRequest(request_id="mine"))).cancelled
        events = await rest_of(call)
        assert events[-1].finished.reason == pb.FINISH_REASON_CANCELLED
        assert events[-1].finished.bill.queue_ms == 7
        assert await call.code() is grpc.StatusCode.OK
        assert not (await rig.api.Cancel(pb.CancelRequest(request_id="mine"))).cancelled
        await rig.probe()


async def test_cancel_of_a_queued_call_ends_it_with_finished_too() -> None:
    async with running_gateway() as rig:
        rig.scheduler.script = never_accept
        task = asyncio.create_task(rig.generate(request(request_id="mine")))
        await until(lambda: len(rig.scheduler.live) == 1)
        assert (await rig.api.Cancel(pb.CancelRequest(request_id="mine"))).cancelled
        answer = await task
        assert answer.finished.reason == pb.FINISH_REASON_CANCELLED
        assert answer.finished.usage.completion_tokens == 0


# ---- admission ----


async def test_initial_metadata_comes_with_admission_and_not_before() -> None:
    async with running_gateway() as rig:
        admit = asyncio.Event()

        async def later(stream: FakeStream) -> None:
            await admit.wait()
            stream.accept()
            await stream.cancelled.wait()

        rig.scheduler.script = later
        call = rig.api.Generate(request(), timeout=DEADLINE_S)
        metadata = asyncio.create_task(call.initial_metadata())
        await until(lambda: len(rig.scheduler.live) == 1)
        await asyncio.sleep(0.05)
        assert not metadata.done()
        admit.set()
        await metadata
        assert (await call.read()).WhichOneof("event") == "accepted"
        call.cancel()


@pytest.mark.parametrize(
    ("error", "reason", "code"),
    [
        (wire.STREAM_ERROR_QUEUE_FULL, Reason.QUEUE_FULL, grpc.StatusCode.RESOURCE_EXHAUSTED),
        (wire.STREAM_ERROR_QUEUE_TIMEOUT, Reason.QUEUE_TIMEOUT, grpc.StatusCode.RESOURCE_EXHAUSTED),
        (wire.STREAM_ERROR_DEADLINE, Reason.DEADLINE_EXCEEDED, grpc.StatusCode.DEADLINE_EXCEEDED),
        (wire.STREAM_ERROR_NO_EXECUTOR, Reason.NO_EXECUTOR, grpc.StatusCode.UNAVAILABLE),
        (wire.STREAM_ERROR_DRAINING, Reason.DRAINING, grpc.StatusCode.UNAVAILABLE),
        (wire.STREAM_ERROR_CONTEXT_LENGTH, Reason.CONTEXT_LENGTH_EXCEEDED, grpc.StatusCode.INVALID_ARGUMENT),
        (wire.STREAM_ERROR_INTERNAL, Reason.INTERNAL, grpc.StatusCode.INTERNAL),
    ],
)
async def test_refusals_of_the_scheduler_have_their_reason_and_retry_hint(
    error: int, reason: Reason, code: grpc.StatusCode
) -> None:
    async with running_gateway() as rig:

        async def refuse(stream: FakeStream) -> None:
            stream.reject(error, "numbers", retry_after_ms=250)

        rig.scheduler.script = refuse
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await rig.generate(request())
        assert (caught.value.code(), reason_of(caught.value)) == (code, reason)
        trailing: Any = caught.value.trailing_metadata()
        assert dict(trailing)[PUSHBACK_KEY] == "250"
        await rig.probe()


@pytest.mark.parametrize("retry_after_ms", [250, None])
@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (wire.STREAM_ERROR_QUEUE_TIMEOUT, Reason.QUEUE_TIMEOUT),
        (wire.STREAM_ERROR_NO_EXECUTOR, Reason.NO_EXECUTOR),
        (wire.STREAM_ERROR_DRAINING, Reason.DRAINING),
    ],
)
async def test_a_failed_end_has_the_retry_hint_of_the_scheduler(
    error: int, reason: Reason, retry_after_ms: int | None
) -> None:
    async with running_gateway() as rig:

        async def accept_and_fail(stream: FakeStream) -> None:
            stream.accept()
            stream.end(0, error, retry_after_ms=retry_after_ms)

        rig.scheduler.script = accept_and_fail
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await rig.generate(request())
        assert reason_of(caught.value) is reason
        assert _pushback(caught.value) == (retry_after_ms and str(retry_after_ms))


def _pushback(error: grpc.aio.AioRpcError) -> Any:
    """The trailer that tells when to retry, None without."""
    trailing: Any = error.trailing_metadata()
    return dict(trailing).get(PUSHBACK_KEY)


def _eager_channel(port: int) -> Any:
    """Retries as the client library does, but soon and never throttled, which would hide what is looked for."""
    options = dict(channel_options(f"127.0.0.1:{port}"))
    config = json.loads(options["grpc.service_config"])
    del config["retryThrottling"]
    (method,) = config["methodConfig"]
    policy = method["retryPolicy"]
    policy["initialBackoff"] = policy["maxBackoff"] = "0.02s"  # at 1 ms, gRPC 1.85 lost 19 retries of 40
    options["grpc.service_config"] = json.dumps(config)
    return grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=list(options.items()))


async def test_admitted_work_is_submitted_once_even_if_it_fails_at_once() -> None:
    errors = [wire.STREAM_ERROR_NO_EXECUTOR, wire.STREAM_ERROR_QUEUE_TIMEOUT]
    codes = [grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED]
    async with running_gateway() as rig, _eager_channel(rig.gateway.port) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)  # type: ignore[no-untyped-call]
        for i in range(200):

            async def break_at_once(stream: FakeStream, error: int = errors[i % 2]) -> None:
                stream.accept()
                stream.end(0, error)

            rig.scheduler.script = break_at_once
            call = stub.Generate(request(), timeout=DEADLINE_S)
            assert (await call.read()).WhichOneof("event") == "accepted"
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call.read()
            assert caught.value.code() is codes[i % 2]
            assert len(rig.scheduler.submits) == i + 1
        await rig.probe()


async def test_a_refusal_before_admission_is_what_the_client_retries() -> None:
    """The other side of the test above: its client does retry where it may."""
    async with running_gateway() as rig, _eager_channel(rig.gateway.port) as channel:

        async def refuse_once(stream: FakeStream) -> None:
            if len(rig.scheduler.submits) == 1:
                stream.reject(wire.STREAM_ERROR_NO_EXECUTOR)
            else:
                await emit([*b"abc"])(stream)

        rig.scheduler.script = refuse_once
        stub = inference_pb2_grpc.InferenceServiceStub(channel)  # type: ignore[no-untyped-call]
        assert (await collect(stub.Generate(request(3), timeout=DEADLINE_S))).text == "abc"
        assert len(rig.scheduler.submits) == 2


async def test_an_error_in_the_middle_comes_behind_what_was_generated() -> None:
    async with running_gateway() as rig:

        async def breaks(stream: FakeStream) -> None:
            stream.accept()
            stream.tokens([*b"ab"])
            stream.end(0, wire.STREAM_ERROR_NUMERICAL, "row 3: nan")

        rig.scheduler.script = breaks
        call = rig.api.Generate(request(), timeout=DEADLINE_S)
        await call.read()
        assert (await call.read()).delta.text == "ab"
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await call.read()
        assert reason_of(error.value) is Reason.NUMERICAL_ERROR
        await rig.probe()


async def test_live_requests_are_bounded() -> None:
    async with running_gateway(max_live_requests=2) as rig:
        rig.scheduler.script = accept_only
        calls = [rig.api.Generate(request(), timeout=DEADLINE_S) for _ in range(2)]
        await asyncio.gather(*(call.read() for call in calls))
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await rig.generate(request())
        assert reason_of(error.value) is Reason.QUEUE_FULL
        for call in calls:
            call.cancel()


async def test_an_unforeseen_exception_is_an_id_and_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    async with running_gateway() as rig:

        def explode(*_: object, **__: object) -> None:
            raise RuntimeError("secret path /etc/passwd")

        rig.gateway.inference._new_stream = explode  # type: ignore[assignment, method-assign]
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await rig.generate(request())
        assert error.value.code() is grpc.StatusCode.INTERNAL
        assert reason_of(error.value) is Reason.INTERNAL
        details = str(error.value.details())
        assert "secret" not in details
        assert "RuntimeError" not in details
        error_id = details.rsplit(maxsplit=1)[-1]
        assert any(getattr(r, "kv", {}).get("error_id") == error_id for r in caplog.records)


# ---- slow clients ----


async def test_a_client_that_does_not_read_is_cut_with_slow_consumer_and_others_are_not() -> None:
    async with running_gateway(slow_client_timeout_s=2) as rig:
        rig.gateway.inference._accepted = _padded(rig, "y" * 8_000_000)  # type: ignore[method-assign]
        rig.scheduler.script = endless
        # Without probing, a reader's transport takes some 3 MB on its own; with it, up to the size of a message.
        options = [("grpc.max_receive_message_length", -1), ("grpc.http2.bdp_probe", 0)]
        async with connect(rig.gateway.port, *options) as channel:
            stub = channel.unary_stream("/pagemill.v1.InferenceService/Generate")
            slow = [stub(request(90).SerializeToString(), timeout=DEADLINE_S) for _ in range(2)]
            await until(lambda: rig.gateway.metrics.requests.labels("slow_consumer")._value.get() > 0)
            answer = await rig.generate(request(50))
            assert len(answer.token_ids) == 50
            codes = []
            for call in slow:
                while not call.done():
                    try:
                        if await call.read() is EOF:
                            break
                    except grpc.aio.AioRpcError:
                        break
                codes.append(await call.code())
        assert grpc.StatusCode.ABORTED in codes
        await until(lambda: not rig.scheduler.live)


def _padded(rig: Rig, text: str) -> Any:
    """Accepted messages that are more than a transport takes from a writer whose reader does not read."""
    plain = rig.gateway.inference._accepted

    def accepted(stream: Any) -> pb.Accepted:
        message = plain(stream)
        if stream.replay.max_tokens == 90:
            message.model = text
        return message

    return accepted


async def test_tokens_that_come_while_the_writer_is_busy_become_one_message() -> None:
    async with running_gateway() as rig:
        ready = asyncio.Event()

        async def burst(stream: FakeStream) -> None:
            stream.accept()
            await ready.wait()
            for token in b"abcdefghij":
                stream.tokens([token])
            stream.end()

        rig.scheduler.script = burst
        call = rig.api.Generate(request(10), timeout=DEADLINE_S)
        await call.read()
        ready.set()
        deltas = [e.delta for e in await rest_of(call) if e.WhichOneof("event") == "delta"]
        assert "".join(d.text for d in deltas) == "abcdefghij"
        assert len(deltas) < 10


# ---- readiness, drain ----


async def test_b90_readiness_follows_the_scheduler_and_liveness_does_not() -> None:
    async with running_gateway() as rig:
        assert await health(rig) == SERVING
        rig.scheduler.status.ready = False
        start = time.monotonic()
        while await health(rig) == SERVING:
            assert time.monotonic() - start < 2
            await asyncio.sleep(0.01)
        assert await health(rig, "") == SERVING
        rig.scheduler.status.ready = True
        await until(lambda: rig.gateway.scheduler.ready)
        await rig.probe()


async def test_b90_a_silent_scheduler_turns_readiness_off() -> None:
    async with running_gateway() as rig:
        rig.scheduler.silent = True
        start = time.monotonic()
        while await health(rig) == SERVING:
            assert time.monotonic() - start < 2
            await asyncio.sleep(0.01)
        rig.scheduler.silent = False
        await until(lambda: rig.gateway.scheduler.ready)
        await rig.probe()


async def test_without_a_scheduler_new_work_waits_a_little_and_is_refused() -> None:
    async with running_gateway(session_wait_s=0.2) as rig:
        rig.scheduler.answers_hello = False
        rig.scheduler.restart()
        await until(lambda: not rig.gateway.scheduler._in_session.is_set())
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await rig.generate(request())
        assert reason_of(error.value) is Reason.NOT_READY
        rig.scheduler.answers_hello = True
        await until(lambda: rig.gateway.scheduler.ready)
        await rig.probe()


async def test_another_model_at_the_scheduler_is_not_ready() -> None:
    async with running_gateway() as rig:
        rig.scheduler.status.model_fingerprint = "other"
        await until(lambda: not rig.gateway.scheduler.ready)


async def test_b91_drain_lets_streams_finish_refuses_new_ones_and_stops() -> None:
    async with running_gateway(drain_timeout_s=10) as rig:
        rig.scheduler.script = endless
        running = [asyncio.create_task(rig.generate(request(60))) for _ in range(20)]
        await until(lambda: len(rig.scheduler.live) == 20)
        drain = asyncio.create_task(rig.gateway.drain())
        start = time.monotonic()
        while await health(rig) == SERVING:
            await asyncio.sleep(0)
        assert time.monotonic() - start < 1
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await rig.generate(request())
        assert reason_of(error.value) is Reason.DRAINING
        assert _pushback(error.value) == "1000"
        answers = await asyncio.gather(*running)
        assert all(len(a.token_ids) == 60 for a in answers)
        await asyncio.wait_for(drain, DEADLINE_S)


async def test_b91_streams_that_outlast_the_drain_get_a_terminal_status() -> None:
    async with running_gateway(drain_timeout_s=0.2) as rig:
        rig.scheduler.script = accept_only
        calls = [rig.api.Generate(request(), timeout=DEADLINE_S) for _ in range(10)]
        await asyncio.gather(*(call.read() for call in calls))
        rig.scheduler.script = never_accept
        queued = rig.api.Generate(request(), timeout=DEADLINE_S)
        await until(lambda: len(rig.scheduler.live) == 11)
        await asyncio.wait_for(rig.gateway.drain(), DEADLINE_S)
        for call in [*calls, queued]:
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await call.read()
            assert error.value.code() is grpc.StatusCode.UNAVAILABLE
            assert reason_of(error.value) is Reason.DRAINING
            assert _pushback(error.value) == "1000"


# ---- sessions ----


async def _survives(rig: Rig, trouble: Any) -> None:
    """30 streams lose no token and get none twice, whatever `trouble` does in the middle."""

    async def half(stream: FakeStream) -> None:
        """Stops in the middle; only a later session brings the rest."""
        stream.accept()
        if stream.sent:
            await endless(stream)
            return
        for i in range(50):
            stream.tokens([97 + i % 26])
            await asyncio.sleep(0.002)

    rig.scheduler.script = half
    tasks = [asyncio.create_task(rig.generate(request(100))) for _ in range(30)]
    live = rig.scheduler.live
    await until(lambda: len(live) == 30 and all(stream.sent == 50 for stream in live.values()))
    await until(lambda: all(len(s.output.token_ids) == 50 for s in rig.gateway.scheduler.table.streams.values()))
    trouble()
    answers = await asyncio.gather(*tasks)
    assert rig.scheduler.hellos >= 2
    for answer in answers:
        assert answer.token_ids == [97 + i % 26 for i in range(100)]
        assert answer.finished.usage.completion_tokens == 100
    again = [s for s in rig.scheduler.submits[30:] if s.emitted_ids]
    assert again, "nothing was resubmitted in the middle"
    first = {s.stream: s for s in rig.scheduler.submits[:30]}
    for submit in again:
        before = first[submit.stream]
        assert submit.sampling == before.sampling
        assert submit.max_tokens == before.max_tokens
        assert submit.age_ms > 0
        emitted = columns.unpack(submit.emitted_ids)
        assert emitted == [97 + i % 26 for i in range(len(emitted))]
    await rig.probe()


async def test_r3_a_scheduler_that_restarts_loses_no_stream() -> None:
    async with running_gateway() as rig:
        await _survives(rig, rig.scheduler.restart)


async def test_a_lost_frame_opens_a_new_session() -> None:
    async with running_gateway() as rig:
        await _survives(rig, rig.scheduler.skip_a_number)


async def test_a_goodbye_opens_a_new_session() -> None:
    async with running_gateway() as rig:
        await _survives(rig, lambda: rig.scheduler.post(goodbye=wire.FrontendGoodbye(reason="restart")))


async def test_tokens_that_repeat_or_belong_to_an_older_epoch_are_dropped() -> None:
    async with running_gateway() as rig:

        async def repeats(stream: FakeStream) -> None:
            stream.accept()
            stream.tokens([*b"abc"])
            stream.tokens([*b"abc"], first_index=0)
            stream.tokens([*b"bcd"], first_index=1)
            stream.scheduler._channel.epoch -= 1
            stream.tokens([*b"WRONG"])
            stream.scheduler._channel.epoch += 1
            stream.scheduler._channel.sent_seq -= 1
            stream.tokens([*b"ef"], first_index=4)
            stream.end()

        rig.scheduler.script = repeats
        answer = await rig.generate(request(6))
        assert answer.token_ids == [*b"abcdef"]
        assert rig.scheduler.hellos == 1
        assert rig.gateway.metrics.generated_tokens._value.get() == 6
        assert rig.gateway.metrics.stale.labels("stale_epoch")._value.get() == 1


async def test_missing_tokens_are_never_skipped() -> None:
    async with running_gateway() as rig:
        tries = 0

        async def skips(stream: FakeStream) -> None:
            nonlocal tries
            tries += 1
            stream.accept()
            if tries == 1:
                stream.tokens([97])
                stream.tokens([99], first_index=2)
            else:
                await emit([*b"abc"])(stream)

        rig.scheduler.script = skips
        answer = await rig.generate(request(3))
        assert answer.token_ids == [*b"abc"]
        assert tries == 2


async def test_a_full_link_delays_and_loses_nothing() -> None:
    async with running_gateway() as rig:
        link: Any = rig.gateway.link
        link.send_outcomes.extend([SendOutcome.FULL] * 5)
        rig.scheduler.script = emit([*b"abc"])
        assert (await rig.generate(request(3))).text == "abc"
        assert rig.scheduler.hellos == 1


async def test_an_admitted_stream_outlasts_a_scheduler_that_is_not_ready_for_it_yet() -> None:
    async with running_gateway() as rig:
        rig.scheduler.script = endless
        task = asyncio.create_task(rig.generate(request(100)))
        await until(lambda: len(rig.scheduler.live) == 1)
        await asyncio.sleep(0.05)
        refused = 0

        async def refuse_once(stream: FakeStream) -> None:
            nonlocal refused
            refused += 1
            if refused == 1:
                stream.reject(wire.STREAM_ERROR_NO_EXECUTOR)
            else:
                await endless(stream)

        rig.scheduler.script = refuse_once
        rig.scheduler.restart()
        answer = await task
        assert len(answer.token_ids) == 100
        assert refused == 2


async def test_garbage_on_the_link_harms_nothing() -> None:
    async with running_gateway() as rig:
        hub, peer = rig.scheduler._hub, rig.scheduler._peer
        assert peer is not None
        for frame in (b"", b"\xff" * 50, b"\x08\x01"):
            hub.send(peer, frame)
        batch = wire.TokenBatch(streams=b"\x01\x00\x00", token_ids=b"\x01\x00\x00\x00")
        rig.scheduler.post(tokens=batch)
        await until(lambda: rig.scheduler.hellos == 2)
        await until(lambda: rig.gateway.scheduler.ready)
        await rig.probe()


# ---- transport ----


def test_option_names_exist_in_this_grpc() -> None:
    """A name that grpc does not know is ignored without a word."""
    from scheduler_svc.gateway.config import GatewaySettings  # noqa: PLC0415

    library = Path(str(sys.modules["grpc._cython.cygrpc"].__file__)).read_bytes()
    for name, _ in server_options(GatewaySettings(model="x")):  # type: ignore[arg-type]
        assert name.encode() + b"\0" in library, name


async def test_a_client_that_pings_a_quiet_stream_is_not_cut_off() -> None:
    async with running_gateway() as rig:
        names = dict(server_options(rig.gateway.settings))
        assert names["grpc.http2.min_ping_interval_without_data_ms"] <= 10_000
        assert names["grpc.so_reuseport"] == 0


async def test_reflection_only_on_demand() -> None:
    from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc  # noqa: PLC0415

    for wanted in (False, True):
        async with running_gateway(reflection=wanted) as rig:
            stub = reflection_pb2_grpc.ServerReflectionStub(rig.channel)
            call = stub.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="")]))
            if wanted:
                names = [s.name async for a in call for s in a.list_services_response.service]
                assert "pagemill.v1.InferenceService" in names
            else:
                with pytest.raises(grpc.aio.AioRpcError) as error:
                    await call.read()
                assert error.value.code() is grpc.StatusCode.UNIMPLEMENTED
