"""A gateway made of scripts: speaks pagemill.v1 over real sockets, knows no model."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import grpc.aio
from google.protobuf import any_pb2, duration_pb2
from google.rpc import code_pb2, error_details_pb2, status_pb2  # type: ignore[import-untyped]
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pagemill.v1 import inference_pb2 as pb
from pagemill.v1 import inference_pb2_grpc, model_pb2, model_pb2_grpc

Script = Callable[[pb.GenerateRequest, Any, int], Awaitable[None]]
"""Gets the request, the call's context (`write` sends) and the number of the attempt, from 1."""


def accepted(request: pb.GenerateRequest, num_prompt_tokens: int = 3, seed: int = 7) -> pb.GenerateResponse:
    return pb.GenerateResponse(
        accepted=pb.Accepted(
            request_id=request.request_id, num_prompt_tokens=num_prompt_tokens, seed=seed, model="fake"
        )
    )


def delta(first_index: int, ids: list[int], text: str = "", output_index: int = 0) -> pb.GenerateResponse:
    return pb.GenerateResponse(
        delta=pb.OutputDelta(output_index=output_index, first_index=first_index, token_ids=ids, text=text)
    )


def finished(
    reason: pb.FinishReason = pb.FINISH_REASON_LENGTH,
    completion_tokens: int = 0,
    output_index: int = 0,
    cached_tokens: int = 0,
    **match: Any,
) -> pb.GenerateResponse:
    usage = pb.Usage(prompt_tokens=3, completion_tokens=completion_tokens, cached_tokens=cached_tokens)
    return pb.GenerateResponse(
        finished=pb.Finished(output_index=output_index, reason=reason, usage=usage, bill=pb.Bill(queue_ms=5), **match)
    )


async def echo(request: pb.GenerateRequest, context: Any, attempt: int) -> None:
    """Answers with ids 0, 1, … and one letter per token, up to max_tokens."""
    await context.write(accepted(request))
    n = request.stopping.max_tokens or 3
    for i in range(n):
        await context.write(delta(i, [i], chr(ord("a") + i % 26)))
    await context.write(finished(completion_tokens=n))


async def refuse(
    context: Any,
    status: grpc.StatusCode,
    reason: str,
    message: str = "no",
    *,
    violations: dict[str, str] | None = None,
    retry_after_s: float | None = None,
    pushback_ms: int | None = None,
) -> None:
    """Ends the call as a real gateway does: status, ErrorInfo and the rest in the details."""
    details: list[Any] = [error_details_pb2.ErrorInfo(reason=reason, domain="pagemill")]
    if violations:
        fields = [error_details_pb2.BadRequest.FieldViolation(field=f, description=d) for f, d in violations.items()]
        details.append(error_details_pb2.BadRequest(field_violations=fields))
    if retry_after_s is not None:
        delay = duration_pb2.Duration(nanos=int(retry_after_s * 1e9))
        details.append(error_details_pb2.RetryInfo(retry_delay=delay))
    packed = []
    for item in details:
        packed.append(any_pb2.Any())
        packed[-1].Pack(item)
    raw = status_pb2.Status(code=getattr(code_pb2, status.name), message=message, details=packed).SerializeToString()
    trailers: list[tuple[str, Any]] = [("grpc-status-details-bin", raw)]
    if pushback_ms is not None:
        trailers.append(("grpc-retry-pushback-ms", str(pushback_ms)))
    await context.abort(status, message, tuple(trailers))


class FakeGateway(
    inference_pb2_grpc.InferenceServiceServicer,
    model_pb2_grpc.ModelServiceServicer,
    health_pb2_grpc.HealthServicer,  # type: ignore[misc]
):
    """What arrived is in `requests`; `script` decides the answers of Generate."""

    def __init__(self) -> None:
        self.script: Script = echo
        self.ready = True
        self.requests: list[pb.GenerateRequest] = []
        self.unary: list[Any] = []
        self.full_times = 0
        """How many calls of Tokenize meet a full queue first."""
        self.deadlines: list[float | None] = []
        self.cancelled = asyncio.Event()
        self.target = ""

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> None:
        self.requests.append(request)
        self.deadlines.append(context.time_remaining())
        try:
            await self.script(request, context, len(self.requests))
        except asyncio.CancelledError:
            self.cancelled.set()
            raise

    async def Cancel(self, request: pb.CancelRequest, context: Any) -> pb.CancelResponse:
        self._note(request, context)
        return pb.CancelResponse(cancelled=request.request_id == "alive")

    async def Tokenize(self, request: pb.TokenizeRequest, context: Any) -> pb.TokenizeResponse:
        self._note(request, context)
        if self.full_times > 0:
            self.full_times -= 1
            await refuse(context, grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL", retry_after_s=0.01)
        return pb.TokenizeResponse(token_ids=range(3))

    async def Detokenize(self, request: pb.DetokenizeRequest, context: Any) -> pb.DetokenizeResponse:
        self._note(request, context)
        return pb.DetokenizeResponse(text="".join(map(chr, request.token_ids)))

    async def ListModels(self, request: Any, context: Any) -> model_pb2.ListModelsResponse:
        self._note(request, context)
        return model_pb2.ListModelsResponse(models=[self._model()])

    async def GetModel(self, request: model_pb2.GetModelRequest, context: Any) -> model_pb2.GetModelResponse:
        self._note(request, context)
        if request.model not in ("", "fake"):
            await refuse(context, grpc.StatusCode.NOT_FOUND, "MODEL_NOT_FOUND", "there is no such model")
        return model_pb2.GetModelResponse(info=self._model())

    async def Check(self, request: Any, context: Any) -> health_pb2.HealthCheckResponse:
        ready = self.ready or not request.service
        kind = health_pb2.HealthCheckResponse
        return kind(status=kind.SERVING if ready else kind.NOT_SERVING)

    def _note(self, request: Any, context: Any) -> None:
        self.unary.append(request)
        self.deadlines.append(context.time_remaining())

    @staticmethod
    def _model() -> model_pb2.ModelInfo:
        limits = model_pb2.RequestLimits(max_outputs=16)
        return model_pb2.ModelInfo(
            name="fake", vocab_size=100, max_model_len=64, eos_token_ids=[2, 3], chat_template="t", limits=limits
        )


@contextlib.asynccontextmanager
async def serving(gateway: FakeGateway, address: str = "127.0.0.1:0") -> AsyncIterator[FakeGateway]:
    """Serves on `address`; `gateway.target` is where."""
    server = grpc.aio.server()
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(gateway, server)  # type: ignore[no-untyped-call]
    model_pb2_grpc.add_ModelServiceServicer_to_server(gateway, server)  # type: ignore[no-untyped-call]
    health_pb2_grpc.add_HealthServicer_to_server(gateway, server)
    port = server.add_insecure_port(address)
    gateway.target = address if address.startswith("unix:") else f"127.0.0.1:{port}"
    await server.start()
    try:
        yield gateway
    finally:
        await server.stop(grace=None)
