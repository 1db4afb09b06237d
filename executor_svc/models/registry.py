"""Picks who runs a model: the own implementation where there is one, else transformers; says why."""

from __future__ import annotations

import contextlib
import logging

import torch

from executor_svc.models.base import CausalLM
from executor_svc.models.llama import ARCHITECTURES, LlamaModel, LlamaSpec, llama_spec
from executor_svc.models.loading import WeightLoader
from executor_svc.models.rope import UnsupportedModelError
from executor_svc.native.library import Library
from executor_svc.weights.quantised import KEPT_TYPES
from executor_svc.weights.source import open_source
from pagemill.logs import kv
from pagemill.model_files import ModelFormat, ModelInfo

log = logging.getLogger(__name__)


def has_own_implementation(info: ModelInfo) -> bool:
    """Whether the own implementation runs it, and with it the compiled kernels."""
    return _own_spec(info)[0] is not None


def _own_spec(info: ModelInfo) -> tuple[LlamaSpec | None, str]:
    """What the own implementation makes of the configuration, None if it cannot run it; and why."""
    architecture = _architecture(info)
    if architecture not in ARCHITECTURES:
        return None, f"no own implementation of {architecture}"
    try:
        return llama_spec(info.config), "llama shape"
    except UnsupportedModelError as error:
        return None, str(error)


def _architecture(info: ModelInfo) -> str:
    return str((info.config.get("architectures") or ["none"])[0])


def load_model(
    info: ModelInfo,
    dtype: torch.dtype,
    kernels: Library | None,
    weight_dtype: str = "auto",
    *,
    deterministic: bool = False,
) -> CausalLM:
    """The model with its weights in memory, computing with `kernels` or, if None, with torch alone.

    `weight_dtype`, `deterministic`: see `executor_svc.models.loading`. Raises UnsupportedModelError or WeightError with
    one line. transformers is imported only if it is needed (seconds).
    """
    architecture = _architecture(info)
    spec, reason = _own_spec(info)
    if weight_dtype != "auto":
        _check_weight_dtype(info, weight_dtype, None if spec is not None else reason)
    if spec is not None:
        log.info("model", extra=kv(architecture=architecture, implementation="own", reason=reason))
        # Closed also when it fails: an exception that somebody keeps would keep the threads.
        with contextlib.closing(open_source(info)) as source:
            loader = WeightLoader(source, dtype, kernels, weight_dtype, deterministic=deterministic)
            return LlamaModel(spec, loader, dtype)
    if info.format is ModelFormat.GGUF:
        raise UnsupportedModelError(f"{info.path.name}: {reason}; transformers runs only Hugging Face directories")
    log.info("model", extra=kv(architecture=architecture, implementation="transformers", reason=reason))
    from executor_svc.models.transformers_model import TransformersModel  # noqa: PLC0415

    return TransformersModel(info, dtype)


def _check_weight_dtype(info: ModelInfo, weight_dtype: str, not_own: str | None) -> None:
    """Raises UnsupportedModelError if weights cannot be kept so; `not_own`: why transformers would run the model."""
    flag = f"--weight-dtype {weight_dtype}"
    if not_own is not None:
        raise UnsupportedModelError(f"{flag}: only the own implementation computes with such weights ({not_own})")
    if weight_dtype == "gguf":
        if info.gguf is None:
            raise UnsupportedModelError(f"{flag}: {info.path.name} is no GGUF file")
        kinds = {tensor.type.name for tensor in info.gguf.tensors.values() if len(tensor.shape) == 2}
        if kinds.isdisjoint(KEPT_TYPES):
            raise UnsupportedModelError(
                f"{flag}: {info.path.name} has no matrix in {', '.join(KEPT_TYPES)} ({', '.join(sorted(kinds))})"
            )
