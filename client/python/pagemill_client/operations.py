"""The unary calls as values: path, request, how to read the answer. Blocking and asyncio clients only send them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from grpc_health.v1 import health_pb2

from pagemill.v1 import inference_pb2 as pb
from pagemill.v1 import model_pb2
from pagemill_client.folding import model_info
from pagemill_client.options import tokenize_request
from pagemill_client.types import Message, ModelInfo

T = TypeVar("T")

GENERATE = "/pagemill.v1.InferenceService/Generate"
READINESS = "pagemill.v1.InferenceService"

DEFAULT_TIMEOUT_S = 600.0
"""Deadline of a generation: long enough for thousands of tokens on a CPU, and still an end."""
DEFAULT_UNARY_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class Unary(Generic[T]):
    """One unary call. `read` turns the response message into the result."""

    path: str
    request: Any
    response_type: Any
    read: Callable[[Any], T]


def cancel(request_id: str) -> Unary[bool]:
    """Whether the request was alive and will now end."""
    return Unary(
        "/pagemill.v1.InferenceService/Cancel",
        pb.CancelRequest(request_id=request_id),
        pb.CancelResponse,
        lambda response: bool(response.cancelled),
    )


def tokenize(prompt: str | Sequence[Message], model: str, add_special_tokens: bool) -> Unary[list[int]]:
    """Token ids exactly as Generate would compute them."""
    return Unary(
        "/pagemill.v1.InferenceService/Tokenize",
        tokenize_request(prompt, model, add_special_tokens),
        pb.TokenizeResponse,
        lambda response: list(response.token_ids),
    )


def detokenize(token_ids: Sequence[int], model: str, skip_special_tokens: bool) -> Unary[str]:
    """Text of token ids."""
    return Unary(
        "/pagemill.v1.InferenceService/Detokenize",
        pb.DetokenizeRequest(model=model, token_ids=token_ids, skip_special_tokens=skip_special_tokens),
        pb.DetokenizeResponse,
        lambda response: str(response.text),
    )


def list_models() -> Unary[list[ModelInfo]]:
    """All models."""
    return Unary(
        "/pagemill.v1.ModelService/ListModels",
        model_pb2.ListModelsRequest(),
        model_pb2.ListModelsResponse,
        lambda response: [model_info(info) for info in response.models],
    )


def get_model(model: str) -> Unary[ModelInfo]:
    """One model."""
    return Unary(
        "/pagemill.v1.ModelService/GetModel",
        model_pb2.GetModelRequest(model=model),
        model_pb2.GetModelResponse,
        lambda response: model_info(response.info),
    )


def check_health(service: str) -> Unary[bool]:
    """Whether the service (empty: the server as such) reports SERVING."""
    return Unary(
        "/grpc.health.v1.Health/Check",
        health_pb2.HealthCheckRequest(service=service),
        health_pb2.HealthCheckResponse,
        lambda response: bool(response.status == health_pb2.HealthCheckResponse.SERVING),
    )


def checked_timeout(timeout_s: float) -> float:
    """The timeout itself; raises ValueError unless it is a positive, finite number of seconds."""
    if not 0 < timeout_s < float("inf"):
        raise ValueError(f"Got {timeout_s = } but expected a positive, finite number of seconds")
    return timeout_s
