"""`pagemill.v1.ModelService`: the model behind this gateway and what it can do."""

from __future__ import annotations

from typing import Any

from pagemill.errors import PagemillError, Reason
from pagemill.v1 import model_pb2 as pb
from pagemill.v1 import model_pb2_grpc
from scheduler_svc.gateway.limits import LIMITS
from scheduler_svc.gateway.scheduler_client import SchedulerClient
from scheduler_svc.gateway.service import InferenceService, ServedModel

_CAPABILITIES = (
    "text",
    "token_ids",
    "sampling.temperature",
    "sampling.top_p",
    "sampling.top_k",
    "sampling.min_p",
    "sampling.seed",
    "stopping.max_tokens",
    "stopping.min_tokens",
    "stopping.stop",
    "stopping.stop_token_ids",
    "stopping.ignore_eos",
    "stopping.include_stop",
    "output.return_text",
    "output.return_token_ids",
    "priority",
    "cache_salt",
    "max_queue_ms",
)


class ModelService(model_pb2_grpc.ModelServiceServicer):
    """Describes one model."""

    def __init__(self, model: ServedModel, inference: InferenceService, scheduler: SchedulerClient) -> None:
        self._model = model
        self._inference = inference
        self._scheduler = scheduler

    async def ListModels(self, request: pb.ListModelsRequest, context: Any) -> pb.ListModelsResponse:  # noqa: N802
        """All models, which is one."""
        return pb.ListModelsResponse(models=[self._info()])

    async def GetModel(self, request: pb.GetModelRequest, context: Any) -> pb.GetModelResponse:  # noqa: N802
        """The model of that name."""
        if request.model and request.model != self._model.name:
            raise PagemillError(Reason.MODEL_NOT_FOUND, f"no such model; this server has {self._model.name}")
        return pb.GetModelResponse(info=self._info())

    def _info(self) -> pb.ModelInfo:
        info, limits = self._model.info, self._inference.limits()
        return pb.ModelInfo(
            name=self._model.name,
            architecture=info.architecture,
            fingerprint=info.fingerprint,
            tokenizer_hash=info.tokenizer_hash,
            vocab_size=info.vocab_size,
            max_model_len=limits.max_model_len,
            eos_token_ids=info.eos_token_ids,
            chat_template=info.chat_template or "",
            capabilities=[*_CAPABILITIES, *(["chat"] if info.chat_template else [])],
            kv_capacity_tokens=self._scheduler.status.kv_capacity_tokens,
            limits=pb.RequestLimits(
                max_prompt_bytes=limits.max_prompt_bytes,
                max_stop_strings=LIMITS.max_stop_strings,
                max_stop_string_chars=LIMITS.max_stop_string_chars,
                max_stop_token_ids=LIMITS.max_stop_token_ids,
                max_outputs=1,  # until output.n is supported
            ),
        )
